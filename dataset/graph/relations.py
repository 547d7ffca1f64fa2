"""Relations between the nodes of a program: its dependencies by kind, and what may run concurrently."""

from __future__ import annotations

import numpy as np

from stepsight.dataset.graph.columns import WHY, Dependency, Ints, NodeArrays

CONCURRENT = "may_run_concurrently"
RELATIONS = (*(why.value for why in Dependency), CONCURRENT)


def relation_pairs(program: NodeArrays, max_concurrent: int = 16) -> dict[str, Ints]:
    """Edges by relation, ``(2, e)`` indices into ``program.nodes``; all of ``RELATIONS`` are present."""
    ends = np.stack([program.edge_columns["source"], program.edge_columns["target"]])
    out = {why.value: ends[:, program.edge_columns["why"] == number] for number, why in enumerate(WHY)}
    out[CONCURRENT] = concurrent_pairs(program, max_concurrent)
    return out


def concurrent_pairs(program: NodeArrays, max_concurrent: int = 16) -> Ints:
    """Work on different streams neither of which precedes the other, in both directions, ``(2, e)``.

    A stream is totally ordered, so what precedes a node on it is a prefix, what follows a suffix, and what may run
    beside it lies between: vector clocks give both ends without comparing pairs.
    """
    work = np.flatnonzero(program.on_device)
    used, column = np.unique(program.columns["stream"][work], return_inverse=True)
    if len(used) < 2:
        return np.zeros((2, 0), dtype=np.int64)
    columns = np.full(len(program), -1, dtype=np.int64)
    columns[work] = column
    first, last = concurrent_ranges(program, columns)
    pairs = []
    for place in range(len(used)):
        there, others = work[column == place], work[column != place]
        low, high = first[others, place], np.maximum(last[others, place], first[others, place])
        nearest = np.searchsorted(there, others) - max_concurrent // 2  # in order of issue
        low = np.maximum(low, np.minimum(nearest, high - max_concurrent))
        count = np.minimum(high - low, max_concurrent)
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        pairs.append(np.stack([np.repeat(others, count), there[np.repeat(low, count) + offset]]))
    one_way = np.concatenate(pairs, axis=1)
    both = np.concatenate([one_way, one_way[::-1]], axis=1)
    return np.stack(np.divmod(np.unique(both[0] * len(program) + both[1]), len(program)))


def concurrent_ranges(program: NodeArrays, columns: Ints) -> tuple[Ints, Ints]:
    """For every node and stream, the positions on it that may run concurrently: ``first <= position < last``.

    ``columns``: ``(n,)``, number of each node's stream, -1 for nodes that run beside anything.
    """
    position = positions(columns)
    counts = np.bincount(columns[columns >= 0]).tolist()
    order = np.argsort(program.edge_columns["target"], kind="stable")  # edges go forward, so one pass is enough
    ends = [program.edge_columns[name][order].tolist() for name in ("source", "target")]
    where = list(zip(columns.tolist(), position.tolist(), strict=True))
    first = [[0] * len(counts) for _ in where]
    for source, target in zip(*ends, strict=True):
        clock = [mine if mine > other else other for mine, other in zip(first[target], first[source], strict=True)]
        stream, place = where[source]
        if stream >= 0 and clock[stream] <= place:
            clock[stream] = place + 1
        first[target] = clock
    last = [counts] * len(where)
    order = np.argsort(-program.edge_columns["source"], kind="stable")
    ends = [program.edge_columns[name][order].tolist() for name in ("source", "target")]
    for source, target in zip(*ends, strict=True):
        clock = [mine if mine < other else other for mine, other in zip(last[source], last[target], strict=True)]
        stream, place = where[target]
        if stream >= 0 and clock[stream] > place:
            clock[stream] = place
        last[source] = clock
    return np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)


def positions(stream: Ints) -> Ints:
    """Position of each node on its stream."""
    order = np.argsort(stream, kind="stable")
    firsts = np.searchsorted(stream[order], stream[order], "left")
    position = np.empty(len(stream), dtype=np.int64)
    position[order] = np.arange(len(stream)) - firsts
    return position
