"""The device that limits the memory: for each stage, the smallest device that has one of its ranks."""

from __future__ import annotations

import numpy as np

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import HARDWARE, Hardware, find_hardware
from stepsight.dataset.job.job import Job
from stepsight.simulator.programs.rank_layout import layout_of


def smallest_devices(job: Job, hardware: Hardware) -> tuple[Hardware, ...]:
    """One device per stage; a single one if all nodes are equal.

    Raises:
        JobError: If the devices of some nodes are unknown.
    """
    if not job.cluster.mixed:
        return (hardware,)
    known = [hardware, *(_preset(other.hardware) for other in job.cluster.mixed)]
    layout = layout_of(job)
    ranks = np.arange(layout.num_ranks)
    nodes = ranks // layout.devices_per_node
    kind = np.zeros(len(ranks), dtype=np.int64)
    for number, other in enumerate(job.cluster.mixed):
        kind[np.isin(nodes, other.nodes)] = number + 1
    stage = ranks // layout.stride("pp") % job.parallel.pp
    found = [np.unique(kind[stage == at]).tolist() for at in range(job.parallel.pp)]
    return tuple(min((known[k] for k in kinds), key=_room) for kinds in found)


def _room(device: Hardware) -> float:
    """Bytes available for tensors."""
    return (device.memory_bytes - device.reserved_bytes) / (1 + device.fragmentation)


def _preset(name: str) -> Hardware:
    hardware = find_hardware(name)
    if hardware is None:
        raise JobError(f"cluster.mixed: {HARDWARE.unknown(name)}")
    return hardware
