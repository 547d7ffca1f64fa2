import numpy as np
import pytest

from stepsight.training.physics import Bounds, fit_physics

BOUNDS = Bounds(prior=np.array([1e-5, 1e-9]), low=np.array([1e-7, 1e-11]), high=np.array([1e-3, 1e-7]))


def test_constants_are_found_from_a_few_noisy_points() -> None:
    rng = np.random.default_rng(0)
    terms = np.stack([np.ones(12), 10 ** rng.uniform(2, 7, 12)], axis=1)
    seconds = (terms @ [3e-5, 4e-10]) * np.exp(rng.normal(0, 0.03, 12))
    fitted = fit_physics(terms, np.ones(12), seconds, BOUNDS)
    assert np.exp(fitted.log_constants) == pytest.approx([3e-5, 4e-10], rel=0.15)


def test_one_wild_point_does_not_pull_the_fit() -> None:
    terms = np.stack([np.ones(12), np.logspace(2, 7, 12)], axis=1)
    seconds = terms @ [3e-5, 4e-10]
    seconds[5] *= 20
    fitted = fit_physics(terms, np.ones(12), seconds, BOUNDS)
    assert fitted.seconds(terms, np.ones(12))[11] == pytest.approx((terms @ [3e-5, 4e-10])[11], rel=0.1)


def test_constants_stay_within_their_bounds() -> None:
    terms = np.stack([np.ones(6), np.logspace(4, 8, 6)], axis=1)
    fitted = fit_physics(terms, np.ones(6), terms @ [1e-5, 1e-13], BOUNDS)
    assert np.exp(fitted.log_constants[1]) >= BOUNDS.low[1] * 0.999


def test_sharing_among_busy_devices_is_learned() -> None:
    terms = np.stack([np.ones(20), np.tile(np.logspace(5, 8, 10), 2)], axis=1)
    busy = np.repeat([1.0, 2.0], 10)
    seconds = 1e-5 + 1e-9 * busy * terms[:, 1]
    fitted = fit_physics(terms, busy, seconds, BOUNDS)
    assert fitted.busy_exponents[1] == pytest.approx(1.0, abs=0.1)
    assert fitted.busy_exponents[0] < 0.4
