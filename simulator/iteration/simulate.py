"""The time of one iteration (segments, the schedule over segments, the optimizer), its breakdown and sensitivity.

A segment is a map between the clocks of a stage, of its computation and of its replicas' traffic (see
``segment_timing``), so every distinct one is timed once, and the result is exactly that of the whole op-level graph.

Without a pipeline the host, which launches, runs ahead of its device from one segment into the next, and has a clock of
its own.  In a pipeline it waits for messages, and starts each segment with the computation.

In FLOP only matrix products and attention count, a multiply-add as two.  Causal attention counts the half that is
computed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.clock.engine import NUM_CLOCKS, RUN, Floats
from stepsight.simulator.clock.track import through, track_clocks
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.durations.segment_timing import Timer, timer_of
from stepsight.simulator.iteration.simulated_iteration import (
    Pipeline,
    PipelineRun,
    SimulatedIteration,
    begin_optimizers,
    distinct_pipelines,
    segment_paths,
)
from stepsight.simulator.iteration.timeline import trace_events
from stepsight.simulator.memory import Memory as Memory
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.programs.block_pass import STREAMS
from stepsight.simulator.programs.lower import Lowered, lower
from stepsight.simulator.programs.segment import Segment
from stepsight.simulator.schedules import FORWARD

CATEGORIES = (
    "compute",
    "tp_communication",
    "cp_communication",
    "ep_communication",
    "dp_communication",
    "pp_communication",
    "host",
    "bubble",
    "optimizer",
)


def break_down(simulation: SimulatedIteration) -> dict[str, float]:
    """Seconds by category, mean over stages of the slowest pipeline; see ``Simulation.breakdown``."""
    low, total, pipeline_run = simulation.lowered, simulation.iteration_time_s, simulation.slowest
    run, stages = pipeline_run.run, low.num_stages
    runs = np.bincount(pipeline_run.rows, minlength=len(pipeline_run.segments)) / stages
    used = np.flatnonzero(runs).tolist()
    times = [
        simulation.timer.segment(low.segments[pipeline_run.segments[row]], pipeline_run.condition(row)) for row in used
    ]
    streams = dict(zip(STREAMS, runs[used] @ np.stack([time.by_stream for time in times]), strict=True))
    if simulation.carried:
        free = np.ascontiguousarray(pipeline_run.transition[:, :NUM_CLOCKS, :NUM_CLOCKS])
        host = float(pipeline_run.clocks[0, 0] - _ends(pipeline_run, free, pipeline_run.message_seconds)[0, 0])
    else:
        host = float(runs[used] @ np.array([time.host for time in times]))
    seconds = {"compute": streams["compute"], "host": host + streams["offload"]}
    seconds |= {f"{axis}_communication": streams[axis] for axis in ("tp", "cp", "ep")}
    inside = float((run.log.finish[:, 0] - run.log.start[:, 0]).sum()) / stages - sum(seconds.values())
    # The optimizer's ops; the remaining time between a stage's last backward and its end is traffic, or waiting for
    # others.
    ends = [
        simulation.timer.segment(low.segments[at], simulation.optimizer_condition(stage))
        for stage, at in enumerate(low.optimizer.tolist())
    ]
    seconds["optimizer"] = float(np.stack([end.by_stream for end in ends])[:, 0].mean())
    until = simulation.clocks[:, :NUM_CLOCKS].max(axis=1) - simulation.clocks[:, 0]
    after = simulation.finish[:, :NUM_CLOCKS].max(axis=1) - simulation.begin
    launched = 0.0
    if simulation.hardware.has_host:
        paths = (
            simulation.entry[:, None, :NUM_CLOCKS]
            + simulation.optimizer_paths(carried=True)[:, :NUM_CLOCKS, :NUM_CLOCKS]
        )
        launched = float((after - (paths.max(axis=(1, 2)) - simulation.begin)).mean())
    data = inside + float((until + after).mean()) - seconds["optimizer"] - launched
    seconds["host"] += launched
    seconds["dp_communication"] = max(data, 0.0)
    seconds["pp_communication"] = 0.0
    if low.track.num_messages:
        alone = _ends(pipeline_run, pipeline_run.transition, np.zeros(len(pipeline_run.message_seconds)))
        seconds["pp_communication"] = max(0.0, float(pipeline_run.clocks.max() - alone.max()))
    seconds["bubble"] = total - sum(seconds.values())
    if seconds["bubble"] < 0:  # messages that overlap
        seconds["pp_communication"] = max(0.0, seconds["pp_communication"] + seconds["bubble"])
        seconds["bubble"] = 0.0
        seconds["bubble"] = max(0.0, total - sum(seconds.values()))
    return {category: float(seconds[category]) for category in CATEGORIES}


def _ends(pipeline_run: PipelineRun, transition: Floats, messages: Floats) -> Floats:
    """Clocks of a pipeline's stages at the end with other paths through segments, or other messages."""
    return track_clocks(pipeline_run.lowered.track, pipeline_run.rows, transition, messages, *pipeline_run.host)


