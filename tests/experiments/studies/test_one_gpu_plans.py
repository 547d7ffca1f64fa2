"""Plans keep to their time, fit the device, and hold nothing held out where something teaches."""

from __future__ import annotations

import copy

import pytest

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.hardware.hardware import Hardware, find_hardware, roofline_seconds
from stepsight.dataset.harness.plan.plan_checks import check_plan
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.one_gpu_plans import (
    CPU,
    STAND_IN,
    VARIANT_FAMILIES,
    OpSpace,
    StepCase,
    Study,
    draw,
    likeness,
    make_study,
    op_space,
    split,
    step_cases,
)
from stepsight.experiments.studies.one_gpu_plans import CPU as LOCAL
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
def test_a_third_of_the_runs_judges_and_some_teach_recomputation(device: str, hardware: str) -> None:
    found = [case for case in step_cases(device, hardware) if case.role != STAND_IN]
    assert 3 * len(_of(found, "heldout")) >= len(found) - 1
    assert {job.parallel.recompute for job in _of(found, "train")} == {"none", "full"}


@pytest.mark.parametrize(("device", "hardware"), DEVICES)
def test_every_run_can_be_collected_and_fits(device: str, hardware: str) -> None:
    facts = find_hardware(hardware)
    assert facts is not None
    found = step_cases(device, hardware)
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


def _facts(name: str) -> Hardware:
    found = find_hardware(name)
    assert found is not None
    return found


@pytest.mark.parametrize(("space", "name"), [(op_space("cuda"), "h200-sxm-141gb"), (op_space("cpu"), LOCAL)])
def test_draws_are_distinct_and_within_bounds(space: OpSpace, name: str) -> None:
    hardware = _facts(name)
    ops = draw(space, 500, hardware, seed=3)
    assert len(set(ops)) == len(ops) > 450
    assert ops == draw(space, 500, hardware, seed=3) != draw(space, 500, hardware, seed=4)
    assert max(op.num_bytes for op in ops) <= space.most_bytes
    assert max(roofline_seconds(op, hardware) for op in ops) <= space.most_s
    families = {op.family for op in ops}
    assert families >= {"gemm", "attention", "norm", "elementwise", "loss", "embedding", "optimizer", "reduce"}


def test_a_gpu_is_asked_for_what_the_issue_names() -> None:
    ops = draw(op_space("cuda"), 1500, _facts("h200-sxm-141gb"), seed=0)
    products = [op for op in ops if op.family == "gemm"]
    assert {op.dtype for op in products} == {"bf16", "fp16", "fp8", "tf32"}
    assert {op.kind for op in products} == {"linear", "linear_dgrad", "linear_wgrad"}
    assert not [op for op in products if op.dtype == "fp8" and any(dim % 16 for dim in op.dims)]
    attention = [op for op in ops if op.family == "attention"]
    assert {op.dims[5] for op in attention} == {64, 80, 96, 112, 128}
    assert {op.dims[6] for op in attention} == {0, 1}
    assert {op.dims[1] // op.dims[2] for op in attention} >= {1, 2, 4}


def test_some_families_alone() -> None:
    ops = draw(op_space("cuda"), 60, _facts("h200-sxm-141gb"), 0, ("norm", "loss"))
    assert {op.family for op in ops} == {"norm", "loss"}


def test_what_judges_is_like_nothing_that_teaches() -> None:
    drawn = draw(op_space("cpu"), 400, _facts(LOCAL), seed=0)
    needed = [op for op in drawn[:40] if 448 not in op.dims]
    unseen = [Op("linear", (64, 448, 448), "fp32"), Op("layer_norm", (64, 448), "fp32")]
    train, heldout = split(drawn, needed, unseen, seed=0)
    assert set(needed) <= set(train)
    assert set(heldout) <= set(drawn)
    assert not {likeness(op) for op in train} & {likeness(op) for op in [*heldout, *unseen]}
    assert {op.family for op in heldout} == {op.family for op in drawn}
    assert len(heldout) <= 60


def test_likeness_is_weights_heads_or_width() -> None:
    assert likeness(Op("linear", (8, 16, 32))) == likeness(Op("linear_wgrad", (99, 16, 32), "fp8"))
    assert likeness(Op("attention", (1, 8, 8, 512, 512, 64, 1))) == likeness(
        Op("attention_backward", (4, 2, 1, 512, 512, 64, 0))
    )
    assert likeness(Op("rms_norm", (8, 64))) == likeness(Op("layer_norm", (9, 64)))
    assert likeness(Op("add", (8,))) != likeness(Op("add", (9,)))
