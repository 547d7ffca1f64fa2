"""Graphs of several ranks joined into one: clocks aligned, and each collective a meeting of its ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.imported.meetings import meetings
from stepsight.dataset.imported.rank_graph import RankGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass
class Joined:
    """The graphs of all ranks as one list of nodes, followed by the meetings of collectives.

    Shapes: ``n`` nodes, ``e`` edges.

    Attributes:
        graphs: Of the ranks.
        first: Where the nodes of each rank begin.
        offset_s: Added to each rank's times, so that the clocks agree.
        seconds: ``(n,)``: duration; of a collective what it takes once all ranks are there.
        ready: ``(n,)``: earliest start of nodes that wait for nothing, else ``-inf``.
        source, target, delay: ``(e,)`` each.
        meeting: ``(n,)``: the meeting that a collective waits for, -1: none.
        order: ``(n,)``: nodes such that each comes after its sources.
    """

    graphs: Sequence[RankGraph]
    first: list[int]
    offset_s: list[float]
    seconds: Floats
    ready: Floats
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    delay: Floats
    meeting: NDArray[np.int64]
    order: Ints


def join(graphs: Sequence[RankGraph]) -> Joined:
    """Join the graphs of a job's ranks.

    Raises:
        TraceError: If the dependencies of the ranks contradict each other.
    """
    met, offsets = meetings(graphs)
    first = [0, *np.cumsum([len(graph) for graph in graphs]).tolist()]
    count = first[-1]
    seconds = np.concatenate([*(graph.duration_s + 0.0 for graph in graphs), np.zeros(len(met))])
    source = np.concatenate([graph.edges["source"] + begin for graph, begin in zip(graphs, first, strict=False)])
    target = np.concatenate([graph.edges["target"] + begin for graph, begin in zip(graphs, first, strict=False)])
    extra = [graph.unrecorded_s[graph.edges["target"]] for graph in graphs]
    delay = np.concatenate([graph.delay_s for graph in graphs]) + np.concatenate(extra)
    ready = np.full(count + len(met), -np.inf)
    starts = np.concatenate([graph.start_s + offset for graph, offset in zip(graphs, offsets, strict=True)])
    rooted = np.ones(count, dtype=np.bool_)
    rooted[target] = False
    ready[:count][rooted] = starts[rooted]
    meeting = np.full(count, -1, dtype=np.int64)
    for number, members in enumerate(met):
        nodes = [first[place] + node for place, node in members.items()]
        meeting[nodes] = count + number
        ends = starts[nodes] + seconds[nodes]
        seconds[nodes] = np.clip(ends - starts[nodes].max(), 0.0, seconds[nodes])
    joined = Joined(graphs, first[:-1], offsets, seconds, ready, source, target, delay, meeting, np.zeros(0, np.int32))
    return _met(joined)


def _met(joined: Joined) -> Joined:
    """Route the dependencies of a collective to its meeting, and from the meeting to all of its ranks."""
    met = joined.meeting >= 0
    members = np.flatnonzero(met)
    joined.ready[joined.meeting[members]] = np.maximum(joined.ready[joined.meeting[members]], joined.ready[members])
    joined.ready[members] = -np.inf
    into = met[joined.target]
    joined.target[into] = joined.meeting[joined.target[into]]
    joined.source = np.concatenate([joined.source, joined.meeting[members]])
    joined.target = np.concatenate([joined.target, members])
    joined.delay = np.concatenate([joined.delay, np.zeros(len(members))])
    joined.order = _sorted(joined)
    return joined


def _sorted(joined: Joined) -> Ints:
    """Sort nodes such that each comes after its sources."""
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
