"""Failures and checkpoints, against closed forms."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.questions.training_plan import Reliability, training_plan
from stepsight.experiments.search.settings import Goal
from stepsight.training.prediction.prediction import predict

KIND = Reliability(node_mtbf_hours=5000.0, checkpoint_s=20.0, restart_s=300.0)


def test_the_interval_is_youngs() -> None:
    told = KIND.goodput(100)
    assert told["mtbf_hours"] == pytest.approx(50.0)
    assert told["checkpoint_interval_s"] == pytest.approx(math.sqrt(2 * 20.0 * 50.0 * 3600.0))


def test_shares_of_time_add_up() -> None:
    told = KIND.goodput(1000)
    assert sum(told[key] for key in ("goodput", *(key for key in told if key.startswith("lost")))) == pytest.approx(1)
    assert told["goodput"] < KIND.goodput(10)["goodput"] < 1


def test_training_takes_longer_and_costs_more_with_failures() -> None:
    job = Job.from_file(Path(__file__).parents[3] / "examples" / "llama3-70b-fsdp-512.toml")
    prediction, goal = predict(job, "roofline"), Goal(tokens=1e12, prices={"h100-sxm-80gb": 2.0})
    plain, failing = training_plan(prediction, goal), training_plan(prediction, goal, KIND)
    days = 1e12 / job.tokens * prediction.iteration_time_s / 86400
    assert plain["days"] == pytest.approx(days) and plain["device_hours"] == pytest.approx(days * 24 * 512)
    assert plain["cost"] == pytest.approx(2.0 * plain["device_hours"])
    for key in ("days", "cost", "energy_kwh", "device_hours"):
        assert failing[key] == pytest.approx(plain[key] / failing["goodput"])


@pytest.mark.parametrize("changes", [{"node_mtbf_hours": -1}, {"checkpoint_s": -1}, {"checkpoint_s": 0}])
def test_mistakes(changes: dict[str, float]) -> None:
    with pytest.raises(StepsightError, match="must"):
        replace(KIND, **changes)


def test_a_job_that_fails_too_often_is_refused() -> None:
    with pytest.raises(StepsightError, match="failures must be rarer"):
        KIND.goodput(1_000_000)
