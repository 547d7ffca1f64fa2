import numpy as np
import pytest

from stepsight.training.corrections.doubts import HeldBackErrors, NodeDoubts, fit_doubts
from stepsight.training.corrections.intervals import ROOFLINE_LOG


def _runs(count: int, seed: int = 0, shared: float = 0.0) -> list[HeldBackErrors]:
    """Errors of products are a tenth, those of additions a third."""
    rng = np.random.default_rng(seed)
    stds = np.array([0.1, 0.3] * 40)
    weights = np.full(80, 1 / 80)
    return [
        HeldBackErrors(("linear", "add") * 40, ("forward",) * 80, stds * rng.normal(size=80) + shared * each, weights)
        for each in rng.normal(size=count)
    ]


def test_intervals_of_kinds_hold_nine_of_ten_nodes_of_other_runs() -> None:
    doubts = fit_doubts(_runs(12))
    assert 2 < doubts.half("add", "forward") / doubts.half("linear", "forward") < 4
    for kind, own in (("linear", slice(0, None, 2)), ("add", slice(1, None, 2))):
        inside = [np.abs(run.logs[own]) <= doubts.half(kind, "forward") for run in _runs(50, seed=1)]
        assert 0.85 < np.mean(inside) < 0.95


def test_a_kind_of_few_runs_has_the_interval_of_all() -> None:
    few = HeldBackErrors(("copy",), ("forward",), np.array([2.0]), np.ones(1))
    doubts = fit_doubts([*_runs(8), few])
    assert doubts.half("copy") == doubts.half("sort", "backward") == doubts.halves[""]
    assert NodeDoubts({}).half("copy") == ROOFLINE_LOG


def test_what_runs_share_does_not_average_out() -> None:
    apart, together = fit_doubts(_runs(30)).shared, fit_doubts(_runs(30, shared=0.5)).shared
    assert apart < 0.1 and together > 0.7
    shares, halves = np.full(100, 0.01), np.full(100, 0.2)
    assert NodeDoubts({}, 0.0).of_sum(shares, halves) == pytest.approx(0.02)
    assert NodeDoubts({}, 1.0).of_sum(shares, halves) == pytest.approx(0.2)


def test_doubts_are_saved_and_wild_ones_refused() -> None:
    doubts = fit_doubts(_runs(5))
    assert NodeDoubts.from_dict(doubts.to_dict()) == doubts
    with pytest.raises(ValueError, match="doubts must lie from 0"):
        NodeDoubts.from_dict({"halves": {"": -1.0}, "shared": 0.5})
