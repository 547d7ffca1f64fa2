"""How long one iteration takes: segments, then the schedule over segments, then the optimizer.

A segment is a map between the clocks of a stage, of its computation and of its replicas' traffic (see ``timing``), so
every distinct one is timed once, and the result is exactly that of the whole op-level graph.

Without a pipeline the host, which launches, runs ahead of its device from one segment into the next, and has a clock of
its own.  In a pipeline it waits for messages, and starts each segment with the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stepsight.dataset.hardware import Hardware
from stepsight.dataset.job import Job
from stepsight.dataset.op import Collective, Op
from stepsight.simulator.clock.engine import Floats, Ints, add_path
from stepsight.simulator.clock.track_run import TrackRun, run_track, track_clocks, walk
from stepsight.simulator.latency_model import LatencyModel
from stepsight.simulator.lowering.distinct_pipelines import Pipeline, distinct_pipelines
from stepsight.simulator.lowering.lower import Lowered, lower
from stepsight.simulator.lowering.segment import HOST, NUM_CLOCKS
from stepsight.simulator.memory import Memory as Memory
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.segment_timing import OpTimes, SegmentTime, Slowdown, Timer, timer_of


@dataclass(frozen=True, eq=False)
class Passing:
    """One pipeline of ranks, all micro-batches, before the optimizer.

    Attributes:
        pipeline: Which ranks.
        lowered: What they run.
        segments: Index into ``lowered.segments`` of each row of ``transition``.
        slowdowns: Condition of each row; one for all.
        rows: Row of each action, shape ``(num_actions,)``.
        transition: Paths from clock to clock, shape ``(num_rows, K, K)``; K: see ``Simulation.clocks``.
        message_seconds: Of each of the track's messages.
        host: Seconds that the runtime takes before each action, and to post a side of a message.
        clocks: Of each stage at the end, shape ``(num_stages, K)``.
    """

    pipeline: Pipeline
    lowered: Lowered
    segments: Ints
    slowdowns: tuple[Slowdown, ...]
    rows: Ints
    transition: Floats
    message_seconds: Floats
    host: tuple[float, float]
    clocks: Floats

    @cached_property
    def run(self) -> TrackRun:
        """When every action and message runs; ``run.segment`` are ``rows``."""
        return run_track(self.lowered.track, self.rows, self.transition, self.message_seconds, *self.host)

    def condition(self, row: int) -> Slowdown:
        """What slows a row."""
        return self.slowdowns[row if len(self.slowdowns) > 1 else 0]


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated iteration.

    Attributes:
        job: What was asked.
        hardware: What it runs on.
        lowered: Its segments and schedule.
        timer: Durations.
        passings: Distinct pipelines; one, unless replicas differ.
        begin: When each stage's optimizer starts, shape ``(num_stages,)``, seconds.
        clocks: Clocks of each stage at that time, shape ``(num_stages, K)``: ``NUM_CLOCKS``, and without a pipeline
            the host's.
        finish: Clocks after it, same shape.
    """

    job: Job
    hardware: Hardware
    lowered: Lowered
    timer: Timer
    passings: tuple[Passing, ...]
    begin: Floats
    clocks: Floats
    finish: Floats

    @cached_property
    def iteration_time_s(self) -> float:
        """Seconds of one iteration: until the last stage is done."""
        return float(self.finish[:, :NUM_CLOCKS].max())

    @property
    def carried(self) -> bool:
        """Whether the host has a clock of its own."""
        return len(self.clocks[0]) > HOST

    @cached_property
    def entry(self) -> Floats:
        """Clocks of each stage as its optimizer takes over, shape of ``clocks``."""
        entry = self.clocks.copy()
        entry[:, 0] = self.begin
        if self.carried and self.job.optimizer.clip_grad_norm:  # the host reads the norm: it is no longer ahead
            entry[:, HOST] = np.maximum(entry[:, HOST], self.begin)
        return entry

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the iteration by what a device does, mean over stages; they add up to the iteration time.

        ``compute`` ops of forward and backward; ``tp_communication``, ``cp_communication``, ``ep_communication`` what
        collectives of these groups hold up; ``dp_communication`` time that a stage stands still for its replicas, or
        that their collectives take from its computation; ``host`` waiting for launches, and for copies to the host;
        ``optimizer``; ``pp_communication`` what the iteration would be shorter if messages between stages took no
        time; ``bubble`` the rest: waiting for other stages.
        """
        from stepsight.simulator.breakdown import break_down

        return break_down(self)

    @property
    def memory(self) -> Memory:
        """Bytes that each stage needs."""
        return estimate_memory(self.job, self.hardware)

    @cached_property
    def slowest(self) -> Passing:
        """The pipeline that decides when the last optimizer starts."""
        return max(self.passings, key=lambda passing: float(passing.clocks[:, :NUM_CLOCKS].max()))

    @cached_property
    def work_seconds(self) -> Floats:
        """Of each distinct signature alone, as in ``lowered.all_works``."""
        return self.timer.work_seconds(self.lowered.all_works)

    @cached_property
    def op_counts(self) -> dict[Op | Collective, float]:
        """How often each signature lies on the critical path: ``n_i = dT / dt_i``; ``sum(n_i * t_i)`` is the time."""
        counts = self.count_works()
        works = self.lowered.all_works
        return {work: count for work, count in zip(works, counts.tolist(), strict=True) if count > 0}

    @property
    def launches_share(self) -> float:
        """Part of the time that the host's launches decide: no op's or collective's seconds count there."""
        seconds = self.timer.work_seconds(list(self.op_counts))
        counted = float(np.array(list(self.op_counts.values())) @ seconds)
        return max(0.0, 1.0 - counted / self.iteration_time_s)

    def count_works(self) -> Floats:
        """``op_counts`` as an array over ``lowered.all_works``, zeros included."""
        counts = np.zeros(len(self.lowered.all_works))
        index = self.lowered.work_index
        for segment, condition, uses in self.segment_uses():
            times, graph = self.ops_of(segment, condition), self.lowered.segments[segment].graph
            works = self.lowered.segments[segment].works
            amount = times.seconds / self.timer.work_seconds(works)[graph.work]  # share, context and slowdown
            place = np.array([index[work] for work in works], dtype=np.int32)[graph.work]
            for to, since in np.argwhere(uses > 0).tolist():
                last = int(times.last[to, since])
                add_path(times.critical[since], last, place, amount, uses[to, since], counts)
        for message, uses in zip(self.lowered.messages, self.message_uses(), strict=True):
            counts[index[message]] += uses
        return counts

    def ops_of(self, segment: int, condition: Slowdown) -> OpTimes:
        """A segment of the job at op level."""
        return self.timer.ops(self.lowered.segments[segment], condition, carried=self.carried)

    @cached_property
    def _path(self) -> tuple[Passing, tuple[int, int, int], Floats, Floats]:
        """The pipeline on the critical path; the optimizer's stage and clocks; uses of ``times`` and of messages."""
        stage, clock = divmod(int(np.argmax(self.finish[:, :NUM_CLOCKS])), NUM_CLOCKS)
        table = self.optimizer_paths(carried=self.carried)[stage]
        since = int(np.argmax(self.entry[stage] + table[clock]))
        alone = self.entry[stage, since] == self.clocks[stage, since] and since != 0  # it waited for no other clock
        together = np.array([stage]) if alone else np.flatnonzero(self.lowered.meets == self.lowered.meets[stage])
        ends = [(float(p.clocks[s, c]), i, s, c) for i, p in enumerate(self.passings) for s in together.tolist()
                for c in ((since,) if alone else range(NUM_CLOCKS))]  # fmt: skip
        _, which, at, end = max(ends, key=lambda found: found[0])
        passing = self.passings[which]
        uses, message_uses, _, _ = walk(passing.run, at, end)
        return passing, (stage, clock, since), uses, message_uses

    def segment_uses(self) -> list[tuple[int, Slowdown, Floats]]:
        """Segment, condition and how often it is passed from clock to clock on the critical path, ``(to, from)``."""
        passing, (stage, clock, since), uses, _ = self._path
        rows = np.flatnonzero((uses > 0).any(axis=(1, 2))).tolist()
        found: dict[tuple[int, Slowdown], Floats] = {}
        for row in rows:
            key = (int(passing.segments[row]), passing.condition(row))
            found[key] = found.get(key, 0.0) + uses[row]
        last = np.zeros((self.clocks.shape[1], self.clocks.shape[1]))
        last[clock, since] = 1.0
        optimizer = (int(self.lowered.optimizer[stage]), self.optimizer_condition(stage), last)
        return [*((*key, uses) for key, uses in found.items()), optimizer]

    def message_uses(self) -> Floats:
        """How often each distinct message lies on the critical path, in terms of its time alone."""
        passing, _, _, uses = self._path
        factors = passing.pipeline.message_factors(self.lowered)
        counts = np.zeros(len(self.lowered.messages))
        np.add.at(counts, self.lowered.message, uses * factors)
        return counts

    def optimizer_condition(self, stage: int) -> Slowdown:
        """What slows a stage's optimizer most."""
        found = dict.fromkeys(passing.pipeline.slowdowns[stage] for passing in self.passings)
        if len(found) == 1:
            return next(iter(found))
        segment = self.lowered.segments[int(self.lowered.optimizer[stage])]
        return max(found, key=lambda slowdown: float(self.timer.segment(segment, slowdown).transition.max()))

    def optimizer_paths(self, *, carried: bool) -> Floats:
        """Paths through every stage's optimizer, ``(num_stages, to, from)``; ``carried``: with the host's clock."""
        low, timer = self.lowered, self.timer
        conditions = {passing.condition(0) for passing in self.passings if len(passing.slowdowns) == 1}
        if len(self.passings) == len(conditions) == 1:  # optimizers are numbered one after the other
            first, condition = int(low.optimizer.min()), conditions.pop()
            distinct = [_paths(timer.segment(s, condition), carried) for s in low.segments[first:]]
            return np.array(distinct)[low.optimizer - first]
        found = {}
        keys = [(at, self.optimizer_condition(stage)) for stage, at in enumerate(low.optimizer.tolist())]
        for key in keys:
            if key not in found:
                found[key] = _paths(timer.segment(low.segments[key[0]], key[1]), carried)
        return np.array([found[key] for key in keys])

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
    return simulate_lowered(job, lowered, timer_of(latency), latency.hardware, distinct_pipelines(job, latency))


