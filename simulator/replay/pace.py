"""Correct traced steps for the profiler's slowdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stepsight.dataset.imported.rank_graph import OP, RankGraph
from stepsight.simulator.replay.changes import host_scaled
from stepsight.simulator.replay.replay import replay

_LEAST_PACE = 0.25  # share of the profiled time: a profiler does not slow a host more than this
_HALVINGS = 12


def as_timed(graphs: Sequence[RankGraph], iteration_s: float) -> list[RankGraph]:
    """Scale the host's time such that a step takes as long as without a profiler.

    All ops and the host's own work take the same part of their profiled time.  Collectives stay as they are, because a
    profiler does not slow what worker threads send.  Graphs of devices stay too: their kernels run at their own pace.

    Args:
        graphs: Of all ranks of a run.
        iteration_s: A step without a profiler.
    """
    if any(graph.device != "cpu" for graph in graphs) or replay(graphs).replayed_s <= iteration_s:
        return list(graphs)
    low, high = _LEAST_PACE, 1.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        slow = replay([_paced(graph, middle) for graph in graphs]).replayed_s > iteration_s
        low, high = (low, middle) if slow else (middle, high)
    return [_paced(graph, high) for graph in graphs]


def _paced(graph: RankGraph, pace: float) -> RankGraph:
    changed = host_scaled(graph, pace)
    ops = graph.nodes["kind"] == OP
    return replace(changed, duration_s=np.where(ops, changed.duration_s * pace, changed.duration_s))
