import numpy as np
import pytest

from stepsight.training.corrections.calibration import Calibration, fit_scale
from stepsight.training.intervals.conformal import (
    ROOFLINE_LOG,
    UNSUPPORTED_LOG,
    Intervals,
    conformal_quantile,
    fit_intervals,
)


def test_intervals_hold_what_they_promise_on_exchangeable_runs() -> None:
    rng = np.random.default_rng(0)
    held = [abs(rng.normal()) <= fit_intervals(rng.normal(size=14), 0.0).half_width_log for _ in range(2000)]
    assert 0.88 <= np.mean(held) <= 0.97


def test_an_interval_is_never_narrower_than_the_measurements_spread() -> None:
    assert fit_intervals(np.zeros(20), 0.04).half_width_log == 0.04


def test_few_runs_give_wider_intervals() -> None:
    residuals = np.array([0.05, -0.04, 0.03])
    assert fit_intervals(residuals, 0.0).half_width_log > 0.05
    assert fit_intervals(np.zeros(0), 0.0) == Intervals()


def test_what_was_never_measured_widens_the_interval() -> None:
    assert Intervals(0.1).half_width(unsupported_share=0.5) == pytest.approx(0.1 + UNSUPPORTED_LOG / 2)


def test_a_common_bias_is_corrected_but_shrunk() -> None:
    predicted = np.linspace(1, 2, 12)
    scale = fit_scale(predicted, predicted * 1.1).scale
    assert 1.05 < scale < 1.1


def test_noise_is_not_corrected() -> None:
    rng = np.random.default_rng(3)
    assert fit_scale(np.ones(12), np.exp(rng.normal(0, 0.05, 12) * np.tile([1, -1], 6))) == Calibration()


def test_the_quantile_holds_nine_of_ten_new_ones() -> None:
    """Over many draws of few scores."""
    rng = np.random.default_rng(0)
    held = [abs(rng.normal()) <= conformal_quantile(np.abs(rng.normal(size=25)).tolist()) for _ in range(4000)]
    assert 0.88 < np.mean(held) < 0.95
    assert conformal_quantile([0.1] * 5) > 0.1  # too few for the aim
    assert conformal_quantile([]) == ROOFLINE_LOG
    assert conformal_quantile([0.1] * 5, too_few=3.0) == 3.0 and conformal_quantile([0.1] * 9, too_few=3.0) == 0.1
