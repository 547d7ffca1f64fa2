"""Longest paths through static graphs in issue order, and the codes of events and clocks.

Ties are broken towards the dependency that is listed first, so results never depend on chance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.compiling import compiled

RUN, SEND, BLOCK, WAIT = range(4)  # events of a segment: see ``lowering.segment.Segment.events``
# Clocks of a stage: its computation; replicas' traffic; the traffic of a second group (hybrid shards, experts).
COMPUTE, DATA, SECOND = range(3)
NUM_CLOCKS = 3
HOST = NUM_CLOCKS  # the clock of the host, which launches, if it has its own
ON_HOST = 2  # replaces the flag "early" of an event that sends: work of the host itself


Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@compiled
def longest_paths(seconds: Floats, pointer: Ints, before: Ints, ready: Floats, finish: Floats, critical: Ints) -> None:
    """Finish times of all nodes of a graph, and for each node the dependency that decided its start.

    Args:
        seconds: Duration of each node, shape ``(n,)``; a node only depends on earlier ones.
        pointer, before: Dependencies in CSR: those of node ``i`` are ``before[pointer[i]:pointer[i + 1]]``.
        ready: Earliest start of each node by itself, ``-inf`` where its dependencies alone decide.
        finish: Filled, shape ``(n,)``; ``-inf`` for nodes that nothing ready leads to.
        critical: Filled, shape ``(n,)``: the dependency that decided the start, -1 if ``ready`` did.
    """
    for node in range(len(seconds)):
        start = ready[node]
        cause = -1
        for at in range(pointer[node], pointer[node + 1]):
            if finish[before[at]] > start:
                start = finish[before[at]]
                cause = before[at]
        finish[node] = start + seconds[node]
        critical[node] = cause


class DelayedGraph(NamedTuple):
    """A graph whose dependencies have durations.

    Attributes:
        order: The nodes such that each comes after those that it depends on, shape ``(n,)``.
        pointer, edges: Edges into node ``i`` are ``edges[pointer[i]:pointer[i + 1]]``.
        source, delay: Of each edge: the node it comes from, and the time from that node's end.
    """

    order: Ints
    pointer: Ints
    edges: Ints
    source: Ints
    delay: Floats


@compiled
def delayed_paths(graph: DelayedGraph, seconds: Floats, ready: Floats, ends: Floats, cause: Ints) -> None:
    """End times of all nodes of a graph whose dependencies have durations, and the edge that decided each start.

    Args:
        graph: Order and dependencies.
        seconds: Duration of each node, shape ``(n,)``.
        ready: Earliest start of each node by itself, ``-inf`` where its dependencies alone decide.
        ends: Filled, shape ``(n,)``.
        cause: Filled, same shape: the edge that decided the start, -1 if ``ready`` did.
    """
    for at in range(len(graph.order)):
        node = graph.order[at]
        start = ready[node]
        cause[node] = -1
        for place in range(graph.pointer[node], graph.pointer[node + 1]):
            edge = graph.edges[place]
            if ends[graph.source[edge]] + graph.delay[edge] > start:
                start = ends[graph.source[edge]] + graph.delay[edge]
                cause[node] = edge
        ends[node] = start + seconds[node]


@compiled
def find_ends(
    clock: NDArray[np.int8],
    blocks: NDArray[np.bool_],
    joined: bool,
    finish: Floats,
    transition: Floats,
    last: NDArray[np.int64],
) -> None:
    """Longest path through a program, from each clock to each clock.

    Args:
        clock: Of each node's stream, shape ``(n,)``.
        blocks: Whether the computation waits for each node, same shape.
        joined: Whether all clocks end together, with the last node of all.
        finish: Longest path from each clock to the end of each node, shape ``(num_starts, n)``; a start beyond the
            clocks of streams is the host.
        transition: All ``-inf``; filled where a path leads, 0 from a stream that nothing is on to itself; shape
            ``(num_clocks, num_starts)``: to clock, from clock.
        last: All -1; filled with the node where each path ends; same shape.
    """
    num_clocks = len(transition)
    for to in range(num_clocks):
        nothing = True
        for node in range(len(clock)):
            if clock[node] == to:
                nothing = False
            if joined or clock[node] == to or (to == 0 and blocks[node]):
                for start in range(len(finish)):
                    if finish[start, node] > transition[to, start]:
                        transition[to, start] = finish[start, node]
                        last[to, start] = node
        if nothing:
            for end in range(num_clocks):
                if end == to or joined:
                    transition[end, to] = max(transition[end, to], 0.0)


@compiled
def add_path(critical: Ints, node: int, work: Ints, amount: Floats, weight: float, counts: Floats) -> None:
    """Walk back from a node and add ``weight * amount`` of every node on its critical path to ``counts[work]``."""
    while node >= 0:
        counts[work[node]] += weight * amount[node]
        node = critical[node]
