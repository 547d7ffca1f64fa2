"""Reference predictions for a box: a roofline with latency-bandwidth links, ideal arithmetic, and a closed formula."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepsight.dataset.hardware.hardware import Fabric, find_hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.box_spec import HARDWARE
from stepsight.simulator.durations.latency_model import Seconds
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import lower
from stepsight.simulator.programs.segment import Segment
from stepsight.training.measured.planning import SleepingLatency

_NOTHING_S = 1e-9


class Silent(SleepingLatency):
    """Communication takes no time."""

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return np.full(len(collectives), _NOTHING_S)


def roofline(job: Job) -> float:
    """Seconds of the iteration from the same simulator with hardware facts, without training."""
    return simulate(job, _facts(job, SleepingLatency)).iteration_time_s


def ideal(job: Job) -> float:
    """Predict with known computation and free communication."""
    return simulate(job, _facts(job, Silent)).iteration_time_s


def formula(job: Job) -> float:
    """Seconds by the closed formula of automatic planners: computation + communication - overlap + bubble.

    Of the slowest stage: ``m (f + b)`` of computation; tensor-parallel collectives of ``m`` micro-batches, messages of
    each there and back, gradients once; the last backward hides gradients where there is no pipeline; and the pipeline
    stands still for ``(p - 1) / v`` micro-batches.
    """
    latency = _facts(job, SleepingLatency)
    lowered, parallel, batches = lower(job, latency.hardware), job.parallel, job.num_micro_batches
    passes: dict[int, dict[str, tuple[float, float]]] = {}
    for action, at in enumerate(lowered.segment.tolist()):
        segment = lowered.segments[at]
        own = passes.setdefault(int(lowered.track.part[action]), {})
        if segment.label not in own:
            own[segment.label] = _sums(segment, latency)
    stages: dict[int, list[dict[str, tuple[float, float]]]] = {}
    for part, found in passes.items():
        stages.setdefault(int(lowered.track.schedule.placement[part, 0]), []).append(found)
    compute, talk, backward = 0.0, 0.0, 0.0
    for parts in stages.values():
        ops = sum(of[0] for found in parts for of in found.values())
        if ops >= compute:
            compute = ops
            talk = sum(of[1] for found in parts for of in found.values())
            backward = sum(of[0] for found in parts for label, of in found.items() if label != "forward")
    message = float(latency.collective_seconds(lowered.messages).max()) if lowered.messages else 0.0
    gradients = _gradients(lowered.segments, latency)
    hidden = min(gradients, backward) if parallel.pp == 1 and not parallel.zero_stage else 0.0
    bubble = (parallel.pp - 1) / parallel.virtual_stages * (compute + talk + 2 * message)
    return batches * (compute + talk + 2 * message) + gradients - hidden + bubble


def _sums(segment: Segment, latency: SleepingLatency) -> tuple[float, float]:
    """Seconds of a segment's ops, and of collectives between ranks of one replica."""
    ops = [node.work for node in segment.program.nodes if isinstance(node.work, Op)]
    talk = [n.work for n in segment.program.nodes if isinstance(n.work, Collective) and not n.stream.startswith("dp")]
    return float(latency.op_seconds(ops).sum()), float(latency.collective_seconds(talk).sum())


def _gradients(segments: Sequence[Segment], latency: SleepingLatency) -> float:
    """Seconds of the replicas' traffic, of the stage with the most."""
    found = []
    for segment in segments:
        talk = [n.work for n in segment.program.nodes if isinstance(n.work, Collective) and n.stream.startswith("dp")]
        found.append(float(latency.collective_seconds(talk).sum()))
    return max(found, default=0.0)


def _facts(job: Job, kind: type[SleepingLatency]) -> SleepingLatency:
    hardware, fabric = find_hardware(HARDWARE), job.fabric
    assert hardware is not None and isinstance(fabric, Fabric)
    return kind(hardware, fabric)
