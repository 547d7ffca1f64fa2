"""Why a job does not fit, and what to try."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.memory.estimate import advice
from tests.simulator.conftest import JobMaker

LONG = {"seq_len": 131072}


def test_what_does_not_fit_is_explained(make_job: JobMaker, gpu: Hardware) -> None:
    """One line: which stage, what takes what, and the first change that is enough."""
    memory = estimate_memory(make_job(pp=2, micro_batches=8, micro_batch=128, precision="bf16", model=LONG), gpu)
    assert not memory.fits
    assert memory.reason.startswith("stage 0 needs ")
    assert "2 micro-batches in flight), a device has 80.0 GB; micro_batch 64 would free " in memory.reason
    assert "\n" not in memory.reason


def test_cheap_changes_come_first(make_job: JobMaker, gpu: Hardware) -> None:
    """Sequence parallelism costs nothing."""
    job = make_job(tp=4, micro_batch=160, precision="bf16", model=LONG)
    assert "; sequence_parallel would free" in estimate_memory(job, gpu).reason


def test_nothing_is_promised(make_job: JobMaker, gpu: Hardware) -> None:
    """Where no single change is enough, the one that frees most is named as such."""
    job = make_job(micro_batch=1, precision="bf16", model={"layers": 400, "hidden": 16384, "heads": 128})
    reason = estimate_memory(job, gpu).reason
    assert reason.endswith("not enough alone")
    assert "offloading the optimizer" in reason


def test_passes_are_told_from_micro_batches(make_job: JobMaker, gpu: Hardware) -> None:
    """With several chunks a micro-batch passes a stage as often; one is one."""
    large = {"micro_batch": 512, "precision": "bf16", "model": LONG}
    looped = estimate_memory(make_job(pp=2, virtual_stages=2, micro_batches=2, **large), gpu)
    assert "; 4 passes of 2 micro-batches in flight)" in looped.reason
    assert "; 1 micro-batch in flight)" in estimate_memory(make_job(micro_batches=8, **large), gpu).reason


@dataclass
class Need:
    """A memory estimate."""

    peak_bytes: float
    fits: bool = False


def tried(job: Job) -> list[str]:
    """What advice changes, in order, where nothing helps."""
    seen = []

    def estimate(other: Job) -> Need:
        changed = [
            (name, getattr(other_spec, name))
            for spec, other_spec in (
                (job.parallel, other.parallel),
                (job.batch, other.batch),
                (job.optimizer, other.optimizer),
            )
            for name in spec.__dataclass_fields__
            if getattr(spec, name) != getattr(other_spec, name)
        ]
        seen.append(" ".join(f"{name}={value}" for name, value in changed))
        return Need(2.0)

    assert advice(job, 2.0, estimate) == ""  # nothing frees anything
    return seen


LAST = ["recompute=full", "offload=True"]


@pytest.mark.parametrize(
    ("parallel", "batch", "expected"),
    [
        ({}, {}, ["recompute=selective", *LAST]),
        ({"tp": 2}, {}, ["sequence_parallel=True", "recompute=selective", *LAST]),
        ({"tp": 2, "sequence_parallel": True}, {}, ["recompute=selective", *LAST]),
        ({"dp": 2}, {}, ["zero_stage=1", "recompute=selective", "recompute=full", "zero_stage=3", "offload=True"]),
        ({"dp": 2, "zero_stage": 1}, {}, ["recompute=selective", "recompute=full", "zero_stage=3", "offload=True"]),
        ({"dp": 2, "zero_stage": 3}, {}, ["recompute=selective", *LAST]),
        ({"zero_stage": 1}, {}, ["recompute=selective", *LAST]),
        ({"recompute": "selective"}, {}, LAST),
        ({"recompute": "full"}, {}, ["offload=True"]),
        ({"recompute": "full", "recompute_every": 2}, {}, ["recompute_every=1", "offload=True"]),
        ({"pp": 2}, {}, ["recompute=selective", *LAST]),
        ({"pp": 2, "schedule": "gpipe"}, {}, ["recompute=selective", "schedule=1f1b", *LAST]),
        ({}, {"micro_batch": 6}, ["recompute=selective", "micro_batch=3", *LAST]),
    ],
)
def test_what_is_tried(
    make_job: JobMaker, parallel: dict[str, Any], batch: dict[str, Any], expected: list[str]
) -> None:
    """Only what changes the job, cheapest in time first."""
    assert tried(make_job(**parallel, **batch)) == expected


def test_looped_chunks_become_one(make_job: JobMaker) -> None:
    job = make_job(pp=2, schedule="zbv", virtual_stages=2)
    assert tried(job)[1] == "schedule=1f1b virtual_stages=1"


def test_the_first_change_that_is_enough_is_named_else_the_one_that_frees_most(make_job: JobMaker) -> None:
    job = make_job()  # selective, full, offload
    peaks = {"selective": 5e9, "full": 4e9}

    def estimate(other: Job, enough: float = 0.0) -> Need:
        peak = 3e9 if other.optimizer.offload else peaks[other.parallel.recompute]
        return Need(peak, peak <= enough)

    assert advice(job, 6e9, estimate) == "offloading the optimizer would free 3.0 GB, not enough alone"
    assert advice(job, 6e9, lambda other: estimate(other, 4e9)) == "recompute full would free 2.0 GB, enough"
    peaks["full"] = 3e9  # a tie: the cheaper one
    assert advice(job, 6e9, estimate) == "recompute full would free 3.0 GB, not enough alone"


def test_an_offloaded_optimizer_is_left(make_job: JobMaker) -> None:
    job = make_job(recompute="full")
    assert tried(replace(job, optimizer=replace(job.optimizer, offload=True))) == []
