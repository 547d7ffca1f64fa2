"""Durations of segments: each distinct passage and segment is timed once for a latency model.

A segment is a map between the clocks of its stage (``segment.NUM_CLOCKS``): its longest paths from each clock to each,
a matrix in max-plus algebra.  There are two ways to it, which agree: over its events, where a repeated layer is one
step; and over all of its ops, which is needed where an op's time depends on what surrounds it, and for timelines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import Memo, hashed_once
from stepsight.dataset.hardware.hardware_facts import ONE_LAUNCH, LaunchCalls
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.clock import engine
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.programs.block_pass import BlockPass
from stepsight.simulator.programs.op_level import STREAMS, Work
from stepsight.simulator.programs.segment import Segment

_TIMER = "_timer"  # attribute of a latency model
MAX_WORKS, MAX_PASSAGES, MAX_SEGMENTS, MAX_OP_TIMES = 100_000, 20_000, 10_000, 2_000  # set by a timer on the model


@hashed_once
@dataclass(frozen=True)
class Slowdown:
    """Slowdown of ranks that work in lockstep, relative to the job's hardware."""

    compute: float = 1.0  # of ops on its devices; 0 if none of the ranks has one
    data: float = 1.0  # of their replicas' collectives, where these leave a node
    inside: float = 1.0  # of their other collectives, where these leave a node
    # latency models of other devices, and how much slower the slowest of each is: all are waited for
    others: tuple[tuple[LatencyModel, float], ...] = ()


AS_IT_IS = Slowdown()


@dataclass(frozen=True, eq=False)
class BlockPassTime:
    """One passage, timed."""

    seconds: engine.Floats  # of each node, shape (num_nodes,)
    launches: engine.Floats  # what the host takes to launch each, 0 where nothing is launched; same shape
    # longest path through it from the computation; the same from the host, which launches; time that the host takes
    paths: tuple[float, float, float]
    # seconds of the first by stream (STREAMS), in sum paths[0]; of what runs beside the computation what it waits for
    by_stream: engine.Floats


@dataclass(frozen=True, eq=False)
class SegmentTime:
    """One segment, timed."""

    # longest paths, to clock, from clock; shape (NUM_CLOCKS, NUM_CLOCKS).  The host starts with the computation.
    transition: engine.Floats
    carried: engine.Floats  # the same with the host's own clock as the last one, HOST; shape (HOST + 1, HOST + 1)
    by_stream: engine.Floats  # seconds of the computation's own path by stream; shape (len(STREAMS),)
    host: float  # seconds that it waits for the host on the way, if that starts with the computation


@dataclass(frozen=True, eq=False)
class OpTimes:
    """One segment at op level."""

    seconds: engine.Floats  # of every node in its context, shape (num_nodes,)
    # longest path from each clock to the end of every node, -inf if none leads, shape (K, num_nodes)
    finish: engine.Floats
    critical: NDArray[np.int32]  # the dependency on that path, -1 at its start; same shape
    transition: engine.Floats  # as SegmentTime.transition, or carried; shape (K, K)
    last: NDArray[np.int64]  # the node where that path ends, -1 if none; same shape


