"""The time of one iteration (segments, the schedule over segments, the optimizer), its breakdown and sensitivity.

A segment is a map between the clocks of a stage, of its computation and of its replicas' traffic (see
``segment_timing``), so every distinct one is timed once, and the result is exactly that of the whole op-level graph.

Without a pipeline the host, which launches, runs ahead of its device from one segment into the next, and has a clock of
its own.  In a pipeline it waits for messages, and starts each segment with the computation.

In FLOP only matrix products and attention count, a multiply-add as two.  Causal attention counts the half that is
computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.clock.engine import (
    NO_STREAMS,
    NUM_CLOCKS,
    RUN,
    Floats,
    Ints,
    OutsideEvents,
    SegmentList,
    add_path,
    longest_paths,
    run_events,
    to_from,
)
from stepsight.simulator.clock.kernel import RunDurations
from stepsight.simulator.clock.track import many_clocks, through, track_clocks
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.durations.segment_timing import BlockPassTime, Timer, block_pass_table, timer_of
from stepsight.simulator.iteration.breakdown import break_down
from stepsight.simulator.iteration.simulated_iteration import (
    Pipeline,
    PipelineRun,
    SimulatedIteration,
    begin_optimizers,
    distinct_pipelines,
    enter_optimizers,
    last_steps,
)
from stepsight.simulator.iteration.timeline import timeline_json
from stepsight.simulator.memory import Memory as Memory
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.programs.block_pass import BlockPass, Work
from stepsight.simulator.programs.lower import Lowered, lower
from stepsight.simulator.programs.segment import Segment
from stepsight.simulator.schedules import FORWARD


class Simulation(SimulatedIteration):
    """One simulated iteration, and its breakdown, memory and timeline."""

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the iteration by activity of a device, mean over stages; they add up to the iteration time.

        ``compute`` ops of forward and backward; ``tp_communication``, ``cp_communication``, ``ep_communication`` what
        collectives of these groups hold up; ``dp_communication`` time that a stage stands still for its replicas, or
        that their collectives take from its computation; ``host`` waiting for launches, and for copies to the host;
        ``optimizer``; ``pp_communication`` what the iteration would be shorter if messages between stages took no
        time; ``bubble`` the rest: waiting for other stages.  A recommendation model has ``lookups`` of the mean rank,
        ``imbalance`` (what the slowest rank's take beyond), ``dense``, ``index_exchange`` and ``all_to_all`` instead.
        """
        return break_down(self)

    @property
    def memory(self) -> Memory:
        """Bytes that each stage needs."""
        return estimate_memory(self.job, self.hardware)

    def timeline(self, level: str = "segment", scale: float = 1.0) -> dict[str, Any]:
        """Chrome trace events for Perfetto: a process per stage, a thread per stream.

        ``level``: ``segment`` (one event per action) or ``op`` (one per op and collective).  ``scale``: of all times.
        """
        events: dict[str, Any] = json.loads(b"".join(timeline_json(self, level, scale)))
        return events


def simulate(job: Job, latency: LatencyModel) -> Simulation:
    """Simulate one iteration of a job, whose ops and collectives take on ``latency.hardware`` what ``latency`` says."""
    lowered = lower(job, latency.hardware)
    return simulate_lowered(job, lowered, timer_of(latency), latency.hardware, distinct_pipelines(job, latency))


