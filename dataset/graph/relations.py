"""Relations between the nodes of a program: its dependencies by kind, and what may run concurrently."""

from __future__ import annotations

import numpy as np

from stepsight.dataset.graph.columns import WHY, Dependency, Graph, Ints

CONCURRENT = "may_run_concurrently"
RELATIONS = (*(why.value for why in Dependency), CONCURRENT)


def relation_pairs(program: Graph) -> dict[str, Ints]:
    """Edges by relation, ``(2, e)`` indices into ``program.nodes``; all of ``RELATIONS`` are present."""
    ends = np.stack([program.edge_columns["source"], program.edge_columns["target"]])
    out = {why.value: ends[:, program.edge_columns["why"] == number] for number, why in enumerate(WHY)}
    return {**out, CONCURRENT: concurrent_pairs(program)}


def concurrent_pairs(program: Graph, max_concurrent: int = 16) -> Ints:
    """Work on different streams neither of which precedes the other, in both directions, ``(2, e)``.

    A stream is totally ordered, so what precedes a node on it is a prefix, what follows a suffix, and what may run
    beside it lies between: vector clocks give both ends without comparing pairs.
    """
    count, work = len(program), np.flatnonzero(program.on_device)
    used, number = np.unique(program.columns["stream"][work], return_inverse=True)
    if len(used) < 2:
        return np.zeros((2, 0), dtype=np.int64)
    stream = np.full(count, -1, dtype=np.int64)  # -1: host calls run beside anything
    stream[work] = number
    source, target = program.edge_columns["source"], program.edge_columns["target"]
    first = _clocks(source, target, stream)
    last = np.bincount(number) - _clocks(count - 1 - target, count - 1 - source, stream[::-1])[::-1]
    pairs = []
    for place in range(len(used)):
        there, others = work[number == place], work[number != place]
        low, high = first[others, place], np.maximum(last[others, place], first[others, place])
        nearest = np.searchsorted(there, others) - max_concurrent // 2  # in order of issue
        low = np.maximum(low, np.minimum(nearest, high - max_concurrent))
        run = np.minimum(high - low, max_concurrent)
        offset = np.arange(run.sum()) - np.repeat(np.cumsum(run) - run, run)
        pairs.append(np.stack([np.repeat(others, run), there[np.repeat(low, run) + offset]]))
    one_way = np.concatenate(pairs, axis=1)
    both = np.concatenate([one_way, one_way[::-1]], axis=1)
    return np.stack(np.divmod(np.unique(both[0] * count + both[1]), count))


def _clocks(source: Ints, target: Ints, stream: Ints) -> Ints:
    """``(n, streams)``: how many nodes of each stream precede each node; edges go forward, so one pass is enough."""
    order, where = (
        np.argsort(target, kind="stable"),
        list(zip(stream.tolist(), positions(stream).tolist(), strict=True)),
    )
    found = [[0] * (int(stream.max()) + 1) for _ in where]
    for before, after in zip(source[order].tolist(), target[order].tolist(), strict=True):
        clock = [mine if mine > other else other for mine, other in zip(found[after], found[before], strict=True)]
        own, place = where[before]
        if own >= 0 and clock[own] <= place:
            clock[own] = place + 1
        found[after] = clock
    return np.array(found, dtype=np.int64)


def positions(stream: Ints) -> Ints:
    """Position of each node on its stream."""
    order = np.argsort(stream, kind="stable")
    position = np.empty(len(stream), dtype=np.int64)
    position[order] = np.arange(len(stream)) - np.searchsorted(stream[order], stream[order], "left")
    return position
