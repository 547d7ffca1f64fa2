"""The strategy that a search chose, written for a framework that may not express it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stepsight.dataset.job import Job
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.training.predictor.prediction import predict
from stepsight.verbs.chosen import write_chosen

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt3-175b-1024.toml"


def result(*schedules: str) -> SearchResult:
    """Strategies that differ in their schedule, each 2 % slower than the one before."""
    job = Job.from_file(EXAMPLE)
    jobs = [replace(job, parallel=replace(job.parallel, schedule=name)) for name in schedules]
    return SearchResult([Choice(of, 1.0, 2.0, (1.02**n, 1.0, 2.0), predict) for n, of in enumerate(jobs)])


def test_what_a_framework_expresses_is_written(tmp_path: Path) -> None:
    """Megatron has no zb-h1: the next strategy is written, and what that costs is said."""
    text = write_chosen(result("zb-h1", "1f1b"), tmp_path / "train.sh", "megatron-script")
    assert "pp16-1f1b" in text and "does not express the best strategy" in text and "(+2.0 % iteration time)" in text
    assert "pp16-1f1b" in (tmp_path / "train.sh").read_text()
    assert write_chosen(result("1f1b"), tmp_path / "train.sh", "megatron-script").startswith("wrote the best strategy")


def test_where_nothing_is_expressed_the_best_is_written(tmp_path: Path) -> None:
    """With what is missing in it; a job file expresses all."""
    text = write_chosen(result("zb-h1"), tmp_path / "train.sh", "megatron-script")
    assert "expresses none of those evaluated" in text and "not expressed by megatron-script: parallel.schedule" in text
    assert (
        write_chosen(result("zb-h1", "1f1b"), tmp_path / "best.toml", "")
        == f"wrote the best strategy to {tmp_path}/best.toml"
    )
    assert Job.from_file(tmp_path / "best.toml").parallel.schedule == "zb-h1"