class Timer:
    """Times passages and segments with one latency model, and caches their times.

    Segments and passages are made once and are equal to themselves alone, so they are quick to look up.

    Args:
        latency: What is asked for durations.
        known: Seconds of signatures that the latency model is not asked for.
    """

    def __init__(self, latency: LatencyModel, known: Mapping[Work, float] | None = None) -> None:
        self.latency = latency
        self._hardware, self._calls = latency.hardware, launch_calls(latency)
        self._given = dict(known or {})
        self._works: Memo[Work, float] = Memo("timer: works", MAX_WORKS)
        self._passages: Memo[tuple[BlockPass, Slowdown], BlockPassTime] = Memo("timer: passages", MAX_PASSAGES)
        self._segments: Memo[tuple[Segment, Slowdown], SegmentTime] = Memo("timer: segments", MAX_SEGMENTS)
        self._ops: Memo[tuple[Segment, Slowdown, bool], OpTimes] = Memo("timer: op times", MAX_OP_TIMES)

    def but(self, known: Mapping[Work, float]) -> Timer:
        """Copy of the timer with other durations for some signatures."""
        return Timer(self.latency, {**self._works, **self._given, **known})

    def work_seconds(self, works: Sequence[Work]) -> engine.Floats:
        """Seconds of each signature alone, shape ``(len(works),)``."""
        given, known = self._given, self._works
        found = [known.get(work) for work in works] if not given else [given.get(w, known.get(w)) for w in works]
        if None in found:
            missing = [work for work, seconds in zip(works, found, strict=True) if seconds is None]
            asked = self._ask(missing)
            known.update(asked)
            found = [asked[work] if seconds is None else seconds for work, seconds in zip(works, found, strict=True)]
        return np.array(found, dtype=np.float64)

    def _ask(self, works: Sequence[Work]) -> dict[Work, float]:
        ops = [work for work in works if isinstance(work, Op)]
        collectives = [work for work in works if isinstance(work, Collective)]
        of_ops = self.latency.op_seconds(ops).tolist() if ops else []
        seconds = [*of_ops, *(self.latency.collective_seconds(collectives).tolist() if collectives else [])]
        return dict(zip([*ops, *collectives], seconds, strict=True))

    def segment(self, segment: Segment, slowdown: Slowdown = AS_IT_IS) -> SegmentTime:
        known = self._segments.get((segment, slowdown))
        if known is None:
            known = (self._in_context if self.latency.knows_context else self._by_events)(segment, slowdown)
            self._segments[segment, slowdown] = known
        return known

    def paths(self, segment: Segment, slowdown: Slowdown, *, carried: bool) -> engine.Floats:
        """Longest paths through a segment; ``carried``: with the host's own clock."""
        return self.segment(segment, slowdown).carried if carried else self.segment(segment, slowdown).transition

    def ops(self, segment: Segment, slowdown: Slowdown = AS_IT_IS, *, carried: bool = False) -> OpTimes:
        """A segment at op level; ``carried``: with the host's own clock."""
        known = self._ops.get((segment, slowdown, carried))
        if known is None:
            launches = self.launch_seconds(segment.works, slowdown)[segment.graph.work]
            known = time_ops(segment, self.node_seconds(segment, slowdown), launches, carried=carried)
            self._ops[segment, slowdown, carried] = known
        return known

    def launch_seconds(self, works: Sequence[Work], slowdown: Slowdown) -> engine.Floats:
        """The slowest host's launch time of one of each beside the device, shape ``(len(works),)``."""
        if not self._hardware.has_host or self._calls.blocking:
            return np.zeros(len(works))
        return self._launched(works, slowdown)

    def _launched(self, works: Sequence[Work], slowdown: Slowdown) -> engine.Floats:
        hosts = [*([self._hardware] if slowdown.compute else []), *(other.hardware for other, _ in slowdown.others)]
        return np.array([max(host.launch_s(work, self._calls) for host in hosts) for work in works], dtype=np.float64)

    def node_seconds(self, segment: Segment, slowdown: Slowdown = AS_IT_IS) -> engine.Floats:
        """Seconds of every node of a segment's program in its context, shape ``(num_nodes,)``."""
        graph = segment.graph
        alone = self._slowed(segment.works, slowdown)[graph.work]
        if slowdown.data != slowdown.inside:
            data = self._slowed(segment.works, replace(slowdown, inside=slowdown.data))[graph.work]
            alone = np.where(graph.sent, data, alone)
        alone = alone * graph.share
        if not self.latency.knows_context:
            return alone
        return self.latency.in_context([segment.program], [alone])[0]

    def _slowed(self, works: Sequence[Work], slowdown: Slowdown) -> engine.Floats:
        """Seconds of each signature alone on slower ranks."""
        seconds = self.work_seconds(works)
        if self._calls.blocking:  # the device waits for each launch
            seconds = seconds + self._launched(works, slowdown)
        if slowdown is AS_IT_IS:
            return seconds
        is_op = np.array([isinstance(work, Op) for work in works], dtype=np.bool_)
        slowed = np.where(is_op, seconds * slowdown.compute, seconds * _across(works, slowdown.inside))
        ops = [work for work in works if isinstance(work, Op)]
        for latency, factor in slowdown.others if ops else ():
            slowed[is_op] = np.maximum(slowed[is_op], latency.op_seconds(ops) * factor)
        return slowed

    def passage(self, passage: BlockPass, slowdown: Slowdown = AS_IT_IS) -> BlockPassTime:
        known = self._passages.get((passage, slowdown))
        if known is None:
            seconds = self._slowed(passage.works, slowdown)[passage.columns.work] * passage.columns.share
            launches = self.launch_seconds(passage.works, slowdown)[passage.columns.work] * passage.columns.launched
            known = _time_passage(passage, seconds, launches)
            self._passages[passage, slowdown] = known
        return known

    def _by_events(self, segment: Segment, slowdown: Slowdown) -> SegmentTime:
        totals = np.zeros(len(STREAMS) + 1)
        ends = self._ends([segment], slowdown, totals, carried=True)[0]
        transition, carried = engine.to_from(ends, carried=False), engine.to_from(ends, carried=True)
        return SegmentTime(transition, carried, totals[:-1], float(totals[-1]))

    def many_paths(self, segments: Sequence[Segment], *, carried: bool) -> engine.Floats:
        """``paths`` of thousands of distinct segments at once, shape ``(num_segments, K, K)``."""
        ends = self._ends(segments, AS_IT_IS, np.empty(0), carried=carried)
        return np.ascontiguousarray(engine.to_from(ends, carried=carried))

    def _ends(
        self, segments: Sequence[Segment], slowdown: Slowdown, totals: engine.Floats, *, carried: bool
    ) -> engine.Floats:
        """The ends of some segments, as ``run_events`` fills them in; ``totals``: see ``StreamSeconds``."""
        passages = dict.fromkeys([passage for segment in segments for passage in segment.passages])
        times = [self.passage(passage, slowdown) for passage in passages]
        none = np.zeros(0)
        table = engine.BlockPassTable(
            paths=np.array([time.paths for time in times], dtype=np.float64).reshape(-1, 3),
            nodes=np.concatenate([none, *(time.seconds for time in times)]),
            launches=np.concatenate([none, *(time.launches for time in times)]),
            bounds=np.cumsum([0, *(len(time.seconds) for time in times)]),
        )
        streams = engine.StreamSeconds(
            np.array([time.by_stream for time in times], dtype=np.float64).reshape(-1, len(STREAMS)),
            np.concatenate([np.zeros(0, dtype=np.int8), *(passage.columns.stream for passage in passages)]),
            totals,
        )
        plans: dict[int, tuple[int, int]] = {}  # begin and end by identity: segments of one plan share their events
        tables, length, before, places = [], 0, (0, 0), []
        for segment in segments:
            if id(segment.events) not in plans:
                plans[id(segment.events)] = length, length + len(segment.events)
                length += len(segment.events)
                tables.append(segment.events)
            places.append((*plans[id(segment.events)], *before, segment.joined))
            before = before[0] + len(segment.passages), before[1] + len(segment.sent)
        row = {passage: at for at, passage in enumerate(passages)}
        uses = [work for segment in segments for work in segment.sent]
        sent = {id(work): work for work in uses}  # there are few of them, and identities are faster to hash
        number = {key: at for at, key in enumerate(sent)}
        of_segments = np.array([number[id(work)] for work in uses], dtype=np.int64)
        works = list(sent.values())
        listed = engine.SegmentList(
            np.concatenate(tables),
            np.array(places, dtype=np.int64),
            np.array([row[passage] for segment in segments for passage in segment.passages], dtype=np.int64),
            (self.work_seconds(works) * _across(works, slowdown.data))[of_segments],
            self.launch_seconds(works, slowdown)[of_segments],
            np.array([segment.compute_share for segment in segments], dtype=np.float64),
        )
        starts = len(engine.STARTS) if carried and self._hardware.has_host else engine.NUM_CLOCKS
        ends = np.empty((len(segments), starts, engine.HOST + 1))
        engine.run_events(listed, table, streams, ends)
        return ends

    def _in_context(self, segment: Segment, slowdown: Slowdown) -> SegmentTime:
        times, count = self.ops(segment, slowdown, carried=True), len(STREAMS)
        carried = times.transition
        transition = carried[: engine.HOST, : engine.HOST].copy()
        # the host starts with the computation
        transition[:, 0] = np.maximum(carried[: engine.HOST, 0], carried[: engine.HOST, engine.HOST])
        by_stream = _sums(segment.graph.stream, times.seconds, count + 1)[:count]
        host = float(transition[0, 0] - carried[0, 0]) if self._hardware.has_host else 0.0
        return SegmentTime(transition, carried, by_stream, host)


