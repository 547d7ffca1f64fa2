"""What the host takes to launch what ran, as profiled: from one call of a thread to the next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.imported.busy_time import covered
from stepsight.dataset.imported.device_graph import is_wait
from stepsight.dataset.imported.rank_graph import COLLECTIVE, HOST, OP, WHY_NUMBER, RankGraph
from stepsight.dataset.program import Dependency

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
    calls: dict[tuple[int, int], tuple[int, set[int]]] = {}
    columns = (graph.nodes[name][target].tolist() for name in ("call", "work", "step"))
    for host, node, call, work, step in zip(source.tolist(), target.tolist(), *columns, strict=True):
        if work >= 0 and step >= 0:
            calls.setdefault((call if call >= 0 else -2 - node, work), (node, set()))[1].add(host)
    for node, hosts in calls.values():
        spent = float(own[list(hosts)].sum())
        if not np.isnan(spent):
            out[node] = spent, recorded * len(hosts)
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
    """``(n,)``: seconds of each op in which a collective of its rank ran."""
    out = np.zeros(len(graph))
    ops, others = (np.flatnonzero(graph.nodes["kind"] == kind) for kind in (OP, COLLECTIVE))
    start, end = graph.start_s, graph.end_s
    out[ops] = covered(start[others], end[others], start[ops], end[ops])
    return out
