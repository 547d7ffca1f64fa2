"""Merging the gradient buckets of traced steps into larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.imported.meetings import meetings
from stepsight.dataset.imported.rank_graph import RankGraph
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.readers.host import merge
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.replay.changes import Floats, Tally, seconds_of


def with_buckets(graphs: Sequence[RankGraph], num_bytes: float, latency: LatencyModel, tally: Tally) -> list[RankGraph]:
    """Merge the gradient all-reduces of a step into buckets of at least a number of bytes.

    Each bucket runs when its last part was ready on all ranks.  It takes what its parts took together, those that ran
    at once counted once, times what the latency model says one message takes beside its parts.

    Raises:
        StepsightError: If there are no gradient all-reduces, or they are larger already.
    """
    out, joined = [], 0
    for graph, arrived in zip(graphs, _arrivals(graphs), strict=True):
        duration, end = graph.duration_s.copy(), graph.end_s
        for bucket in _buckets(graph, num_bytes):
            parts = [graph.works[graph.nodes["work"][node]] for node in bucket]
            last = parts[-1]
            assert isinstance(last, Collective)
            whole = replace(last, num_bytes=sum(part.num_bytes for part in parts if isinstance(part, Collective)))
            ratio = float(seconds_of(latency, [whole])[0] / seconds_of(latency, parts).sum())
            busy = merge(list(zip(arrived[bucket].tolist(), end[bucket].tolist(), strict=True)))
            seconds, waited = float((busy[:, 1] - busy[:, 0]).sum()), arrived[bucket[-1]] - graph.start_s[bucket[-1]]
            duration[bucket[:-1]], duration[bucket[-1]] = 0.0, waited + seconds * ratio
            tally.add(seconds, True)
            joined += 1
        out.append(replace(graph, duration_s=duration))
    if not joined:
        raise StepsightError(f"--bucket-mb joins gradient all-reduces, got none smaller than {num_bytes / 1e6:g} MB")
    return out


def _arrivals(graphs: Sequence[RankGraph]) -> list[Floats]:
    """When the last rank reached each node, on each rank's own clock; ``(n,)`` each."""
    found = [graph.start_s.copy() for graph in graphs]
    met, offsets = meetings(graphs)
    for members in met:
        latest = max(float(graphs[place].start_s[node]) + offsets[place] for place, node in members.items())
        for place, node in members.items():
            found[place][node] = min(latest - offsets[place], float(graphs[place].end_s[node]))
    return found


def _buckets(graph: RankGraph, num_bytes: float) -> list[list[int]]:
    """Groups of at least two all-reduces in backward that are merged."""
    kinds = np.array([*(work.kind == "all_reduce" for work in graph.works), False], dtype=np.bool_)
    nodes = np.flatnonzero(kinds[graph.nodes["work"]] & (graph.nodes["phase"] == 1) & (graph.nodes["step"] >= 0))
    found: list[list[int]] = []
    current: list[int] = []
    size = 0.0
    for node in nodes.tolist():
        work = graph.works[graph.nodes["work"][node]]
        before = current[-1] if current else node
        if graph.nodes["step"][before] != graph.nodes["step"][node]:
            found, current, size = [*found, current], [], 0.0
        current.append(node)
        size += work.num_bytes
        if size >= num_bytes:
            found, current, size = [*found, current], [], 0.0
    return [bucket for bucket in [*found, current] if len(bucket) > 1]
