"""Strengths of the levels come from runs held back; what brings nothing there counts next to nothing."""

from collections.abc import Callable

import numpy as np
import pytest

from stepsight.gnn.context_model import BOUND
from stepsight.training.context.learn_context import PRIOR_RUNS, HeldBack, HeldBackRun, solve_strengths

Truth = Callable[[np.ndarray], np.ndarray]


def _runs(truth: Truth, noise: float, count: int = 12) -> list[HeldBackRun]:
    """Runs of 40 nodes with random parts, whose targets follow from the parts, ``(nodes, 3)``."""
    rng, even = np.random.default_rng(0), np.full(40, 1 / 40)
    made = []
    for _ in range(count):
        parts = rng.normal(0, [0.5, 0.3, 0.2], (40, 3))
        target = truth(parts) + rng.normal(0, noise, 40)
        made.append(HeldBackRun(target, even, even, parts, None, np.zeros((0, 3))))
    return made


def _held(truth: Truth, noise: float = 0.05, count: int = 12) -> HeldBack:
    return HeldBack(_runs(truth, noise, count), np.arange(count) % 4)


def test_strengths_are_those_that_fit_within_0_and_1() -> None:
    """Beyond either end they stop there; an outlier hardly moves them."""
    for slopes, expected in (((0.9, 0.5, 0.2), (0.9, 0.5, 0.2)), ((1.4, 0.5, -0.3), (1.0, 0.5, 0.0))):
        runs = _runs(lambda parts, s=slopes: parts @ s, 0.02, 60)
        assert solve_strengths(runs) == pytest.approx(expected, abs=0.1)
    runs = _runs(lambda parts: parts @ [0.8, 0.8, 0.8], 0.02)
    runs[0].target[:5] += 3.0
    assert solve_strengths(runs) == pytest.approx([0.8, 0.8, 0.8], abs=0.06)


@pytest.mark.parametrize("count", [4, 12, 40])
def test_few_runs_leave_levels_near_what_they_were_trained_for(count: int) -> None:
    """The prior, 1, counts as much as some runs: parts of equal weight give a mean over runs and prior."""
    slopes = np.array([0.9, 0.5, 0.2])
    found = solve_strengths(_runs(lambda parts: parts @ slopes, 0.02, count))
    assert found == pytest.approx((count * slopes + PRIOR_RUNS) / (count + PRIOR_RUNS), abs=0.1)


def test_all_levels_count_where_each_tells_something() -> None:
    """``auto`` is then as good as the highest level, on runs whose strengths come from other runs."""
    held = _held(lambda parts: parts.sum(axis=1))
    scores = {form: float(errors.scores.mean()) for form, errors in held.errors.items()}
    assert list(scores) == ["none", "table", "features", "graph", "auto"] and scores["none"] == pytest.approx(1.0)
    assert scores["none"] > scores["table"] > scores["features"] > scores["graph"]
    assert (held.strengths > 0.8).all() and scores["auto"] < scores["features"]


def test_a_level_without_gain_counts_next_to_nothing_where_many_runs_say_so() -> None:
    held = _held(lambda parts: parts[:, 0], count=48)
    assert held.strengths[0] > 0.8 and (held.strengths[1:] < 0.1).all()
    assert (_held(lambda parts: 0 * parts[:, 0], count=48).strengths < 0.1).all()


def test_errors_are_of_bounded_corrections_and_metrics_name_every_form() -> None:
    held = _held(lambda parts: parts[:, 0])
    far = HeldBackRun(np.zeros(1), np.ones(1), np.ones(1), np.full((1, 3), 5.0), None, np.zeros((0, 3)))
    assert far.op_error(np.ones(3)) == BOUND
    metrics = held.metrics()
    assert metrics["context_held_back_none"] == pytest.approx(1.0)
    assert {f"op_error_{form}_percent" for form in held.errors} < set(metrics) and "mape_auto_percent" not in metrics


def test_without_a_network_only_the_error_without_one_is_judged() -> None:
    held = HeldBack(_runs(lambda parts: parts[:, 0], 0.02), None)
    assert set(held.errors) == {"none"} and not held.strengths.any()