class Simulation(SimulatedIteration):
    """One simulated iteration, and its breakdown, memory and timeline."""

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the iteration by activity of a device, mean over stages; they add up to the iteration time.

        ``compute`` ops of forward and backward; ``tp_communication``, ``cp_communication``, ``ep_communication`` what
        collectives of these groups hold up; ``dp_communication`` time that a stage stands still for its replicas, or
        that their collectives take from its computation; ``host`` waiting for launches, and for copies to the host;
        ``optimizer``; ``pp_communication`` what the iteration would be shorter if messages between stages took no
        time; ``bubble`` the rest: waiting for other stages.
        """
        return break_down(self)

    @property
    def memory(self) -> Memory:
        """Bytes that each stage needs."""
        return estimate_memory(self.job, self.hardware)

    def timeline(self, level: str = "segment") -> dict[str, Any]:
        """Chrome trace events for Perfetto: a process per stage, a thread per stream.

        Args:
            level: ``segment`` (one event per action) or ``op`` (one per op and collective).
        """
        return trace_events(self, level)


def simulate(job: Job, latency: LatencyModel) -> Simulation:
    """Simulate one iteration of a job.

    Args:
        job: What to run.
        latency: How long its ops and collectives take on ``latency.hardware``.
    """
    lowered = lower(job, latency.hardware)
    return simulate_lowered(job, lowered, timer_of(latency), latency.hardware, distinct_pipelines(job, latency))


def simulate_lowered(
    job: Job, lowered: Lowered, timer: Timer, hardware: Hardware, pipelines: tuple[Pipeline, ...]
) -> Simulation:
    """Simulate a lowered job."""
    each = timer.work_seconds(lowered.messages)
    message_seconds = each[lowered.message] if len(each) != 1 else np.full(len(lowered.message), each[0])
    host = (hardware.host_action_s, hardware.host_message_s) if job.parallel.pp > 1 else (0.0, 0.0)
    pipeline_runs = tuple(_pass(lowered, timer, pipeline, message_seconds, host) for pipeline in pipelines)
    clocks = pipeline_runs[0].clocks
    for pipeline_run in pipeline_runs[1:]:
        clocks = np.maximum(clocks, pipeline_run.clocks)
    begin = begin_optimizers(lowered, clocks)
    simulation = Simulation(job, hardware, lowered, timer, pipeline_runs, begin, clocks, np.empty_like(clocks))
    optimizers = simulation.optimizer_paths(carried=simulation.carried)
    simulation.finish[:] = through(optimizers, simulation.entry)
    return simulation


def _pass(
    lowered: Lowered, timer: Timer, pipeline: Pipeline, message_seconds: Floats, host: tuple[float, float]
) -> PipelineRun:
    track, conditions = lowered.track, tuple(dict.fromkeys(pipeline.slowdowns))
    carried = lowered.num_stages == 1
    if len(conditions) == 1:
        segments, slowdowns, rows = lowered.table, conditions, lowered.place
        distinct = [segment_paths(timer.segment(segment, conditions[0]), carried) for segment in lowered.segments]
        transition = np.array(distinct)[segments]
    else:
        place = np.array([conditions.index(slowdown) for slowdown in pipeline.slowdowns])
        pairs, inverse = np.unique(lowered.segment * len(conditions) + place[track.stage], return_inverse=True)
        segments, rows = (pairs // len(conditions)).astype(np.int32), inverse.astype(np.int32)
        slowdowns = tuple(conditions[pair % len(conditions)] for pair in pairs.tolist())
        found = zip(segments.tolist(), slowdowns, strict=True)
        transition = np.array([segment_paths(timer.segment(lowered.segments[at], slow), carried) for at, slow in found])
    seconds = message_seconds if pipeline.is_plain else message_seconds * pipeline.message_factors(lowered)
    clocks = track_clocks(track, rows, transition, seconds, *host)
    return PipelineRun(pipeline, lowered, segments, slowdowns, rows, transition, seconds, host, clocks)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One signature and its effect on the iteration time.

    Attributes:
        work: What is done.
        count: How often it lies on the critical path, ``n_i``: the derivative of the time by its duration.
        seconds: Of one, alone, ``t_i``.
        share: Part of the iteration time, ``n_i * t_i / T``.
        halved_s: What the iteration is shorter by if it takes half as long; less than half of its share where
            something else then decides.
    """

    work: Op | Collective
    count: float
    seconds: float
    share: float
    halved_s: float

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {**asdict(self), "work": str(self.work)}


