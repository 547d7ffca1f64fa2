"""Breakdown of traced steps: kinds, overlap, idle time by cause, the critical path, skew of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.columns import Intervals, merge, overlap
from stepsight.dataset.graph.program import COLLECTIVE, HOST, OP, WHY_NUMBER, Dependency, Program
from stepsight.dataset.kinds.op import OP_KINDS
from stepsight.dataset.traces.read_rank import lateness
from stepsight.simulator.replay.replay import JoinedGraph, ReplayTimes, find_times, join

Floats = NDArray[np.float64]

HOST_BOUND, PEERS, LOADER, SYNCHRONISATION = "host_bound", "waiting_for_peers", "data_loader", "synchronisation"
COMMUNICATION, GAPS, UNEXPLAINED = "waiting_for_communication", "between_kernels", "unexplained"
_MOST_OPAQUE = 10  # opaque kernels that are listed by name


@dataclass
class Breakdown:
    """Breakdown of one run's steps; seconds of all ranks and steps unless stated otherwise."""

    kinds: dict[str, float] = field(default_factory=dict)  # device seconds by kind of op and collective
    opaque: dict[str, float] = field(default_factory=dict)  # device seconds of opaque kernels, by name
    # compute_s, communication_s: when ops, and when collectives ran, each moment once
    compute_s: float = 0.0
    communication_s: float = 0.0
    overlapped_s: float = 0.0  # when both ran
    # seconds in which the stream with most of each rank's ops idles, by cause.  Of what it waits for communication,
    # waiting_for_peers is what the communication itself waits for other ranks.
    idle: dict[str, float] = field(default_factory=dict)
    steps_s: float = 0.0  # of all ranks together
    critical: dict[str, float] = field(default_factory=dict)  # seconds of the critical path by family of ops
    # for each rank: its step's seconds, and how much later than the first it comes to collectives on average
    ranks: list[dict[str, float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        exposed = self.communication_s - self.overlapped_s
        share = 100.0 * self.overlapped_s / self.communication_s if self.communication_s else 0.0
        return {**vars(self), "exposed_communication_s": exposed, "overlap_percent": share}


def breakdown(graphs: Sequence[Program]) -> Breakdown:
    """Break down the traced steps of a run."""
    walked, out = find_times(join(graphs)), Breakdown()
    idle, kinds, opaque = (defaultdict[str, float](float) for _ in range(3))
    for graph, first in zip(graphs, walked.joined.first, strict=False):
        inside = (graph.columns["step"] >= 0) & graph.on_device
        for node in np.flatnonzero(inside).tolist():
            kinds[graph.kind_of(node)] += float(graph.duration_s[node])
            if not graph.columns["known"][node]:
                opaque[graph.names[graph.columns["name"][node]]] += float(graph.duration_s[node])
        compute, sent = (_busy(graph, inside & (graph.columns["kind"] == kind)) for kind in (OP, COLLECTIVE))
        out.compute_s += float(np.diff(compute).sum())
        out.communication_s += float(np.diff(sent).sum())
        out.overlapped_s += float(overlap(compute, sent[:, 0], sent[:, 1]).sum())
        for _, _, causes in idle_gaps(graph, walked, first):
            for cause, seconds in causes.items():
                idle[cause] += seconds
        out.steps_s += float(graph.steps_s[-1, 1] - graph.steps_s[0, 0]) if len(graph.steps_s) else 0.0
    out.ranks, waited = _skew(walked.joined)
    idle[PEERS] = min(waited, idle[COMMUNICATION])
    idle[COMMUNICATION] -= idle[PEERS]
    spent = {cause: seconds for cause, seconds in idle.items() if seconds or cause in (PEERS, COMMUNICATION)}
    out.kinds, out.idle, out.critical = _largest_first(kinds), _largest_first(spent), critical_path(walked)
    out.opaque = dict(list(_largest_first(opaque).items())[:_MOST_OPAQUE])
    return out


def _largest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _busy(graph: Program, nodes: NDArray[Any]) -> Intervals:
    return merge(np.stack([graph.start_s[nodes], graph.end_s[nodes]], axis=1))


def idle_gaps(graph: Program, walked: ReplayTimes, first: int) -> Iterator[tuple[int, float, dict[str, float]]]:
    """The node after each idle time of the stream with most of a rank's ops, how long it idled, and seconds by cause.

    ``first``: where the rank's nodes begin in the joined graph.
    """
    inside = np.flatnonzero((graph.columns["step"] >= 0) & (graph.columns["kind"] == OP))
    if not len(inside):
        return
    streams = np.bincount(graph.columns["stream"][inside], graph.duration_s[inside])
    nodes = inside[graph.columns["stream"][inside] == int(streams.argmax())]
    gaps = np.maximum(graph.start_s[nodes[1:]] - np.maximum.accumulate(graph.end_s[nodes])[:-1], 0.0)
    into = graph.edge_columns["target"][graph.edge_columns["why"] == WHY_NUMBER[Dependency.SYNCHRONISATION]]
    waits = _busy(graph, np.unique(into[graph.columns["kind"][into] == HOST]))  # the host waited for the device
    loading, late = merge(graph.loading_s), lateness(graph)[nodes[1:]]
    for node, gap, unexplained in zip(nodes[1:].tolist(), gaps.tolist(), late.tolist(), strict=True):
        found, rest = {UNEXPLAINED: min(gap, unexplained)}, max(gap - unexplained, 0.0)
        since, until = np.array([graph.start_s[node] - gap]), np.array([graph.start_s[node]])
        cause = _cause(graph, walked, first + node, first) if rest else UNEXPLAINED
        if cause == HOST_BOUND:
            for why, intervals in ((LOADER, loading), (SYNCHRONISATION, waits)):
                found[why] = min(float(overlap(intervals, since, until)[0]), rest)
                rest -= found[why]
        yield node, gap, {**found, cause: found.get(cause, 0.0) + rest}


def _cause(graph: Program, walked: ReplayTimes, node: int, first: int) -> str:
    """The dependency that decided the start of a node."""
    source = walked.before(node)
    if source < 0:
        return UNEXPLAINED
    if source >= walked.joined.first[-1]:  # a meeting: a collective of this stream waits for its peers
        return PEERS
    kind, stream = graph.columns["kind"][source - first], graph.columns["stream"]
    if kind != HOST and stream[source - first] == stream[node - first]:
        return GAPS
    return {HOST: HOST_BOUND, COLLECTIVE: COMMUNICATION}.get(int(kind), SYNCHRONISATION)


def longest_path(walked: ReplayTimes) -> list[int]:
    """Nodes and meetings of the critical path through the traced steps, from its end."""
    inside = np.concatenate([graph.columns["step"] >= 0 for graph in walked.joined.graphs])
    chosen = np.flatnonzero(inside)
    if not len(chosen):
        return []
    path = walked.path(int(chosen[np.argmax(walked.end_s[chosen])]))
    return list(takewhile(lambda node: node >= len(inside) or inside[node], path))


def critical_path(walked: ReplayTimes) -> dict[str, float]:
    """Seconds of the longest path of a replay by family of ops, of ``host``, and of ``device_delays`` between them."""
    joined, families = walked.joined, defaultdict[str, float](float)
    for node in longest_path(walked):
        (graph, own), before = joined.located(node), walked.before(node)
        if graph is not None:
            kind = graph.kind_of(own)
            families[OP_KINDS[kind].family if kind in OP_KINDS else kind] += float(joined.seconds[node])
        if before >= 0:
            graph, own = joined.located(before)
            hosted = graph is not None and (graph.device == "cpu" or graph.columns["kind"][own] == HOST)
            waited = float(walked.start_s[node] - walked.end_s[before])
            families["host" if hosted else "device_delays"] += max(waited, 0.0)
    return _largest_first(families)


def _skew(joined: JoinedGraph) -> tuple[list[dict[str, float]], float]:
    """Each rank's step time and lateness at collectives, and the seconds that all ranks waited for each other."""
    late, waited = [list[float]() for _ in joined.graphs], 0.0
    for members in joined.meetings:
        own = [(place, joined.graphs[place], node) for place, node in members.items()]
        starts = [float(graph.start_s[node]) + joined.offset_s[place] for place, graph, node in own]
        for (place, graph, node), start in zip(own, starts, strict=True):
            late[place].append(start - min(starts))
            if graph.columns["step"][node] >= 0:
                waited += min(max(starts) - start, float(graph.duration_s[node]))
    ranks = []
    for graph, lags in zip(joined.graphs, late, strict=True):
        step_s = float(np.diff(graph.steps_s).mean()) if len(graph.steps_s) else 0.0
        ranks.append({"rank": float(graph.rank), "step_s": step_s, "late_s": float(np.mean(lags)) if lags else 0.0})
    return ranks, waited
