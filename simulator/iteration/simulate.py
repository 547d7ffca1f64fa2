"""The time of one iteration: segments, then the schedule over segments, then the optimizer.

A segment is a map between the clocks of a stage, of its computation and of its replicas' traffic (see ``timing``), so
every distinct one is timed once, and the result is exactly that of the whole op-level graph.

Without a pipeline the host, which launches, runs ahead of its device from one segment into the next, and has a clock of
its own.  In a pipeline it waits for messages, and starts each segment with the computation.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.clock.track_run import through, track_clocks
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.durations.segment_timing import Timer, timer_of
from stepsight.simulator.iteration.breakdown import break_down
from stepsight.simulator.iteration.distinct_pipelines import Pipeline, distinct_pipelines
from stepsight.simulator.iteration.optimizer_start import begin_optimizers
from stepsight.simulator.iteration.simulated_iteration import Passing, SimulatedIteration, segment_paths
from stepsight.simulator.iteration.timeline import trace_events
from stepsight.simulator.memory import Memory as Memory
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.programs.lower import Lowered, lower


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
    passings = tuple(_pass(lowered, timer, pipeline, message_seconds, host) for pipeline in pipelines)
    clocks = passings[0].clocks
    for passing in passings[1:]:
        clocks = np.maximum(clocks, passing.clocks)
    begin = begin_optimizers(lowered, clocks)
    simulation = Simulation(job, hardware, lowered, timer, passings, begin, clocks, np.empty_like(clocks))
    optimizers = simulation.optimizer_paths(carried=simulation.carried)
    simulation.finish[:] = through(optimizers, simulation.entry)
    return simulation


def _pass(
    lowered: Lowered, timer: Timer, pipeline: Pipeline, message_seconds: Floats, host: tuple[float, float]
) -> Passing:
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
    return Passing(pipeline, lowered, segments, slowdowns, rows, transition, seconds, host, clocks)
