"""Comparing jobs and measured runs."""

import math
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.dataset.runs.run_folder import write_imported
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.experiments.questions.compare import compare_sides, comparison_text, predicted_side, run_side
from stepsight.experiments.questions.sweep import change_job
from stepsight.experiments.questions.traced_runs import diagnose, replay_runs
from stepsight.training.prediction.prediction import predict
from tests.dataset.run_folders import write_run
from tests.dataset.traced_jobs import PRODUCT, GpuJob, two_ranks

EXAMPLES = Path(__file__).parents[3] / "examples"
JOB = Job.from_file(EXAMPLES / "gpt3-175b-1024.toml")


def test_only_what_differs_is_listed() -> None:
    sides = [predicted_side(predict(JOB, "roofline"), "one")]
    sides.append(predicted_side(predict(change_job(JOB, {"parallel.schedule": "zb-h1"}), "roofline"), "other"))
    told = compare_sides(sides)
    assert set(told["facts"]) == {"parallel.schedule", "memory_gb"}
    assert told["sides"][0]["percent"] == 0 and told["sides"][1]["percent"] < 0
    for at, side in enumerate(sides):
        assert sum(row[at] for row in told["causes"].values()) == pytest.approx(side.seconds)
    text = comparison_text(told)
    assert "parallel.schedule" in text and "zb-h1" in text and "bubble" in text


def test_what_published_runs_say_of_two_jobs_is_a_fact_that_differs() -> None:
    """Else a part of the difference would have no cause: it scales every cause of a job alike."""
    job = Job.from_file(EXAMPLES / "llama2-70b-lora-8h100.toml")
    pair = predict(job), predict(change_job(job, {"parallel.tp": 8, "parallel.cp": 1}))
    told = compare_sides([predicted_side(prediction, str(at)) for at, prediction in enumerate(pair)])
    slower = [100 * math.expm1(each.published.log_factor) for each in pair if each.published]
    assert told["facts"]["published_runs"] == pytest.approx(slower, abs=0.06) and slower[0] != slower[1]


def test_a_job_is_the_same_as_itself() -> None:
    told = compare_sides([predicted_side(predict(JOB, "roofline"), name) for name in ("one", "two")])
    assert told["facts"] == {} and told["works"] == {}


def test_a_measured_run_beside_its_job(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "one")
    side = run_side(folder)
    assert side.measured and side.seconds > 0 and side.facts["model.family"]
    told = compare_sides([side, side])
    assert told["sides"][1]["percent"] == 0 and "measured" in comparison_text(told)


def test_one_thing_alone_is_refused() -> None:
    with pytest.raises(StepsightError, match="at least two"):
        compare_sides([predicted_side(predict(JOB, "roofline"), "one")])


def test_a_traced_run_takes_what_replay_and_doctor_say(tmp_path: Path) -> None:
    """A step of its slowest rank; and its critical path adds up to it."""
    found = import_ranks([file.write(tmp_path / f"{rank}.json") for rank, file in enumerate(two_ranks())])
    write_imported(found.graphs, found.sources, tmp_path / "runs", None, [])
    side = run_side(tmp_path / "runs")
    assert side.seconds == replay_runs(tmp_path / "runs")["measured_s"] == diagnose(tmp_path / "runs")["measured_s"]
    assert sum(side.causes.values()) == pytest.approx(side.seconds)


def test_two_traces_differ_by_the_kernels_that_changed(tmp_path: Path) -> None:
    """The second job's products take 1.5 times as long, and its collective is hidden by nothing as before."""
    sides = []
    for name, slow in (("before", 1.0), ("after", 1.5)):
        job = GpuJob(0, 2, slow=slow)
        sides.append(run_side(job.step(1).step(2).file.write(tmp_path / f"{name}.json")))
    told = compare_sides(sides)
    changed = [row for row in told["kernels"] if abs(row["seconds"][1] - row["seconds"][0]) > 1e-6]
    assert len(changed) == 2 and {row["name"] for row in changed} == {PRODUCT}
    assert sum(row["seconds"][1] - row["seconds"][0] for row in changed) == pytest.approx(600e-6)
    assert all(row["counts"] == [1.0, 1.0] and row["what"] in told["works"] for row in changed)
    assert sum(row[1] for row in told["kinds"].values()) == pytest.approx((1200 * 1.5 + 50 + 600 + 100) * 1e-6)
    for side in told["sides"]:
        assert side["exposed_communication_s"] == pytest.approx(600e-6)
    text = comparison_text(told)
    assert "kernels of a step" in text and "critical path of the step, ms" in text
    assert compare_sides([sides[0], sides[0]])["kernels"] == []
