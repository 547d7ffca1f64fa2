"""What holds for every legal job, whatever its model, strategy and devices; ``make invariants`` tries 10,000."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import Fabric, Hardware, Link
from stepsight.dataset.job.job import Job
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.memory import estimate_memory
from stepsight.training.prediction.prediction import predict
from tests.fuzz.toy import toy_predictor
from tests.simulator.any_job import FABRIC, devices, jobs

TRIED = int(os.environ.get("INVARIANT_JOBS", "15"))
ROUNDING = 1e-9  # of a time, for the order in which floats are added
STEPS = (1.01, 1.3, 2.0)

every_job = settings(
    max_examples=TRIED, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=TRIED < 100
)


def seconds(job: Job, device: Hardware, fabric: Fabric = FABRIC) -> float:
    return simulate(job, RooflineLatency(device, fabric)).iteration_time_s


@every_job
@given(jobs(uneven_cluster=True), devices())
def test_parts_sum_to_the_whole(job: Job, device: Hardware) -> None:
    """The time is positive and finite; no part of it is negative, and together they are all of it."""
    result = simulate(job, RooflineLatency(device, FABRIC))
    parts = result.breakdown
    assert np.isfinite(result.iteration_time_s) and result.iteration_time_s > 0
    assert min(parts.values()) >= -ROUNDING * result.iteration_time_s, parts
    assert sum(parts.values()) == pytest.approx(result.iteration_time_s)


@every_job
@given(jobs())
def test_an_interval_contains_the_time(job: Job) -> None:
    """Of a learned predictor; utilisation is that of devices that exist."""
    prediction = predict(replace(job, cluster=replace(job.cluster, fabric="dgx-a100")), toy_predictor())
    assert 0 < prediction.low_s <= prediction.iteration_time_s <= prediction.high_s < np.inf
    assert 0 <= prediction.unsupported_share <= 1
    assert 0 < prediction.mfu <= prediction.hfu * (1 + ROUNDING) <= 2
    assert sum(prediction.breakdown.values()) == pytest.approx(prediction.iteration_time_s)


@every_job
@given(jobs(), devices())
def test_memory_is_positive_and_its_parts_add_up(job: Job, device: Hardware) -> None:
    memory = estimate_memory(job, device)
    assert 0 < memory.peak_bytes < 1e18
    for stage in memory.stages:
        parts = stage.to_dict()
        assert all(np.isfinite(parts[name]) and parts[name] >= 0 for name in parts if name != "moment"), parts
        assert stage.total == pytest.approx(stage.tensors + stage.reserved) and stage.tensors > 0
    assert max(stage.total for stage in memory.stages) == pytest.approx(memory.peak_bytes)


LARGER: dict[str, Callable[[Job], Job]] = {
    "vocab": lambda job: replace(job, model=replace(job.model, vocab=2 * job.model.vocab)),
    "ffn": lambda job: replace(job, model=replace(job.model, ffn=2 * job.model.ffn)),
    "seq_len": lambda job: replace(job, model=replace(job.model, seq_len=2 * job.model.seq_len)),
    "micro_batch": lambda job: replace(
        job, batch=replace(job.batch, micro_batch=2 * job.batch.micro_batch, global_batch=2 * job.batch.global_batch)
    ),
    "more micro-batches": lambda job: replace(job, batch=replace(job.batch, global_batch=2 * job.batch.global_batch)),
}


@every_job
@given(jobs(), devices(), st.sampled_from(sorted(LARGER)))
def test_a_larger_job_takes_no_less(job: Job, device: Hardware, what: str) -> None:
    """Twice of any size: neither the time nor the memory falls."""
    try:
        larger = LARGER[what](job)
    except JobError:
        assume(False)
        raise
    assert seconds(larger, device) >= seconds(job, device) * (1 - ROUNDING)
    assert estimate_memory(larger, device).peak_bytes >= estimate_memory(job, device).peak_bytes * (1 - ROUNDING)


def _links(of: Callable[[Link], Link]) -> Callable[[Hardware, Fabric], tuple[Hardware, Fabric]]:
    return lambda device, fabric: (device, Fabric(fabric.name, of(fabric.intra_node), of(fabric.inter_node)))


def _faster(step: float) -> dict[str, Callable[[Hardware, Fabric], tuple[Hardware, Fabric]]]:
    """Devices and links that are better by a step, each in one thing."""

    def device(**changes: Callable[[Hardware], object]) -> Callable[[Hardware, Fabric], tuple[Hardware, Fabric]]:
        return lambda old, fabric: (replace(old, **{key: of(old) for key, of in changes.items()}), fabric)  # type: ignore[arg-type]

    return {
        "peaks": device(peak_flops=lambda old: {dtype: step * peak for dtype, peak in old.peak_flops.items()}),
        "memory bandwidth": device(memory_bandwidth_bytes_per_s=lambda old: step * old.memory_bandwidth_bytes_per_s),
        "launches": device(host_op_s=lambda old: old.host_op_s / step),
        "host link": device(host_link_bytes_per_s=lambda old: step * old.host_link_bytes_per_s),
        "link bandwidth": _links(lambda link: Link(step * link.bandwidth_bytes_per_s, link.latency_s)),
        "link latency": _links(lambda link: Link(link.bandwidth_bytes_per_s, link.latency_s / step)),
    }


@every_job
@given(jobs(uneven_cluster=True), devices(), st.sampled_from(sorted(_faster(1.0))), st.sampled_from(STEPS))
def test_faster_parts_never_make_a_job_slower(job: Job, device: Hardware, what: str, step: float) -> None:
    """By one percent or by doubling."""
    better, fabric = _faster(step)[what](device, FABRIC)
    assert seconds(job, better, fabric) <= seconds(job, device) * (1 + ROUNDING)