def simulate_lowered(
    job: Job, lowered: Lowered, timer: Timer, hardware: Hardware, pipelines: tuple[Pipeline, ...]
) -> Simulation:
    """As ``simulate``, with everything at hand."""
    each = timer.work_seconds(lowered.messages)
    message_seconds = each[lowered.message] if len(each) != 1 else np.full(len(lowered.message), each[0])
    host = (hardware.host_action_s, hardware.host_message_s) if job.parallel.pp > 1 else (0.0, 0.0)
    passings = tuple(_pass(lowered, timer, pipeline, message_seconds, host) for pipeline in pipelines)
    clocks = passings[0].clocks
    for passing in passings[1:]:
        clocks = np.maximum(clocks, passing.clocks)
    begin = clocks[:, :NUM_CLOCKS].max(axis=1)
    latest = np.full(lowered.num_stages, -np.inf)
    np.maximum.at(latest, lowered.meets, begin)
    begin = latest[lowered.meets]
    simulation = Simulation(job, hardware, lowered, timer, passings, begin, clocks, np.empty_like(clocks))
    optimizers = simulation.optimizer_paths(carried=simulation.carried)
    np.max(simulation.entry[:, None, :] + optimizers, axis=2, out=simulation.finish)
    return simulation


def _paths(time: SegmentTime, carried: bool) -> Floats:
    return time.carried if carried else time.transition


