"""Replay of traced or captured steps: the graphs of all ranks are joined, walked and compared with the measurement.

``join`` makes one graph of all ranks, in which each collective is a meeting of its ranks.  ``find_times`` starts
every node as soon as its dependencies allow.  ``replay`` compares the times of a trace with what was measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Program
from stepsight.dataset.graph.rank_trace import Meeting, meetings
from stepsight.dataset.traces.read_rank import lateness
from stepsight.simulator.clock.engine import DelayedGraph, delayed_paths

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(eq=False)
class JoinedGraph:
    """The graphs of all ranks as one list: ``n`` nodes with ``e`` edges, then ``m`` meetings of ``c`` members."""

    graphs: Sequence[Program]  # of the ranks
    first: list[int]  # (ranks + 1,): where the nodes of each rank begin, and where the meetings do
    meetings: Sequence[Meeting]  # nodes that meet, by the place of their rank
    offset_s: Sequence[float]  # added to each rank's times, so that the clocks agree
    seconds: Floats  # (n + m,): duration; of a collective what it takes once all ranks are there
    ready: Floats  # (n + m,): earliest start of nodes that wait for nothing, else -inf
    # source, target, delay: (e + c,): dependencies of ranks, with a meeting in the place of a collective that waits;
    # then a dependency of each collective on its meeting
    source: Ints
    target: Ints
    delay: Floats
    waiting: Ints  # (e,): the nodes that wait, without meetings
    meeting: Ints  # (n,): the meeting that a collective waits for, -1: none

    def located(self, node: int) -> tuple[Any, int]:
        """The graph that a node is of, None for a meeting, and its place there."""
        place = int(np.searchsorted(self.first, node, "right")) - 1
        return (self.graphs[place] if place < len(self.graphs) else None), node - self.first[place]


@dataclass(eq=False)
class ReplayTimes:
    """A walked graph: start and end of every node, and the edge that decided each start (-1: none)."""

    joined: JoinedGraph
    start_s: Floats
    end_s: Floats
    cause: NDArray[np.int32]

    def before(self, node: int) -> int:
        """The node whose end decided the start of a node, -1: none."""
        edge = int(self.cause[node])
        return int(self.joined.source[edge]) if edge >= 0 else -1

    def path(self, node: int) -> Iterator[int]:
        """Nodes of the critical path to a node, from its end."""
        while node >= 0:
            yield node
            node = self.before(node)

    def arrivals(self) -> Floats:
        """``(n,)``: when each node began on its stream; for a collective, before its peers have arrived."""
        joined = self.joined
        start = self.start_s[: len(joined.meeting)].copy()
        met = np.flatnonzero(joined.meeting[joined.waiting] >= 0)
        earliest = np.full(len(start), -np.inf)
        np.maximum.at(earliest, joined.waiting[met], self.end_s[joined.source[met]] + joined.delay[met])
        members = np.flatnonzero((joined.meeting >= 0) & ~np.isinf(earliest))
        start[members] = np.minimum(earliest[members], start[members])
        return start


def join(graphs: Sequence[Program]) -> JoinedGraph:
    """Join the graphs of a job's ranks: clocks are aligned, and a collective begins when all of its ranks are there."""
    met, offsets = meetings(graphs)
    first = np.cumsum([0, *(len(graph) for graph in graphs)]).tolist()
    count = first[-1]
    seconds = np.concatenate([*(graph.duration_s + 0.0 for graph in graphs), np.zeros(len(met))])
    source, waiting = (
        np.concatenate([graph.edge_columns[end] + begin for graph, begin in zip(graphs, first, strict=False)])
        for end in ("source", "target")
    )
    delay = np.concatenate([graph.delay_s + graph.unrecorded_s[graph.edge_columns["target"]] for graph in graphs])
    starts = np.concatenate([graph.start_s + offset for graph, offset in zip(graphs, offsets, strict=True)])
    ready = np.append(starts, np.full(len(met), -np.inf))
    ready[waiting] = -np.inf
    meeting = np.full(count, -1, dtype=np.int64)
    for number, together in enumerate(met, count):
        nodes = [first[place] + node for place, node in together.items()]
        meeting[nodes], ready[number] = number, ready[nodes].max()
        seconds[nodes] = np.clip(starts[nodes] + seconds[nodes] - starts[nodes].max(), 0.0, seconds[nodes])
    members = np.flatnonzero(meeting >= 0)
    ready[members] = -np.inf
    target = np.concatenate([np.where(meeting[waiting] >= 0, meeting[waiting], waiting), members])
    source, delay = np.append(source, meeting[members]), np.append(delay, np.zeros(len(members)))
    return JoinedGraph(graphs, first, met, offsets, seconds, ready, source, target, delay, waiting, meeting)


def find_times(joined: JoinedGraph) -> ReplayTimes:
    """When nodes of a joined graph begin and end; raises ``TraceError`` if dependencies of the ranks contradict."""
    count = len(joined.seconds)
    by_target = np.argsort(joined.target, kind="stable").astype(np.int32)
    pointer = np.searchsorted(joined.target[by_target], np.arange(count + 1)).astype(np.int32)
    ready = np.where(np.isinf(joined.ready) & (np.diff(pointer) == 0), 0.0, joined.ready)
    ends, cause = np.zeros(count), np.full(count, -1, dtype=np.int32)
    graph = DelayedGraph(_order(joined), pointer, by_target, joined.source.astype(np.int32), joined.delay)
    delayed_paths(graph, joined.seconds, ready, ends, cause)
    return ReplayTimes(joined, ends - joined.seconds, ends, cause)


