"""Which strategies cannot be told from the best, and why."""

import math

import pytest

from stepsight.dataset.job import Job
from stepsight.experiments.reports.search_report import search_report
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.experiments.search.objectives import Goal
from stepsight.experiments.search.risk import find_rivals, seconds_by_kind
from stepsight.experiments.search.search import search
from stepsight.experiments.search.space import Space


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


def test_rivals_are_reported(found: SearchResult) -> None:
    report = search_report(found.best.job, found, 3)
    assert len(report["rivals"]) == len(found.rivals)
    assert ("cannot be told from the best" in report["text"]) == bool(found.rivals)
