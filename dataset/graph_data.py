"""Graphs for learning: a program as a PyTorch Geometric ``HeteroData``, topology only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.op import Op
from stepsight.dataset.program import Dependency, Program

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData

Indices = NDArray[np.int64]

WORK_TYPES = ("op", "collective")
NODE_TYPES = (*WORK_TYPES, "stream")
CONCURRENT = "may_run_concurrently"
RELATIONS = (*(why.value for why in Dependency), CONCURRENT)


def edge_types() -> list[tuple[str, str, str]]:
    """Every edge type of a graph, in a fixed order; each graph has all of them, empty or not."""
    between = [(source, relation, target) for relation in RELATIONS for source in WORK_TYPES for target in WORK_TYPES]
    to_stream = [(source, "runs_on", "stream") for source in WORK_TYPES]
    return [*between, *to_stream, *(("stream", "runs", target) for target in WORK_TYPES)]


def to_hetero(program: Program, max_concurrent: int = 16) -> HeteroData:
    """Topology of a program.

    Shapes: ``k`` nodes of a type, ``e`` edges of a type.

    Args:
        program: What to draw.
        max_concurrent: Per node and stream, so many nearest *may run concurrently* partners at most.

    Returns:
        Node types ``op``, ``collective`` and ``stream`` with ``num_nodes``; the first two with ``index`` ``(k,)``,
        their places in ``program.nodes``; ``stream`` with ``names``.  All of ``edge_types()`` with ``edge_index``
        ``(2, e)`` int64, from what precedes to what follows; *may run concurrently* runs both ways.
    """
    import torch
    from torch_geometric.data import HeteroData

    is_op = np.array([isinstance(node.work, Op) for node in program.nodes], dtype=np.bool_)
    index = {"op": np.flatnonzero(is_op), "collective": np.flatnonzero(~is_op)}
    place = np.zeros(len(program), dtype=np.int64)  # of each node within its type
    data = HeteroData()
    for name, nodes in index.items():
        place[nodes] = np.arange(len(nodes))
        data[name].num_nodes = len(nodes)
        data[name].index = torch.from_numpy(nodes)
    data["stream"].num_nodes = len(program.streams)
    data["stream"].names = list(program.streams)
    pairs = relation_pairs(program, max_concurrent)
    for relation, found in pairs.items():
        for source, target in ((s, t) for s in WORK_TYPES for t in WORK_TYPES):
            chosen = found[:, (is_op[found[0]] == (source == "op")) & (is_op[found[1]] == (target == "op"))]
            data[source, relation, target].edge_index = torch.from_numpy(place[chosen])
    number = {stream: position for position, stream in enumerate(program.streams)}
    stream = np.array([number[node.stream] for node in program.nodes], dtype=np.int64)
    for name, nodes in index.items():
        data[name, "runs_on", "stream"].edge_index = torch.from_numpy(np.stack([np.arange(len(nodes)), stream[nodes]]))
    for name, nodes in index.items():
        data["stream", "runs", name].edge_index = torch.from_numpy(np.stack([stream[nodes], np.arange(len(nodes))]))
    return data


def relation_pairs(program: Program, max_concurrent: int = 16) -> dict[str, Indices]:
    """Edges by relation, ``(2, e)`` places in ``program.nodes``; every one of ``RELATIONS`` is there."""
    found: dict[str, list[tuple[int, int]]] = {relation: [] for relation in RELATIONS}
    for before, after, why in program.all_edges():
        found[why.value].append((before, after))
    out = {relation: np.array(pairs, dtype=np.int64).reshape(-1, 2).T for relation, pairs in found.items()}
    out[CONCURRENT] = concurrent_pairs(program, max_concurrent)
    return out


def concurrent_pairs(program: Program, max_concurrent: int = 16) -> Indices:
    """Nodes on different streams of which neither precedes the other, both ways, ``(2, e)``.

    A stream is totally ordered, so what precedes a node on it is a prefix, what follows a suffix, and what may run
    beside it lies between: vector clocks give both ends without comparing pairs.
    """
    if len(program.streams) < 2:
        return np.zeros((2, 0), dtype=np.int64)
    first, last = (np.array(clocks, dtype=np.int64) for clocks in concurrent_ranges(program))
    streams = np.array([program.streams.index(node.stream) for node in program.nodes])
    pairs = []
    for column in range(len(program.streams)):
        there, others = np.flatnonzero(streams == column), np.flatnonzero(streams != column)
        low, high = first[others, column], np.maximum(last[others, column], first[others, column])
        nearest = np.searchsorted(there, others) - max_concurrent // 2  # in order of issue
        low = np.maximum(low, np.minimum(nearest, high - max_concurrent))
        count = np.minimum(high - low, max_concurrent)
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        pairs.append(np.stack([np.repeat(others, count), there[np.repeat(low, count) + offset]]))
    one_way = np.concatenate(pairs, axis=1)
    both = np.concatenate([one_way, one_way[::-1]], axis=1)
    return np.stack(np.divmod(np.unique(both[0] * len(program) + both[1]), len(program)))


def concurrent_ranges(program: Program) -> tuple[list[list[int]], list[list[int]]]:
    """For every node and stream, the positions on it that may run beside the node: ``first <= position < last``."""
    column = {stream: number for number, stream in enumerate(program.streams)}
    before: list[list[int]] = [[] for _ in program.nodes]
    after: list[list[int]] = [[] for _ in program.nodes]
    for source, target, _ in program.all_edges():
        before[target].append(source)
        after[source].append(target)
    counts = [0] * len(column)
    where = []
    for node in program.nodes:
        stream = column[node.stream]
        where.append((stream, counts[stream]))
        counts[stream] += 1
    first: list[list[int]] = []
    for sources in before:  # edges go forward, so one pass is enough
        clock = [0] * len(counts)
        for source in sources:
            stream, position = where[source]
            clock = [mine if mine > other else other for mine, other in zip(clock, first[source], strict=True)]
            clock[stream] = max(clock[stream], position + 1)
        first.append(clock)
    last: list[list[int]] = [counts] * len(where)
    for place in range(len(where) - 1, -1, -1):
        clock = list(counts)
        for target in after[place]:
            stream, position = where[target]
            clock = [mine if mine < other else other for mine, other in zip(clock, last[target], strict=True)]
            clock[stream] = min(clock[stream], position)
        last[place] = clock
    return first, last
