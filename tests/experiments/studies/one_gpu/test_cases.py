"""Held-out runs are held out; everything fits on the device and can be collected."""

from __future__ import annotations

import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.job.job import Job
from stepsight.experiments.studies.one_gpu_plans import CPU, STAND_IN, StepCase, stand_ins, step_cases
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.programs.lower import signatures
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