def explain(simulation: Simulation, most: int = 10) -> tuple[Sensitivity, ...]:
    """The signatures with the largest shares of the time, in order."""
    if most < 1:
        raise StepsightError(f"explain lists at least 1 row, got {most}")
    total = simulation.iteration_time_s
    seconds = dict(zip(simulation.lowered.all_works, simulation.work_seconds.tolist(), strict=True))
    counts = sorted(simulation.op_counts.items(), key=lambda item: -item[1] * seconds[item[0]])[:most]
    return tuple(
        Sensitivity(work, count, seconds[work], count * seconds[work] / total, total - _with(simulation, work))
        for work, count in counts
    )


def _with(simulation: Simulation, work: Op | Collective) -> float:
    """The iteration time if one signature took half as long."""
    timer = simulation.timer.but({work: float(simulation.timer.work_seconds([work])[0]) / 2})
    pipelines = tuple(pipeline_run.pipeline for pipeline_run in simulation.pipeline_runs)
    halved = simulate_lowered(simulation.job, simulation.lowered, timer, simulation.hardware, pipelines)
    return halved.iteration_time_s


BACKWARD_OVER_FORWARD = 2.0  # gradients of the input and of the weights


def segment_flops(segment: Segment) -> float:
    """FLOP of one run of a segment on one rank."""
    total = 0.0
    for what, first, last, times in segment.events[segment.events[:, 0] == RUN, 1:5].tolist():
        works = [node.work for node in segment.passages[what].program.nodes[first:last]]
        total += times * sum(work.flops for work in works if isinstance(work, Op) and work.record.bound == "compute")
    return total


def iteration_flops(lowered: Lowered) -> tuple[float, float]:
    """FLOP of an iteration, needed by the model and executed (with recomputation): of one rank of each stage, summed
    over stages.
    """
    flops = np.array([segment_flops(segment) for segment in lowered.segments])
    done = float(flops[lowered.segment].sum())
    forward = float(flops[lowered.segment[lowered.track.kind == FORWARD]].sum())
    # If the gradient of an input is not needed (the patches of an image), the model needs less.
    return min((1.0 + BACKWARD_OVER_FORWARD) * forward, done), done
