"""Which strategies cannot be told from the best, and why."""

import math
from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.job.job import Job
from stepsight.experiments.search.choices import (
    Choice,
    SearchResult,
    by_expected_regret,
    expected_regrets,
    find_rivals,
    seconds_by_kind,
)
from stepsight.experiments.search.search import search
from stepsight.experiments.search.search_report import search_report
from stepsight.experiments.search.settings import Goal, Space


@pytest.fixture(scope="module")
def found() -> SearchResult:
    job = Job.from_dict(
        {
            "model": {"family": "gpt", "layers": 8, "hidden": 2048, "heads": 16, "vocab": 8192, "seq_len": 1024},
            "batch": {"micro_batch": 1, "global_batch": 32},
            "cluster": {"hardware": "a100-sxm-80gb", "nodes": 2, "devices_per_node": 4},
        }
    )
    return search(job, space=Space(schedules=("1f1b",), recompute=("none",)), goal=Goal(robust=True))


def test_robust_ranks_by_the_upper_end(found: SearchResult) -> None:
    """The first has the least upper end of all that fit, and this is proved."""
    ends = [choice.seconds[2] for choice in found.choices if choice.fits and choice.seconds]
    assert ends == sorted(ends) and found.gap_percent == 0


def test_kinds_add_up(found: SearchResult) -> None:
    """Seconds by kind are those of the iteration, but for what the host's launches decide."""
    by_kind = seconds_by_kind(found.best)
    assert found.best.seconds is not None and found.best.prediction is not None
    whole = (1 - found.best.prediction.simulation.launches_share) * found.best.seconds[0]
    assert sum(by_kind.values()) == pytest.approx(whole)


def test_rivals_are_within_their_error(found: SearchResult) -> None:
    """What is as fast as the best cannot be told from it; what is far slower can; shared errors cancel."""
    for rival in found.rivals:
        assert abs(rival.slower_percent) <= rival.error_percent and rival.measure in {
            *seconds_by_kind(found.best), *seconds_by_kind(rival.choice),
        }  # fmt: skip
    best = found.best
    assert best.seconds is not None
    twin = Choice(best.job, best.peak_bytes, best.capacity_bytes, best.seconds, best._predict)
    (rival,) = find_rivals([best, twin])
    assert rival.slower_percent == rival.error_percent == rival.measure_s == 0
    slow = Choice(best.job, best.peak_bytes, best.capacity_bytes, tuple(2 * s for s in best.seconds), best._predict)
    assert find_rivals([best, slow]) == ()
    half = math.log(best.seconds[2] / best.seconds[0])
    assert all(rival.error_percent < 100 * 3 * half for rival in found.rivals)


def test_expected_regrets() -> None:
    """Errors that strategies share make no regret; of equally fast strategies the surest has the least."""
    seconds = np.array([[6.0, 4.0, 0.0], [6.0, 4.0, 0.0], [6.6, 4.4, 0.0]])
    assert expected_regrets(seconds, np.zeros(3), 0.3) == pytest.approx([0.0, 0.0, 0.1])
    unlike = np.array([[10.0, 0.0, 0.0], [0.0, 10.0, 0.0], [5.0, 5.0, 0.0]])
    first, second, both = expected_regrets(unlike, np.zeros(3), 0.2)
    assert 0 < both < min(first, second) and first == pytest.approx(second, rel=0.1)
    assert expected_regrets(unlike, np.zeros(3), 0.0) == pytest.approx([0.0, 0.0, 0.0])
    assert (expected_regrets(unlike, np.full(3, 10.0), 0.2) < [first, second, both]).all()


def test_a_search_by_regret(found: SearchResult) -> None:
    """The fastest are put in the order of their regrets, which the report shows; what is slower follows."""
    goal = Goal(robust="regret")
    by_regret = search(found.best.job, space=Space(schedules=("1f1b",), recompute=("none",)), goal=goal)
    regrets = by_regret.regrets
    assert list(regrets) == sorted(regrets) and regrets[0] >= 0 and by_regret.best is by_regret.choices[0]
    fastest = min(choice.timed[0] for choice in by_regret.choices if choice.fits)
    assert by_regret.gap_percent == pytest.approx(100 * (by_regret.best.timed[0] / fastest - 1))
    report = search_report(found.best.job, by_regret, 3)
    assert report["top"][0]["expected_regret_percent"] == regrets[0] and "least expected regret" in report["text"]
    assert by_expected_regret([replace(found.best, seconds=None)])[1] == ()


def test_rivals_are_reported(found: SearchResult) -> None:
    report = search_report(found.best.job, found, 3)
    assert len(report["rivals"]) == len(found.rivals)
    assert ("cannot be told from the best" in report["text"]) == bool(found.rivals)