def _order(joined: JoinedGraph) -> NDArray[np.int32]:
    """Nodes such that each comes after its sources."""
    count = len(joined.seconds)
    by_source = np.argsort(joined.source, kind="stable")
    bounds = np.searchsorted(joined.source[by_source], np.arange(count + 1)).tolist()
    targets = joined.target[by_source].tolist()
    waiting = np.bincount(joined.target, minlength=count).tolist()
    queue = deque(node for node in range(count) if not waiting[node])
    order: list[int] = []
    while queue:
        node = queue.popleft()
        order.append(node)
        for other in targets[bounds[node] : bounds[node + 1]]:
            waiting[other] -= 1
            if not waiting[other]:
                queue.append(other)
    if len(order) < count:
        why = "the traces are of different steps or different jobs"
        raise TraceError(f"ranks must meet in the same order, got {count - len(order)} calls that deadlock: {why}")
    return np.array(order, dtype=np.int32)


MARK = "step"  # name of the host calls at the borders of steps


@dataclass
class StreamReplay:
    """One stream of one rank in the traced steps; seconds."""

    rank: int
    stream: str
    measured_busy_s: float
    replayed_busy_s: float
    unexplained_idle_s: float

    @property
    def error_percent(self) -> float:
        """Difference of the replayed busy time from the measured one, in percent."""
        return 100.0 * (self.replayed_busy_s / self.measured_busy_s - 1.0) if self.measured_busy_s else 0.0


@dataclass
class RankReplay:
    """One rank: seconds of a step, measured and replayed."""

    rank: int
    measured_s: float
    replayed_s: float


@dataclass
class Replay:
    """A replayed run."""

    walked: ReplayTimes  # every node of the replayed graphs in time
    ranks: tuple[RankReplay, ...]  # each rank
    streams: tuple[StreamReplay, ...]  # each device stream of each rank (host thread where the host computes)
    unexplained_percent: float  # part of the steps in which the busiest stream of a rank idles for no recorded reason
    unrecorded_percent: float  # part of the steps in which it runs what a trimmed trace leaves out

    @property
    def measured_s(self) -> float:
        """A step of the slowest rank, on average."""
        return max(each.measured_s for each in self.ranks)

    @property
    def replayed_s(self) -> float:
        """The same from the replay."""
        return max(each.replayed_s for each in self.ranks)

    @property
    def error_percent(self) -> float:
        """Replayed against measured."""
        return 100.0 * (self.replayed_s / self.measured_s - 1.0) if self.measured_s else 0.0

    @property
    def steps(self) -> int:
        """Steps that were walked."""
        return max(len(graph.steps_s) for graph in self.walked.joined.graphs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``stepsight replay --json`` prints them."""
        names = ("measured_s", "replayed_s", "error_percent", "steps", "unexplained_percent", "unrecorded_percent")
        return {
            **{name: getattr(self, name) for name in names},
            "ranks": [vars(each) for each in self.ranks],
            "streams": [{**vars(each), "error_percent": each.error_percent} for each in self.streams],
        }


def replay(graphs: Sequence[Program]) -> Replay:
    """Replay the traced steps of a run; raises ``TraceError`` if there are none, or the ranks contradict each other."""
    if not graphs or not any(len(graph.steps_s) for graph in graphs):
        raise TraceError("a replay needs at least one traced step, got none: profile with a schedule, or more steps")
    walked = find_times(join(graphs))
    arrivals, first = walked.arrivals(), walked.joined.first
    ranks, streams = list[RankReplay](), list[StreamReplay]()
    idle = unrecorded = whole = 0.0
    for graph, begin in zip(graphs, first, strict=False):
        count = len(graph.steps_s)
        if not count:
            continue
        start, end = (times[begin : begin + len(graph)] for times in (arrivals, walked.end_s))
        measured = _span(graph, graph.start_s, graph.end_s)
        ranks.append(RankReplay(graph.rank, measured / count, _span(graph, start, end) / count))
        whole += measured
        late = lateness(graph) - graph.unrecorded_s
        inside, stream = graph.columns["step"] >= 0, graph.columns["stream"]
        mine, num = inside & graph.on_device, len(graph.streams)
        sums = [np.bincount(stream[mine], each[mine], num) for each in (graph.duration_s, end - start, late)]
        lost_s = np.bincount(stream[inside], graph.unrecorded_s[inside], num)
        busy = np.flatnonzero(np.bincount(stream[mine], minlength=num)).tolist()
        times = zip(busy, *(each[busy].tolist() for each in (*sums, lost_s)), strict=True)
        own = [(StreamReplay(graph.rank, graph.streams[number], *each), lost) for number, *each, lost in times]
        streams += [each for each, _ in own]
        if own:
            busiest, lost = max(own, key=lambda each: each[0].measured_busy_s)
            idle, unrecorded = idle + busiest.unexplained_idle_s, unrecorded + lost
    shares = [100.0 * seconds / whole if whole else 0.0 for seconds in (idle, unrecorded)]
    return Replay(walked, tuple(ranks), tuple(streams), *shares)


def _span(graph: Program, start: Floats, end: Floats) -> float:
    """Time from the beginning of the first step to the end of the last, on the host and on the device."""
    marks = np.array([name == MARK for name in graph.names], dtype=np.bool_)[graph.columns["name"]] & ~graph.on_device
    first, last = (
        np.flatnonzero(marks & (graph.start_s >= moment - 1e-7))[:1]
        for moment in (graph.steps_s[0, 0], graph.steps_s[-1, 1])
    )
    work = np.flatnonzero((graph.columns["step"] >= 0) & graph.on_device)
    begins, ends = start[first if len(first) else work[:1]], end[np.append(last, work)]
    return float(ends.max() - begins[0]) if len(ends) and len(begins) else 0.0