def _pass(
    lowered: Lowered, timer: Timer, pipeline: Pipeline, message_seconds: Floats, host: tuple[float, float]
) -> Passing:
    track, conditions = lowered.track, tuple(dict.fromkeys(pipeline.slowdowns))
    carried = lowered.num_stages == 1
    if len(conditions) == 1:
        segments, slowdowns, rows = lowered.table, conditions, lowered.place
        distinct = [_paths(timer.segment(segment, conditions[0]), carried) for segment in lowered.segments]
        transition = np.array(distinct)[segments]
    else:
        place = np.array([conditions.index(slowdown) for slowdown in pipeline.slowdowns])
        pairs, inverse = np.unique(lowered.segment * len(conditions) + place[track.stage], return_inverse=True)
        segments, rows = (pairs // len(conditions)).astype(np.int32), inverse.astype(np.int32)
        slowdowns = tuple(conditions[pair % len(conditions)] for pair in pairs.tolist())
        found = zip(segments.tolist(), slowdowns, strict=True)
        transition = np.array([_paths(timer.segment(lowered.segments[at], slow), carried) for at, slow in found])
    seconds = message_seconds if pipeline.is_plain else message_seconds * pipeline.message_factors(lowered)
    clocks = track_clocks(track, rows, transition, seconds, *host)
    return Passing(pipeline, lowered, segments, slowdowns, rows, transition, seconds, host, clocks)