def _across(works: Sequence[Work], factor: float) -> engine.Floats:
    """The factor for collectives that leave a node, 1 for everything else, shape ``(len(works),)``."""
    if factor == 1.0:
        return np.ones(len(works))
    leaves = [isinstance(work, Collective) and work.num_nodes > 1 for work in works]
    return np.where(np.array(leaves, dtype=np.bool_), factor, 1.0)


def launch_calls(latency: LatencyModel) -> LaunchCalls:
    """The host's software of the job that a latency model was made for; a launch an op if the model states none."""
    return getattr(latency, "calls", ONE_LAUNCH)


def timer_of(latency: LatencyModel) -> Timer:
    """The timer that a latency model owns: made on first use, and freed with the model."""
    try:
        owned = vars(latency)
    except TypeError:  # an object with slots has no other attributes
        return Timer(latency)
    timer = owned.get(_TIMER)
    if timer is None or timer.latency is not latency:  # the timer of a model that this one was copied from
        owned[_TIMER] = timer = Timer(latency)
    return timer


def _time_passage(passage: BlockPass, seconds: engine.Floats, launches: engine.Floats) -> BlockPassTime:
    count = len(seconds)
    # Work without a launch, such as time lost to a collective, waits for no launch, here as in ``time_ops``.
    launched: engine.Floats = np.where(launches > 0.0, launches.cumsum(dtype=np.float64), -np.inf)
    of_host = float(launches.sum())
    if passage.serial:
        total = float(seconds.sum())
        remaining = seconds[::-1].cumsum()[::-1]
        by_host = float((launched + remaining).max(initial=-np.inf))
        streams = _sums(passage.columns.stream, seconds, len(STREAMS))
        return BlockPassTime(seconds, launches, (total, by_host, of_host), streams)
    pointer, before = passage.edges
    finish, critical = np.empty(count), np.empty(count, dtype=np.int32)
    engine.longest_paths(seconds, pointer, before, launched, finish, critical)
    by_host = float(finish.max())
    engine.longest_paths(seconds, pointer, before, np.zeros(count), finish, critical)
    last = int(finish.argmax())
    # Nodes of the computation; the rest is waiting for overlapping work that is on the longest path.
    by_stream = _sums(passage.columns.stream, np.where(passage.columns.beside, 0.0, seconds), len(STREAMS))
    waited = np.zeros(len(STREAMS))
    engine.add_path(
        critical, last, passage.columns.stream.astype(np.int32), seconds * passage.columns.beside, 1.0, waited
    )
    if waited.any():
        by_stream += max(0.0, float(finish[last] - by_stream.sum())) * waited / waited.sum()
    return BlockPassTime(seconds, launches, (float(finish[last]), by_host, of_host), by_stream)


