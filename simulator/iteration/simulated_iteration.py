"""One simulated iteration as arrays: clocks of all stages, and the critical path through actions and messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.clock.codes import HOST, NUM_CLOCKS
from stepsight.simulator.clock.engine import Floats, Ints, add_path
from stepsight.simulator.clock.track_run import TrackRun, run_track, walk
from stepsight.simulator.durations.segment_timing import OpTimes, SegmentTime, Slowdown, Timer
from stepsight.simulator.iteration.distinct_pipelines import Pipeline
from stepsight.simulator.iteration.optimizer_start import LastSteps, enter_optimizers, last_steps
from stepsight.simulator.programs.lower import Lowered


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
        """When every action and message runs; ``run.segment`` indexes ``rows``."""
        return run_track(self.lowered.track, self.rows, self.transition, self.message_seconds, *self.host)

    def condition(self, row: int) -> Slowdown:
        """The slowdown of a row."""
        return self.slowdowns[row if len(self.slowdowns) > 1 else 0]


@dataclass(frozen=True, eq=False)
class SimulatedIteration:
    """One simulated iteration: when everything runs, and what lies on the critical path.

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
        """Seconds of one iteration: until the last stage has finished."""
        return float(self.finish[:, :NUM_CLOCKS].max())

    @property
    def carried(self) -> bool:
        """Whether the host has its own clock."""
        return len(self.clocks[0]) > HOST

    @cached_property
    def entry(self) -> Floats:
        """Clocks of each stage when its optimizer starts, shape of ``clocks``."""
        return enter_optimizers(self.lowered, self.clocks, self.begin)

    @cached_property
    def slowest(self) -> Passing:
        """The pipeline that determines when the last optimizer starts."""
        return max(self.passings, key=lambda passing: float(passing.clocks[:, :NUM_CLOCKS].max()))

    @cached_property
    def work_seconds(self) -> Floats:
        """Seconds of each distinct signature alone, in the order of ``lowered.all_works``."""
        return self.timer.work_seconds(self.lowered.all_works)

    @cached_property
    def op_counts(self) -> dict[Op | Collective, float]:
        """How often each signature lies on the critical path: ``n_i = dT / dt_i``; ``sum(n_i * t_i)`` is the time."""
        counts = self.count_works()
        works = self.lowered.all_works
        return {work: count for work, count in zip(works, counts.tolist(), strict=True) if count > 0}

    @property
    def launches_share(self) -> float:
        """Share of the time that is determined by the host's launches, and by no op or collective."""
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
    def _path(self) -> tuple[Passing, LastSteps, Floats, Floats]:
        """The pipeline on the critical path, the end of its part of the path, and the counts of ``times`` and of
        messages.
        """
        clocks = np.array([passing.clocks for passing in self.passings])
        paths = self.optimizer_paths(carried=self.carried)
        end = last_steps(self.lowered, clocks, self.entry, self.finish, paths)
        passing = self.passings[end.pipeline]
        uses, message_uses, _, _ = walk(passing.run, end.before, end.clock)
        return passing, end, uses, message_uses

    def segment_uses(self) -> list[tuple[int, Slowdown, Floats]]:
        """Segment, condition, and how often the critical path passes it from clock to clock, ``(to, from)``."""
        passing, end, uses, _ = self._path
        rows = np.flatnonzero((uses > 0).any(axis=(1, 2))).tolist()
        found: dict[tuple[int, Slowdown], Floats] = {}
        for row in rows:
            key = (int(passing.segments[row]), passing.condition(row))
            found[key] = found.get(key, 0.0) + uses[row]
        last = np.zeros((self.clocks.shape[1], self.clocks.shape[1]))
        last[end.to, end.since] = 1.0
        optimizer = (int(self.lowered.optimizer[end.stage]), self.optimizer_condition(end.stage), last)
        return [*((*key, uses) for key, uses in found.items()), optimizer]

    def message_uses(self) -> Floats:
        """How often each distinct message lies on the critical path, counted in its undisturbed time."""
        passing, _, _, uses = self._path
        factors = passing.pipeline.message_factors(self.lowered)
        counts = np.zeros(len(self.lowered.messages))
        np.add.at(counts, self.lowered.message, uses * factors)
        return counts

    def optimizer_condition(self, stage: int) -> Slowdown:
        """The largest slowdown of a stage's optimizer."""
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
            distinct = [segment_paths(timer.segment(s, condition), carried) for s in low.segments[first:]]
            return np.array(distinct)[low.optimizer - first]
        found = {}
        keys = [(at, self.optimizer_condition(stage)) for stage, at in enumerate(low.optimizer.tolist())]
        for key in keys:
            if key not in found:
                found[key] = segment_paths(timer.segment(low.segments[key[0]], key[1]), carried)
        return np.array([found[key] for key in keys])


def segment_paths(time: SegmentTime, carried: bool) -> Floats:
    """Longest paths through a segment, with or without the host's clock."""
    return time.carried if carried else time.transition
