"""How long one iteration takes: segments at op level, then the schedule over segments.

A segment is a map between two clocks, of the computation and of the data-parallel stream: its longest paths from each
to each (a 2 x 2 matrix in max-plus algebra).  So every distinct segment is timed once, and the result is exactly that
of the whole op-level graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware import Hardware
from stepsight.dataset.job import Job
from stepsight.dataset.op import Collective, Op
from stepsight.simulator.engine import add_path, find_ends, longest_paths, run_schedule, walk_schedule
from stepsight.simulator.latency import LatencyModel
from stepsight.simulator.lowering import Lowered, lower
from stepsight.simulator.memory import Memory as Memory
from stepsight.simulator.memory import estimate_memory

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SegmentTimes:
    """Distinct segments at op level.

    Attributes:
        seconds: Of every node in its context, shape ``(num_nodes,)``.
        finish: Longest path to the end of every node from the segment's start (row 0) and from the data-parallel
            stream (row 1), shape ``(2, num_nodes)``.
        critical: The dependency on that path, -1 at its start; same shape.
        transition: Shape ``(num_programs, 2, 2)``: to clock, from clock.
        last: The node where that path ends, -1 if none; same shape.
    """

    seconds: Floats
    finish: Floats
    critical: NDArray[np.int32]
    transition: Floats
    last: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated iteration.

    Attributes:
        job: What was asked.
        hardware: What it runs on.
        lowered: Its programs and schedule.
        work_seconds: Of each distinct signature, ops then collectives, as in ``lowered.all_works``.
        segments: Op-level times of the distinct segments.
        start: Of each action on both clocks, shape ``(num_actions, 2)``, seconds.
        finish: Likewise.
        cause: See ``engine.run_schedule``.
    """

    job: Job
    hardware: Hardware
    lowered: Lowered
    work_seconds: Floats
    segments: SegmentTimes
    start: Floats
    finish: Floats
    cause: NDArray[np.int32]

    @cached_property
    def iteration_time_s(self) -> float:
        """Seconds of one iteration: until the last stage is done."""
        return float(self.finish[-self.lowered.num_stages :].max())

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the iteration by what a device does, mean over stages; they add up to the iteration time.

        ``compute`` ops of forward and backward; ``tp_communication`` blocking collectives;
        ``dp_communication`` time that a stage stands still for data-parallel collectives, or that they take from its
        computation; ``optimizer``; ``pp_communication`` what the iteration would be shorter if messages between stages
        took no time;
        ``bubble`` the rest: waiting for other stages.
        """
        from stepsight.simulator.breakdown import break_down

        return break_down(self)

    @property
    def memory(self) -> Memory:
        """Bytes that each stage needs."""
        return estimate_memory(self.job, self.hardware)

    @cached_property
    def op_counts(self) -> dict[Op | Collective, float]:
        """How often each signature lies on the critical path: ``n_i = dT / dt_i``; ``sum(n_i * t_i)`` is the time."""
        counts = self.count_works()
        works = self.lowered.all_works
        return {work: count for work, count in zip(works, counts.tolist(), strict=True) if count > 0}

    def count_works(self) -> Floats:
        """``op_counts`` as an array over ``lowered.all_works``, zeros included."""
        low, times = self.lowered, self.segments
        ends = self.finish[-low.num_stages :]
        at, clock = divmod(int(np.argmax(ends)), 2)
        uses = np.zeros((len(low.programs), 2, 2))
        message_uses = np.zeros(len(low.messages))
        action = len(low.stage) - low.num_stages + at
        walk_schedule(action, clock, low.segment, low.message, low.previous, self.cause, uses, message_uses)
        graph = low.graph
        counts = np.zeros(len(self.work_seconds))
        amount = times.seconds / self.work_seconds[graph.work]  # share and context
        for program, to, start in np.argwhere(uses > 0).tolist():
            last = int(times.last[program, to, start])
            add_path(times.critical[start], last, graph.work, amount, uses[program, to, start], counts)
        np.add.at(counts, low.message_work, message_uses)
        return counts

    def timeline(self, level: str = "segment") -> dict[str, Any]:
        """Chrome trace events for Perfetto: a process per stage, a thread per stream.

        Args:
            level: ``segment`` (one event per action) or ``op`` (one per op and collective).
        """
        from stepsight.simulator.timeline import trace_events

        return trace_events(self, level)


def simulate(job: Job, latency: LatencyModel) -> Simulation:
    """Simulate one iteration of a job.

    Args:
        job: What to run.
        latency: How long its ops and collectives take on ``latency.hardware``.
    """
    lowered = lower(job, latency.hardware)
    ops, collectives = lowered.works
    work_seconds = np.concatenate([latency.op_seconds(ops), latency.collective_seconds(collectives)])
    return simulate_seconds(job, lowered, latency, work_seconds)


def simulate_seconds(job: Job, lowered: Lowered, latency: LatencyModel, work_seconds: Floats) -> Simulation:
    """As ``simulate``, with the seconds of every signature in ``lowered.all_works`` given."""
    segments = time_segments(lowered, latency, work_seconds)
    message_seconds = work_seconds[lowered.message_work]
    start, finish, cause = time_schedule(lowered, segments.transition, message_seconds)
    return Simulation(job, latency.hardware, lowered, work_seconds, segments, start, finish, cause)


def time_segments(lowered: Lowered, latency: LatencyModel, work_seconds: Floats) -> SegmentTimes:
    """Time every distinct segment at op level."""
    graph = lowered.graph
    seconds = work_seconds[graph.work] * graph.share
    bounds = graph.bounds
    alone = np.split(seconds, bounds[1:-1])
    inside = latency.in_context(lowered.programs, alone)
    if inside is not alone:
        seconds = np.concatenate(inside)
    finish = np.empty_like(graph.ready)
    critical = np.empty(graph.ready.shape, dtype=np.int32)
    for clock in range(2):
        longest_paths(seconds, graph.pointer, graph.before, graph.ready[clock], finish[clock], critical[clock])
    transition = np.empty((len(bounds) - 1, 2, 2))
    last = np.empty(transition.shape, dtype=np.int64)
    find_ends(bounds, graph.on_data_stream, lowered.joined, finish, transition, last)
    return SegmentTimes(seconds, finish, critical, transition, last)


def time_schedule(
    lowered: Lowered, transition: Floats, message_seconds: Floats
) -> tuple[Floats, Floats, NDArray[np.int32]]:
    """Start, finish and cause of every action."""
    count = len(lowered.stage)
    start, finish = np.empty((count, 2)), np.empty((count, 2))
    cause = np.empty((count, 4), dtype=np.int32)
    run_schedule(
        lowered.stage, lowered.segment, lowered.source, lowered.message, transition, message_seconds, lowered.gated,
        start, finish, cause,
    )  # fmt: skip
    return start, finish, cause
