"""Launch times of ops on the host, as profiled: from one call of a thread to the next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.intervals import covered
from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.graph.rank_graph import COLLECTIVE, HOST, OP, WHY_NUMBER, RankGraph
from stepsight.dataset.traces.device_graph import is_wait

Floats = NDArray[np.float64]


def launch_times(graph: RankGraph) -> Floats:
    """Seconds of the host, and calls recorded in that time, of each op and collective, ``(n, 2)``.

    A call of the framework may launch several kernels: the first holds the seconds of all, the others 0.  Calls that
    wait for the device, the first of a thread, and calls after loading data tell nothing: 0.
    """
    out = np.zeros((len(graph), 2))
    if graph.device == "cpu":
        return out
    own = _host_seconds(graph)
    edges = np.flatnonzero(graph.edges["why"] == WHY_NUMBER[Dependency.LAUNCH])
    source, target = graph.edges["source"][edges], graph.edges["target"][edges]
    recorded = max(graph.events - int(graph.on_device.sum()), 0) / max(len(np.unique(source)), 1)
    call, work, step = (graph.nodes[name][target] for name in ("call", "work", "step"))
    chosen = np.flatnonzero((work >= 0) & (step >= 0))
    if not len(chosen):
        return out
    key = np.where(call >= 0, call, -2 - target)
    rows = chosen[np.lexsort((source[chosen], work[chosen], key[chosen]))]  # by call and the work that it launches
    begins = np.append(True, (np.diff(key[rows]) != 0) | (np.diff(work[rows]) != 0))
    distinct = begins | np.append(True, np.diff(source[rows]) != 0)  # a host call with several launches counts once
    first = np.flatnonzero(begins)
    spent = np.add.reduceat(np.where(distinct, own[source[rows]], 0.0), first)
    nodes = target[np.minimum.reduceat(rows, first)]
    known = ~np.isnan(spent)
    out[nodes[known], 0] = spent[known]
    out[nodes[known], 1] = recorded * np.add.reduceat(distinct.astype(np.int64), first)[known]
    return out


def _host_seconds(graph: RankGraph) -> Floats:
    """``(n,)``: what each call of the host takes, with the host's work since the call before it on its thread; NaN for
    the first, for calls that wait for the device, and after loading data."""
    out = np.full(len(graph), np.nan)
    waits = np.array([is_wait(name) for name in graph.names], dtype=np.bool_)[graph.nodes["name"]]
    marks = np.array([name == "step" for name in graph.names], dtype=np.bool_)[graph.nodes["name"]]
    host = graph.nodes["kind"] == HOST
    for stream in np.unique(graph.nodes["stream"][host]).tolist():
        nodes = np.flatnonzero(host & (graph.nodes["stream"] == stream) & ~marks)
        out[nodes[1:]] = graph.end_s[nodes[1:]] - graph.end_s[nodes[:-1]]
    out[waits] = np.nan
    for begin, until in graph.loading_s.tolist():
        out[(graph.start_s >= begin) & (graph.start_s - out <= until)] = np.nan
    return out


def beside_collectives(graph: RankGraph) -> Floats:
    """``(n,)``: seconds of each op that overlapped with a collective of its rank."""
    out = np.zeros(len(graph))
    ops, others = (np.flatnonzero(graph.nodes["kind"] == kind) for kind in (OP, COLLECTIVE))
    start, end = graph.start_s, graph.end_s
    out[ops] = covered(start[others], end[others], start[ops], end[ops])
    return out