def time_ops(segment: Segment, seconds: engine.Floats, launches: engine.Floats, *, carried: bool = False) -> OpTimes:
    """Compute all longest paths of a segment whose nodes take ``seconds``, shape ``(num_nodes,)``.

    ``launches``: what the host takes to launch each; ``carried``: whether it has a clock of its own, rather than start
    with the computation.
    """
    graph, count = segment.graph, len(seconds)
    starts = engine.HOST + 1 if carried else engine.NUM_CLOCKS
    finish = np.empty((starts, count))
    critical = np.empty((starts, count), dtype=np.int32)
    launches = np.where(graph.taken, 0.0, launches)
    by_host = np.where((launches > 0.0) & ~graph.early, launches.cumsum(), -np.inf)
    for clock in range(starts):
        ready = np.full(count, -np.inf)
        if clock == engine.COMPUTE:
            ready = np.where(graph.early, -np.inf, 0.0)
            if not carried:
                ready = np.maximum(ready, by_host)
        elif clock == engine.HOST:
            ready = by_host
        elif graph.first[clock] >= 0:
            ready[graph.first[clock]] = 0.0
        engine.longest_paths(seconds, graph.pointer, graph.before, ready, finish[clock], critical[clock])
    transition, last = np.full((starts, starts), -np.inf), np.full((starts, starts), -1)
    for to in range(engine.NUM_CLOCKS):
        there = np.flatnonzero(segment.joined | (graph.clock == to) | (graph.blocks & (to == engine.COMPUTE)))
        if len(there):
            transition[to], last[to] = finish[:, there].max(axis=1), there[finish[:, there].argmax(axis=1)]
            last[to, np.isneginf(transition[to])] = -1
    for clock in np.flatnonzero(graph.first < 0).tolist():  # nothing is on this stream
        ends = slice(engine.NUM_CLOCKS) if segment.joined else clock
        transition[ends, clock] = np.maximum(transition[ends, clock], 0.0)
    if carried:
        transition[engine.HOST, engine.HOST] = launches.sum()
    return OpTimes(seconds, finish, critical, transition, last)


def _sums(kind: NDArray[np.int8], seconds: engine.Floats, count: int) -> engine.Floats:
    """Seconds by kind, shape ``(count,)``."""
    return np.bincount(kind, seconds, minlength=count).astype(np.float64)
