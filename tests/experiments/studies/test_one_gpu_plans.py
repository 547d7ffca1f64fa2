"""Plans keep to their time, fit the device, and hold nothing held out where something teaches."""

from __future__ import annotations

import copy

import pytest

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.harness.plan import check_plan
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.drawn_ops import VARIANT_FAMILIES, likeness
from stepsight.experiments.studies.one_gpu_plans import (
    CPU,
    STAND_IN,
    StepCase,
    Study,
    make_study,
    stand_ins,
    step_cases,
)
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.programs.lower import signatures
from stepsight.training.measured.measured import HELDOUT
from stepsight.training.measured.planning import collectable, run_name

DEVICES = [("cuda", "h200-sxm-141gb"), ("cpu", CPU)]


def _of(found: list[StepCase], role: str) -> list[Job]:
    return [case.job for case in found if case.role == role]


@pytest.mark.parametrize(("device", "hardware"), DEVICES)
def test_no_heldout_run_is_like_a_training_run(device: str, hardware: str) -> None:
    """Hidden sizes, vocabularies, sequences and micro-batches differ, and so do (n, k) of all products."""
    found, facts = step_cases(device, hardware), find_hardware(hardware)
    assert facts is not None
    seen, unseen = _of(found, "train"), _of(found, "heldout")
    for of in ("hidden", "vocab", "seq_len"):
        assert not {getattr(job.model, of) for job in seen} & {getattr(job.model, of) for job in unseen}
    batches = [{(job.batch.micro_batch, job.num_micro_batches) for job in jobs} for jobs in (seen, unseen)]
    assert not batches[0] & batches[1]
    products = [
        {op.dims[1:] for job in jobs for op in signatures(job, facts)[0] if op.family == "gemm"}
        for jobs in (seen, unseen)
    ]
    assert not products[0] & products[1]


@pytest.mark.parametrize(("device", "hardware"), DEVICES)
def test_launch_bound_models_teach_and_judge(device: str, hardware: str) -> None:
    found = step_cases(device, hardware)
    assert {case.role for case in found if case.launch_bound} == {"train", "heldout"}
    assert 3 * len(_of(found, "heldout")) >= len(found) - 1
    assert {job.parallel.recompute for job in _of(found, "train")} == {"none", "full"}


@pytest.mark.parametrize(("device", "hardware"), DEVICES)
def test_every_run_can_be_collected_and_fits(device: str, hardware: str) -> None:
    facts = find_hardware(hardware)
    assert facts is not None
    found = [*step_cases(device, hardware), *stand_ins(device, hardware)]
    for case in found:
        collectable(case.job)
        memory = estimate_memory(case.job, facts)
        assert memory.peak_bytes < 0.7 * facts.memory_bytes, case.job.name
        assert case.job.cluster.num_devices == 1 or case.role == STAND_IN
    assert len({run_name(case.job) for case in found}) == len(found)


def test_compiled_runs_are_enough_to_learn_from() -> None:
    compiled = [case for case in step_cases(*DEVICES[0]) if case.compiled]
    assert len(_of(compiled, "train")) >= 5
    assert len(_of(compiled, "heldout")) >= 3
    assert not [case for case in step_cases("cpu", CPU) if case.compiled]


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
