"""Clusters of unlike devices: every stage is judged by its smallest."""

from dataclasses import replace
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import HARDWARE, Hardware, find_hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import OtherDevices
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.memory.estimate import smallest_devices
from tests.simulator.conftest import JobMaker

SMALL = "a100-sxm-40gb"


def mixed(job: Job, *nodes: int, hardware: str = SMALL) -> Job:
    return replace(job, cluster=replace(job.cluster, mixed=(OtherDevices(nodes=nodes, hardware=hardware),)))


@pytest.fixture
def job(make_job: JobMaker) -> Job:
    """Four nodes; two stages of two nodes each."""
    model: dict[str, Any] = {"hidden": 8192, "heads": 64, "layers": 44, "vocab": 50000}
    return make_job(tp=8, pp=2, dp=2, precision="bf16", model=model)


def test_a_smaller_device_decides_for_its_stage(job: Job, gpu: Hardware) -> None:
    """One node of the second stage is enough: each stage has its own capacity, the worst one's is the job's."""
    plain = estimate_memory(job, gpu)
    memory = estimate_memory(mixed(job, 3), gpu)
    assert plain.fits and not memory.fits
    assert [stage.capacity_bytes for stage in memory.stages] == [80e9, 42.5e9]
    assert memory.fullest == 1
    assert (memory.peak_bytes, memory.capacity_bytes) == (memory.stages[1].total, 42.5e9)
    assert "its smallest device, a100-sxm-40gb, has 42.5 GB" in memory.reason
    assert memory.to_dict()["capacity_bytes"] == 42.5e9
    assert memory.to_dict()["stages"][0]["capacity_bytes"] == 80e9
    larger = estimate_memory(mixed(job, 0, 1, hardware="b200-sxm-180gb"), gpu)  # more bytes, and a smaller share
    assert larger.stages[0].total > larger.stages[1].total and larger.fullest == 1
    assert (larger.peak_bytes, larger.capacity_bytes) == (larger.stages[1].total, 80e9)


def test_the_smaller_devices_reserve_counts(job: Job, gpu: Hardware) -> None:
    """What no tensor can have is that of the stage's own device; the tensors are the same."""
    small = find_hardware(SMALL)
    assert small is not None
    stages, plain = estimate_memory(mixed(job, 0), gpu).stages, estimate_memory(job, gpu).stages
    assert [stage.tensors for stage in stages] == pytest.approx([stage.tensors for stage in plain])
    passing = stages[0].activations + stages[0].temporary
    room = max(small.memory_bytes - stages[0].tensors - small.reserved_bytes, 0.0)
    assert stages[0].reserved == pytest.approx(small.reserved_bytes + min(small.fragmentation * passing, room))
    assert stages[1].reserved == 0


def test_larger_devices_help_where_no_other_is_left(job: Job, gpu: Hardware) -> None:
    """A stage is judged by a larger device once all of its nodes have it."""
    tiny = replace(gpu, memory_bytes=20e9)
    for nodes, capacity in (((0,), 20e9), ((0, 1), 42.5e9)):
        assert estimate_memory(mixed(job, *nodes), tiny).stages[0].capacity_bytes == capacity


def test_without_a_pipeline(make_job: JobMaker, gpu: Hardware) -> None:
    """All nodes hold the one stage."""
    memory = estimate_memory(mixed(make_job(dp=16), 1), gpu)
    assert memory.capacity_bytes == 42.5e9
    assert memory.stages[0].reserved > 2e9


def test_unknown_devices(job: Job, gpu: Hardware) -> None:
    with pytest.raises(JobError, match="got 'abacus'"):
        estimate_memory(mixed(job, 1, hardware="abacus"), gpu)


@pytest.mark.parametrize(
    ("reserved", "fragmentation", "smaller"), [(37.4e9, 0.0, False), (37.6e9, 0.0, True), (0.0, 0.9, True)]
)
def test_the_smallest_has_the_least_room_for_tensors(
    job: Job, gpu: Hardware, reserved: float, fragmentation: float, smaller: bool
) -> None:
    """``(memory - reserved) / (1 + fragmentation)``: a device with more memory can have less room."""
    small = find_hardware(SMALL)
    assert small is not None
    bare = replace(small, name="bare", reserved_bytes=0.0, fragmentation=0.0)  # 42.5 GB
    device = replace(gpu, memory_bytes=80e9, reserved_bytes=reserved, fragmentation=fragmentation)
    with HARDWARE.registered("bare", bare):
        first, second = smallest_devices(mixed(job, 0, hardware="bare"), device)
    assert second is device and first is (device if smaller else bare)
