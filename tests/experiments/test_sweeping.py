"""Predicting a job over ranges of its keys."""

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.reports.comparison_report import sweep_csv, sweep_text
from stepsight.experiments.sweeping import Axis, sweep

JOB = Job.from_file(Path(__file__).parents[2] / "examples" / "gpt3-175b-1024.toml")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cluster.nodes=8..1024", (8, 16, 32, 64, 128, 256, 512, 1024)),
        ("cluster.nodes=3..13", (3, 6, 12)),
        ("cluster.nodes=8..24+8", (8, 16, 24)),
        ("parallel.recompute=none,full", ("none", "full")),
        ("parallel.sequence_parallel=true,false", (True, False)),
        ("parallel.bucket_mbytes=1.5", (1.5,)),
    ],
)
def test_axes(text: str, values: tuple[object, ...]) -> None:
    assert Axis.parse(text).values == values


@pytest.mark.parametrize(("text", "rule"), [
    ("cluster.nodes", "takes KEY="), ("cluster.nodes=9..8", "FIRST <= LAST"), ("cluster.nodes=8..9+0", "STEP > 0"),
    ("cluster.nods=1", "did you mean"),
])  # fmt: skip
def test_mistakes(text: str, rule: str) -> None:
    with pytest.raises(StepsightError, match=rule):
        Axis.parse(text)


def test_every_combination_and_why_some_are_not_legal() -> None:
    """Combinations come in order; one that breaks a rule has its reason; weak scaling keeps the time per device."""
    axes = [Axis("cluster.nodes", (64, 128)), Axis("batch.micro_batch", (1, 7))]
    points = sweep(JOB, axes, "roofline")
    assert [tuple(point.values.values()) for point in points] == [(64, 1), (64, 7), (128, 1), (128, 7)]
    assert [point.prediction is not None for point in points] == [True, False, True, False]
    assert "must divide global_batch" in points[1].problem and "not legal" in sweep_text(axes, points)
    assert len(sweep_csv(points).splitlines()) == 5
    weak = sweep(JOB, axes[:1], "roofline", weak=True)
    assert [point.prediction.job.batch.global_batch for point in weak if point.prediction] == [768, 1536]


def test_a_sweep_without_a_legal_job_is_refused() -> None:
    with pytest.raises(StepsightError, match="no job of the sweep is legal; the first one"):
        sweep(JOB, [Axis("batch.micro_batch", (7,))], "roofline")
