"""Comparing jobs and measured runs."""

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.dataset.runs.run_folder import write_imported
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.experiments.questions.compare import compare_sides, comparison_text, predicted_side, run_side
from stepsight.experiments.questions.sweep import change_job
from tests.dataset.run_folders import write_run
from tests.experiments.questions.test_traced_runs import host_bound_trace

JOB = Job.from_file(Path(__file__).parents[3] / "examples" / "gpt3-175b-1024.toml")


def test_only_what_differs_is_listed() -> None:
    sides = [predicted_side(JOB, "roofline", "one")]
    sides.append(predicted_side(change_job(JOB, {"parallel.schedule": "zb-h1"}), "roofline", "other"))
    told = compare_sides(sides)
    assert set(told["facts"]) == {"parallel.schedule", "memory_gb"}
    assert told["sides"][0]["percent"] == 0 and told["sides"][1]["percent"] < 0
    for at, side in enumerate(sides):
        assert sum(row[at] for row in told["causes"].values()) == pytest.approx(side.seconds)
    text = comparison_text(told)
    assert "parallel.schedule" in text and "zb-h1" in text and "bubble" in text


def test_a_job_is_the_same_as_itself() -> None:
    told = compare_sides([predicted_side(JOB, "roofline", name) for name in ("one", "two")])
    assert told["facts"] == {} and told["works"] == {}


def test_a_measured_run_beside_its_job(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "one")
    side = run_side(folder)
    assert side.measured and side.seconds > 0 and side.facts["model.family"]
    told = compare_sides([side, side])
    assert told["sides"][1]["percent"] == 0 and "measured" in comparison_text(told)


def test_one_thing_alone_is_refused() -> None:
    with pytest.raises(StepsightError, match="at least two"):
        compare_sides([predicted_side(JOB, "roofline", "one")])


def test_a_traced_run_takes_the_mean_of_its_steps(tmp_path: Path) -> None:
    """Not their sum; and its critical path adds up to it."""
    found = import_ranks([host_bound_trace(tmp_path / "trace.json")])
    write_imported(found.graphs, found.sources, tmp_path / "runs", None, [])
    side = run_side(tmp_path / "runs")
    (graph,) = found.graphs
    lengths = graph.steps_s[:, 1] - graph.steps_s[:, 0]
    assert len(lengths) == 2 and side.seconds < 1.5 * lengths.max()
    assert sum(side.causes.values()) == pytest.approx(side.seconds)
