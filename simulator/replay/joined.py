"""Graphs of several ranks joined into one, each collective a meeting of its ranks, and walked from its dependencies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.rank_graph import Meeting, RankGraph, meetings
from stepsight.simulator.clock.engine import DelayedGraph, delayed_paths

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(eq=False)
class Joined:
    """The graphs of all ranks as one list of nodes, followed by the meetings of collectives.

    Shapes: ``n`` nodes of ranks, ``m`` meetings, ``e`` edges of ranks, ``c`` members of meetings.

    Attributes:
        graphs: Of the ranks.
        first: ``(ranks + 1,)``: where the nodes of each rank begin, and where the meetings do.
        meetings: Nodes that meet, by the place of their rank.
        offset_s: Added to each rank's times, so that the clocks agree.
        seconds: ``(n + m,)``: duration; of a collective what it takes once all ranks are there.
        ready: ``(n + m,)``: earliest start of nodes that wait for nothing, else ``-inf``.
        source, target, delay: ``(e + c,)``: dependencies of ranks, with a meeting in the place of a collective that
            waits; then a dependency of each collective on its meeting.
        waiting: ``(e,)``: the nodes that wait, without meetings.
        meeting: ``(n,)``: the meeting that a collective waits for, -1: none.
    """

    graphs: Sequence[RankGraph]
    first: list[int]
    meetings: Sequence[Meeting]
    offset_s: Sequence[float]
    seconds: Floats
    ready: Floats
    source: Ints
    target: Ints
    delay: Floats
    waiting: Ints
    meeting: Ints

    def rank_of(self, node: int) -> int:
        """Place of the rank that a node is of; the number of ranks for a meeting."""
        return int(np.searchsorted(self.first, node, "right")) - 1


@dataclass(eq=False)
class Walk:
    """A walked graph: start and end of every node, and the edge that decided each start (-1: none)."""

    joined: Joined
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


def join(graphs: Sequence[RankGraph]) -> Joined:
    """Join the graphs of a job's ranks: clocks are aligned, and a collective begins when all of its ranks are there."""
    met, offsets = meetings(graphs)
    first = np.concatenate([[0], np.cumsum([len(graph) for graph in graphs])]).tolist()
    count = first[-1]
    seconds = np.concatenate([*(graph.duration_s + 0.0 for graph in graphs), np.zeros(len(met))])
    source, waiting = (
        np.concatenate([graph.edges[end] + begin for graph, begin in zip(graphs, first, strict=False)])
        for end in ("source", "target")
    )
    delay = np.concatenate([graph.delay_s + graph.unrecorded_s[graph.edges["target"]] for graph in graphs])
    starts = np.concatenate([graph.start_s + offset for graph, offset in zip(graphs, offsets, strict=True)])
    ready = np.full(count + len(met), -np.inf)
    ready[:count] = starts
    ready[waiting] = -np.inf
    meeting = np.full(count, -1, dtype=np.int64)
    for number, together in enumerate(met):
        nodes = [first[place] + node for place, node in together.items()]
        meeting[nodes] = count + number
        ends = starts[nodes] + seconds[nodes]
        seconds[nodes] = np.clip(ends - starts[nodes].max(), 0.0, seconds[nodes])
        ready[count + number] = ready[nodes].max()
    members = np.flatnonzero(meeting >= 0)
    ready[members] = -np.inf
    target = np.concatenate([np.where(meeting[waiting] >= 0, meeting[waiting], waiting), members])
    source = np.concatenate([source, meeting[members]])
    delay = np.concatenate([delay, np.zeros(len(members))])
    return Joined(graphs, first, met, offsets, seconds, ready, source, target, delay, waiting, meeting)


def walk(joined: Joined) -> Walk:
    """Walk a joined graph: every node starts as soon as its dependencies allow.

    Raises:
        TraceError: If the dependencies of the ranks contradict each other.
    """
    count = len(joined.seconds)
    by_target = np.argsort(joined.target, kind="stable").astype(np.int32)
    pointer = np.searchsorted(joined.target[by_target], np.arange(count + 1)).astype(np.int32)
    ready = np.where(np.isinf(joined.ready) & (np.diff(pointer) == 0), 0.0, joined.ready)
    ends, cause = np.zeros(count), np.full(count, -1, dtype=np.int32)
    graph = DelayedGraph(_order(joined), pointer, by_target, joined.source.astype(np.int32), joined.delay)
    delayed_paths(graph, joined.seconds, ready, ends, cause)
    return Walk(joined, ends - joined.seconds, ends, cause)


def _order(joined: Joined) -> NDArray[np.int32]:
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
        raise TraceError(
            f"ranks must meet in the same order, got {count - len(order)} calls that deadlock: "
            "the traces are of different steps or different jobs"
        )
    return np.array(order, dtype=np.int32)
