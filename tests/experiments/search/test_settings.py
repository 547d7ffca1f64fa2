"""Clusters, batches and lengths are compared by what the user pays for."""

from dataclasses import replace
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.choices import SearchResult
from stepsight.experiments.search.search import search
from stepsight.experiments.search.search_report import plot_result, search_report
from stepsight.experiments.search.settings import Goal, Scenarios, Space, read_prices

SMALL = Space(schedules=("1f1b",), zero_stages=(0, 1), recompute=("none",), micro_batches=(1, 2))
PRICES = {"a100-sxm-80gb": 1.5, "h100-sxm-80gb": 3.0}


@pytest.fixture(scope="module")
def job() -> Job:
    return Job.from_dict(
        {
            "model": {"family": "gpt", "layers": 8, "hidden": 2048, "heads": 16, "vocab": 8192, "seq_len": 1024},
            "parallel": {"tp": 2, "pp": 2},
            "batch": {"micro_batch": 1, "global_batch": 32, "precision": "bf16"},
            "cluster": {"hardware": "a100-sxm-80gb", "nodes": 2, "devices_per_node": 4},
        }
    )


@pytest.fixture(scope="module")
def found(job: Job) -> SearchResult:
    goal = Goal(objective="cost", tokens=1e10, critical_batch=64, prices=PRICES)
    scenarios = Scenarios(nodes=(1, 2, 3), clusters=tuple(PRICES), global_batches=(32, 64))
    return search(job, space=SMALL, goal=goal, scenarios=scenarios)


def test_regret_is_of_one_scenario(job: Job) -> None:
    with pytest.raises(StepsightError, match="robust regret is for one cluster"):
        search(job, space=SMALL, goal=Goal(robust="regret"), scenarios=Scenarios(nodes=(1, 2)))


def test_each_scenario_has_its_best(job: Job, found: SearchResult) -> None:
    """A plan is what a search of its scenario alone finds; three nodes do not divide the batch into whole replicas."""
    assert len(found.plans) + len(found.skipped) == 12 and found.gap_percent == 0
    assert found.own is not None and found.own.job == job
    plan = next(p for p in found.plans if p.job.cluster == job.cluster and p.job.batch.global_batch == 32)
    assert plan.seconds == pytest.approx(search(job, space=SMALL).best.seconds)
    costs = [found.goal.score(p.job, p.timed) for p in found.plans]
    assert costs == sorted(costs) and found.best is found.plans[0]


def test_objectives_follow_from_the_time(found: SearchResult) -> None:
    """Hand calculation: iterations, penalty of the batch, device-hours, rated power."""
    choice = found.plans[0]
    row = found.goal.objectives(choice.job, choice.timed)
    batch, devices = choice.job.batch.global_batch, choice.job.cluster.num_devices
    iterations = 1e10 * (1 + batch / 64) / (batch * 1024)
    hours = iterations * choice.timed[0] / 3600
    assert row["training_time_s"] == pytest.approx(3600 * hours)
    assert row["cost"] == pytest.approx(hours * devices * PRICES[choice.job.cluster.hardware])
    watts = {"a100-sxm-80gb": 400, "h100-sxm-80gb": 700}[choice.job.cluster.hardware]
    assert row["energy_kwh"] == pytest.approx(hours * devices * watts / 1000)
    assert row["tokens_per_s_per_device"] == pytest.approx(batch * 1024 / choice.timed[0] / devices)


def test_the_front_is_what_nothing_beats(found: SearchResult) -> None:
    rows = found.to_dict()["plans"]
    beaten = [
        any(o["training_time_s"] <= r["training_time_s"] and o["cost"] <= r["cost"] and o != r for o in rows)
        for r in rows
    ]
    front = {(row["training_time_s"], row["cost"]) for row in found.front}
    assert front == {(r["training_time_s"], r["cost"]) for r, out in zip(rows, beaten, strict=True) if not out}
    unpriced = replace(found, goal=Goal()).front
    assert len({row["devices"] for row in unpriced}) == len(unpriced)


def test_plans_are_reported_and_drawn(job: Job, found: SearchResult, tmp_path: Path) -> None:
    report = search_report(job, found, 3)
    assert (
        len(report["plans"]) == len(found.plans) and "by cost; training on 1e+10 * (1 + batch / 64)" in report["text"]
    )
    assert f"{len(found.plans) - 3} more combinations" in report["text"]
    plot_result(found, tmp_path / "front.svg", "plans")
    assert "h100-sxm-80gb" in (tmp_path / "front.svg").read_text()
    assert {"cost", "hardware", "training_time_s"} <= set(found.to_frame().columns)


def test_prices_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[price_per_device_hour]\na100-sxm-80gb = 2\n[power_w]\na100-sxm-80gb = 500\n")
    assert read_prices(path) == ({"a100-sxm-80gb": 2}, {"a100-sxm-80gb": 500})
    path.write_text("[price_per_device_hour]\nA100 = 2\nmine = 3\n")
    assert read_prices(path) == ({"a100-sxm-80gb": 2, "mine": 3}, {})
    path.write_text("[prices]\na = 1\n")
    with pytest.raises(StepsightError, match="price_per_device_hour"):
        read_prices(path)


def test_bad_goals_and_scenarios_are_refused(job: Job) -> None:
    with pytest.raises(StepsightError, match="objective must be one of"):
        Goal(objective="speed")
    with pytest.raises(StepsightError, match=r"price of a must be a number from 1e-09 to 1e\+30, got -1"):
        Goal(prices={"a": -1})
    for tiny in ({"tokens": 1e-320}, {"critical_batch": 1e-320}):  # what follows from them would be infinite
        with pytest.raises(StepsightError, match="must be a number from 1e-09 to"):
            Goal(**tiny)
    with pytest.raises(StepsightError, match="price of a100-sxm-80gb is not known"):
        search(job, space=SMALL, goal=Goal(objective="cost"))
    with pytest.raises(StepsightError, match="whole numbers > 0, got 0"):
        Scenarios(nodes=(0,))
    with pytest.raises(StepsightError, match="must be <= 1000"):
        Scenarios(nodes=tuple(range(1, 102)), global_batches=tuple(range(1, 12)))
    with pytest.raises(StepsightError, match="no scenario can be searched"):
        search(job, space=SMALL, scenarios=Scenarios(clusters=("abacus",)))
