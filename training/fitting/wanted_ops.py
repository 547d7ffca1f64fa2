"""What jobs spend their time on: the ops whose seconds a predictor must know best."""

from __future__ import annotations

from collections.abc import Sequence

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate


def time_shares(jobs: Sequence[Job], hardware: Hardware) -> dict[Op, float]:
    """Shares of the ops' time on the critical path, by op; every job counts alike, and all shares sum to 1.

    Args:
        jobs: Whose ops.
        hardware: Its roofline gives the seconds, so nothing needs to be measured.
    """
    found: dict[Op, float] = {}
    for job in jobs:
        own = _op_seconds(job, hardware)
        total = sum(own.values())
        for op, seconds in own.items():
            found[op] = found.get(op, 0.0) + seconds / total / len(jobs)
    return found


def _op_seconds(job: Job, hardware: Hardware) -> dict[Op, float]:
    """Seconds of each op in the segments on the critical path."""
    latency = RooflineLatency(hardware, job.fabric)
    simulation = simulate(job, latency)
    counts: dict[Op, float] = {}
    for segment, _, uses in simulation.segment_uses():
        for node in simulation.lowered.segments[segment].program.nodes:
            if isinstance(node.work, Op):
                counts[node.work] = counts.get(node.work, 0.0) + node.share * float(uses.sum())
    ops = list(counts)
    seconds = latency.op_seconds(ops).tolist()
    return {op: counts[op] * each for op, each in zip(ops, seconds, strict=True) if counts[op] > 0}
