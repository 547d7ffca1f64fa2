"""Plans are whole, keep to their time, and hold nothing held out where something teaches."""

from __future__ import annotations

import copy

import pytest

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.harness.plan import check_plan
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.drawn_ops import VARIANT_FAMILIES, likeness
from stepsight.experiments.studies.one_gpu_plans import CPU, STAND_IN, Study, make_study
from stepsight.training.measured.measured import HELDOUT


def _ops(study: Study, name: str, event: str) -> list[Op]:
    found = [of for of in study.plans[name]["events"] if of["name"] == event]
    return [Op(op["kind"], tuple(op["dims"]), op["dtype"]) for of in found for op in of["ops"]]


def test_plans_for_a_gpu_are_made_without_one(study: Study) -> None:
    assert set(study.plans) == {"ops", "eager", "compiled"}
    assert sum(study.seconds.values()) == pytest.approx(600, rel=0.15)
    for plan in study.plans.values():
        assert check_plan(copy.deepcopy(plan)) == plan
        assert plan["device"] == "cuda"
    assert [name for name, plan in study.plans.items() if plan.get("compile")] == ["compiled"]


def test_ops_that_teach_and_judge_differ(study: Study) -> None:
    for name, plan in study.plans.items():
        train, heldout = _ops(study, name, "train"), _ops(study, name, HELDOUT)
        assert train and heldout
        assert not {likeness(op) for op in train} & {likeness(op) for op in heldout}
        if name == "ops":
            assert not {op.family for op in train} & set(VARIANT_FAMILIES)
            assert plan["runs"] == []
        else:
            assert {op.family for op in train} <= set(VARIANT_FAMILIES)


def test_every_op_of_a_training_run_is_measured(study: Study) -> None:
    from stepsight.dataset.hardware.hardware import find_hardware
    from stepsight.dataset.job.job import Job
    from stepsight.simulator.programs.lower import signatures

    hardware = find_hardware("h200-sxm-141gb")
    assert hardware is not None
    for name in ("eager", "compiled"):
        measured = {*_ops(study, "ops", "train"), *_ops(study, name, "train")}
        for run in study.plans[name]["runs"]:
            if run["role"] == "train":
                assert signatures(Job.from_dict(run["job"]), hardware)[0] <= measured, run["name"]


def test_stand_ins_run_once_and_last(study: Study) -> None:
    roles = [run["role"] for run in study.plans["eager"]["runs"]]
    assert roles[-3:] == [STAND_IN] * 3 and roles.count(STAND_IN) == 3
    assert all(run["stand_in"]["collectives"] for run in study.plans["eager"]["runs"][-3:])
    assert STAND_IN not in [run["role"] for run in study.plans["compiled"]["runs"]]


def test_less_time_means_fewer_runs_and_too_little_is_refused() -> None:
    long, short = (make_study("cpu", CPU, minutes) for minutes in (3.0, 1.6))
    assert set(long.plans) == {"ops", "eager"}
    assert len(short.plans["eager"]["runs"]) <= len(long.plans["eager"]["runs"])
    assert sum(short.seconds.values()) < sum(long.seconds.values())
    with pytest.raises(CollectError, match=r"minutes must be >= [\d.]+ for the fewest runs .*, got 0.1"):
        make_study("cpu", CPU, 0.1)
    for minutes in (0.0, float("nan"), float("inf"), 1e9):
        with pytest.raises(CollectError, match="minutes must be > 0 and at most 240"):
            make_study("cpu", CPU, minutes)


def test_a_gpu_is_asked_only_for_what_it_has() -> None:
    asked = make_study("cuda", "a100-sxm-80gb", 10.0).plans["ops"]["events"]
    assert {op["dtype"] for event in asked for op in event["ops"]} == {"bf16", "fp16", "tf32"}
