"""Bounds if nodes have different devices: every op on the fastest device, in the largest memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.durations.latency_model import LatencyModel, Seconds, dispatch_calls
from stepsight.simulator.durations.segment_timing import Timer
from stepsight.simulator.iteration.distinct_pipelines import other_latency


class FastestDevice:
    """A lower bound of latency in a cluster: each op takes the least time of all kinds of devices.

    Args:
        own: Of the job's own hardware, whose collectives all devices share.
        others: Of the other devices.
    """

    knows_context = False

    def __init__(self, own: LatencyModel, others: Sequence[LatencyModel]) -> None:
        self.hardware = own.hardware
        self.dispatch_calls = dispatch_calls(own)
        self._own, self._others = own, others

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        return np.asarray(np.min([model.op_seconds(ops) for model in (self._own, *self._others)], axis=0))

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return self._own.collective_seconds(collectives)

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        return seconds


def best_devices(job: Job, timer: Timer, hardware: Hardware) -> tuple[Timer, Hardware]:
    """The latency model and memory for bounds of a job with ``cluster.mixed``.

    Args:
        job: Whose nodes have devices of several kinds.
        timer: Of the latency model that predicts.
        hardware: That of the latency model.

    Returns:
        A timer of the fastest device for every op, and the hardware with the largest memory and the least overhead.

    Raises:
        JobError: If the devices of some nodes are unknown.
    """
    others = [other_latency(other.hardware, job) for other in job.cluster.mixed]
    devices = [hardware, *(model.hardware for model in others)]
    roomy = replace(
        hardware,
        memory_bytes=max(device.memory_bytes for device in devices),
        reserved_bytes=min(device.reserved_bytes for device in devices),
        fragmentation=min(device.fragmentation for device in devices),
    )
    return Timer(FastestDevice(timer.latency, others)), roomy
