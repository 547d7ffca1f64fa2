"""Relations between the nodes of a program: its dependencies by kind, and what may run concurrently."""

from __future__ import annotations

import numpy as np

from stepsight.dataset.graph.program import WHY, Dependency, Indices, Program

CONCURRENT = "may_run_concurrently"
RELATIONS = (*(why.value for why in Dependency), CONCURRENT)


def relation_pairs(program: Program, max_concurrent: int = 16) -> dict[str, Indices]:
    """Edges by relation, ``(2, e)`` indices into ``program.nodes``; all of ``RELATIONS`` are present."""
    ends = np.stack([program.edge_columns["source"], program.edge_columns["target"]])
    out = {why.value: ends[:, program.edge_columns["why"] == number] for number, why in enumerate(WHY)}
    out[CONCURRENT] = concurrent_pairs(program, max_concurrent)
    return out


def concurrent_pairs(program: Program, max_concurrent: int = 16) -> Indices:
    """Nodes on different streams neither of which precedes the other, in both directions, ``(2, e)``.

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
    """For every node and stream, the positions on it that may run concurrently: ``first <= position < last``."""
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