def simulate_lowered(
    job: Job, lowered: Lowered, timer: Timer, hardware: Hardware, pipelines: tuple[Pipeline, ...]
) -> Simulation:
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
        distinct = [timer.paths(segment, conditions[0], carried=carried) for segment in lowered.segments]
        transition = np.array(distinct)[segments]
    else:
        place = np.array([conditions.index(slowdown) for slowdown in pipeline.slowdowns])
        pairs, inverse = np.unique(lowered.segment * len(conditions) + place[track.stage], return_inverse=True)
        segments, rows = (pairs // len(conditions)).astype(np.int32), inverse.astype(np.int32)
        slowdowns = tuple(conditions[pair % len(conditions)] for pair in pairs.tolist())
        found = zip(segments.tolist(), slowdowns, strict=True)
        transition = np.array([timer.paths(lowered.segments[at], slow, carried=carried) for at, slow in found])
    plain = all(link == 1.0 for link in pipeline.links)
    seconds = message_seconds if plain else message_seconds * pipeline.message_factors(lowered)
    clocks = track_clocks(track, rows, transition, seconds, *host)
    return PipelineRun(pipeline, lowered, segments, slowdowns, rows, transition, seconds, host, clocks)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One signature and its effect on the iteration time."""

    work: Op | Collective  # what is done
    count: float  # how often it lies on the critical path, n_i: the derivative of the time by its duration
    seconds: float  # of one, alone, t_i
    share: float  # part of the iteration time, n_i * t_i / T
    # what the iteration is shorter by if it takes half as long; less than half of its share where something else then
    # decides
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
    pipelines, found = tuple(pipeline_run.pipeline for pipeline_run in simulation.pipeline_runs), []
    for work, count in counts:
        timer = simulation.timer.but({work: seconds[work] / 2})
        halved = simulate_lowered(simulation.job, simulation.lowered, timer, simulation.hardware, pipelines)
        share, saved = count * seconds[work] / total, total - halved.iteration_time_s
        found.append(Sensitivity(work, count, seconds[work], share, saved))
    return tuple(found)


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


Unmeasured = Callable[[Sequence[Work]], Sequence[bool]]


def many_paths(
    timer: Timer, segments: Sequence[Segment], unmeasured: Unmeasured | None, *, carried: bool
) -> tuple[Floats, Floats | None]:
    """Longest paths through distinct segments for one latency model: the same as ``Timer`` gives, of thousands at once.

    ``unmeasured``: whether each of some works lies outside of what was measured, None: that is not wanted;
    ``carried``: whether the host is a clock of its own.

    Returns:
        Seconds to each clock, from each, ``-inf`` where no path leads, shape ``(num_segments, K, K)``; and the part of
        each outside of what was measured, same shape.
    """
    passages = dict.fromkeys([passage for segment in segments for passage in segment.passages])
    uses = [work for segment in segments for work in segment.sent]
    by_identity = {id(work): work for work in uses}  # there are few of them, and identities are faster to hash
    sent = dict.fromkeys(by_identity.values())
    row = {passage: at for at, passage in enumerate(passages)}
    number = {work: at for at, work in enumerate(sent)}
    place = {key: number[work] for key, work in by_identity.items()}
    times = [timer.passage(passage) for passage in passages]
    of_segments = np.array([place[id(work)] for work in uses], dtype=np.int64)
    seconds, launches = timer.work_seconds(list(sent)), timer.launch_seconds(list(sent))
    ends, outside = timer.new_ends(len(segments), carried=carried), None
    if unmeasured is not None:
        works = list(dict.fromkeys([work for passage in passages for work in passage.works]))
        far = dict(zip(works, unmeasured(works), strict=True))
        parts = [_outside(*pair, far) for pair in zip(passages, times, strict=True)]
        sent_outside = seconds * np.array(unmeasured(list(sent)), dtype=np.bool_)
        outside = OutsideEvents(
            np.array([paths for paths, _ in parts]).reshape(-1, 3),
            np.concatenate([np.zeros(0), *(nodes for _, nodes in parts)]),
            sent_outside[of_segments],
            np.empty_like(ends),
        )
    listed = SegmentList(
        *_events(segments),
        np.array([row[passage] for segment in segments for passage in segment.passages], dtype=np.int64),
        seconds[of_segments],
        launches[of_segments],
        np.array([segment.compute_share for segment in segments], dtype=np.float64),
    )
    run_events(listed, block_pass_table(times), NO_STREAMS, outside, ends)
    paths = np.ascontiguousarray(to_from(ends, carried=carried))
    if outside is None:
        return paths, None
    return paths, np.ascontiguousarray(to_from(outside.ends, carried=carried, nothing=0.0))


def _events(segments: Sequence[Segment]) -> tuple[Ints, NDArray[np.int64]]:
    """``SegmentList.events`` and ``places``; plans shared by segments are listed once."""
    plans: dict[int, tuple[int, int]] = {}  # begin and end by identity of the events
    tables, length, passages, sent, places = [], 0, 0, 0, []
    for segment in segments:
        if id(segment.events) not in plans:
            plans[id(segment.events)] = length, length + len(segment.events)
            length += len(segment.events)
            tables.append(segment.events)
        places.append((*plans[id(segment.events)], passages, sent, segment.joined))
        passages, sent = passages + len(segment.passages), sent + len(segment.sent)
    return np.concatenate(tables), np.array(places, dtype=np.int64)


def _outside(
    passage: BlockPass, time: BlockPassTime, far: dict[Work, bool]
) -> tuple[tuple[float, float, float], Floats]:
    """The share of a passage's paths and nodes outside the measured range."""
    there = np.array([far[work] for work in passage.works], dtype=np.bool_)
    count = len(time.seconds)
    if not there.any():
        return (0.0, 0.0, 0.0), np.zeros(count)
    nodes: Floats = np.where(there[passage.work], time.seconds, 0.0)
    launched = np.where(time.launches > 0.0, time.launches.cumsum(), -np.inf)
    if passage.serial:
        begin = int((launched + time.seconds[::-1].cumsum()[::-1]).argmax())  # where the host is waited for last
        return (float(nodes.sum()), float(nodes[begin:].sum()) if np.isfinite(launched).any() else 0.0, 0.0), nodes
    finish, critical, ends = np.empty(count), np.empty(count, dtype=np.int32), np.zeros(2)
    for at, ready in enumerate((np.zeros(count), launched)):
        longest_paths(time.seconds, *passage.edges, ready, finish, critical)
        add_path(critical, int(finish.argmax()), np.full(count, at, dtype=np.int32), nodes, 1.0, ends)
    return (float(ends[0]), float(ends[1]), 0.0), nodes


TOGETHER = 16  # jobs that are laid out at once: they fit in a near cache


class Times(NamedTuple):
    """Seconds of an iteration of ``n`` jobs, shape ``(n,)``; and the part of each from work outside of what was
    measured.
    """

    seconds: Floats
    outside: Floats


def can_simulate_many(job: Job, latency: LatencyModel) -> bool:
    """Whether ``simulate_many`` can simulate a job: all ranks are equal, and ops do not depend on context."""
    cluster = job.cluster
    return not (cluster.stragglers or cluster.slow_links or cluster.mixed or latency.knows_context)


def simulate_many(jobs: Sequence[Job], latency: LatencyModel, unmeasured: Unmeasured | None = None) -> Times:
    """Simulate one iteration of each job: the same times as ``simulate``, computed together and without explanations.

    For each ``can_simulate_many`` must hold; ``unmeasured``: as in ``many_paths``.
    """
    times = Times(np.empty(len(jobs)), np.zeros(len(jobs)))
    lowered = [lower(job, latency.hardware) for job in jobs]
    # Every op and collective is requested in one list: latency models answer it faster than several short ones.
    works = {id(low.segments): low for low in lowered}.values()
    segments = dict.fromkeys([segment for low in works for segment in low.segments])
    passages = dict.fromkeys([passage for segment in segments for passage in segment.passages])
    asked = dict.fromkeys([work for passage in passages for work in passage.works])
    asked.update(dict.fromkeys({id(work): work for segment in segments for work in segment.sent}.values()))
    asked.update(dict.fromkeys([message for low in works for message in low.messages]))
    timer_of(latency).work_seconds(list(asked))
    for carried in (False, True):
        own = [index for index, low in enumerate(lowered) if (low.num_stages == 1) == carried]
        if own:
            _simulate([lowered[index] for index in own], own, latency, unmeasured, times)
    return times


def _simulate(
    lowered: list[Lowered], places: list[int], latency: LatencyModel, unmeasured: Unmeasured | None, times: Times
) -> None:
    """Fill in the times of jobs that all have a pipeline, or all have none; ``places``: their indices in ``times``."""
    timer, hardware, carried = timer_of(latency), latency.hardware, lowered[0].num_stages == 1
    works = {id(low.segments): low for low in lowered}  # strategies that differ in the schedule share the rest
    segments = list(dict.fromkeys([segment for low in works.values() for segment in low.segments]))
    row = {segment: at for at, segment in enumerate(segments)}
    rows_of = {key: [row[segment] for segment in low.segments] for key, low in works.items()}
    paths, outside = many_paths(timer, segments, unmeasured, carried=carried)
    messages = list(dict.fromkeys([message for low in works.values() for message in low.messages]))
    seconds = dict(zip(messages, timer.work_seconds(messages).tolist(), strict=True))
    far_of = {} if unmeasured is None else dict(zip(messages, unmeasured(messages), strict=True))
    host = (0.0, 0.0) if carried else (hardware.host_action_s, hardware.host_message_s)
    families: dict[tuple[int, ...], list[int]] = {}  # jobs that differ only in durations
    for at, low in enumerate(lowered):
        families.setdefault((id(low.track), id(low.table), id(low.message), id(low.meets)), []).append(at)
    for family in families.values():
        for own in (family[at : at + TOGETHER] for at in range(0, len(family), TOGETHER)):
            some, where = [lowered[at] for at in own], [places[at] for at in own]
            rows = np.array([rows_of[id(low.segments)] for low in some])
            kinds = np.array([[seconds[message] for message in low.messages] for low in some])
            takes, far = RunDurations(paths[rows], kinds.take(some[0].message, axis=1)), None
            if outside is not None:
                kinds *= np.array([[far_of[message] for message in low.messages] for low in some], dtype=np.bool_)
                far = RunDurations(outside[rows], kinds.take(some[0].message, axis=1))
            times.seconds[where], times.outside[where] = _iterations(some[0], takes, far, host)


def _iterations(
    low: Lowered, takes: RunDurations, far: RunDurations | None, host: tuple[float, float]
) -> tuple[Floats, Floats]:
    """Seconds of one iteration of several jobs, and the share of each outside the measured range."""
    clocks, of_clocks = many_clocks(low.track, low.segment, takes, far, host)
    paths = takes.transition[:, low.optimizer]
    of_stages = np.moveaxis(clocks, 0, 1)
    entry = enter_optimizers(low, of_stages, begin_optimizers(low, of_stages))
    entry = np.moveaxis(entry, 1, 0)
    finish = through(paths, entry)[:, :, :NUM_CLOCKS]
    parts = np.zeros(len(finish))
    if far is not None and of_clocks is not None:
        for job in range(len(parts)):
            path = last_steps(low, clocks[job : job + 1], entry[job], finish[job], paths[job])
            through_optimizer = far.transition[job, low.optimizer[path.stage], path.to, path.since]
            parts[job] = of_clocks[job, path.before, path.clock] + through_optimizer
    return finish.max(axis=(1, 2)), parts
