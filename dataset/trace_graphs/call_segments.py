"""Segments of imported traces: the ops and collectives of each phase of each step, one node per call.

A call may launch several kernels; predictions know calls.  Calls of the host are no nodes of a segment: what they
order becomes an edge between the ops around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stepsight.dataset.graph.columns import Floats, Ints
from stepsight.dataset.graph.program import COLLECTIVE, OP, PHASES, WHY_NUMBER, Dependency, Program
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.graph.rendezvous import Meeting, meetings
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective

OTHER = "other"  # label of nodes outside all phases
_IMPLIED = [WHY_NUMBER[why] for why in (Dependency.STREAM_ORDER, Dependency.LAUNCH, Dependency.RENDEZVOUS)]
_HOST_ORDER, _LAUNCH = WHY_NUMBER[Dependency.HOST_ORDER], WHY_NUMBER[Dependency.LAUNCH]
_SYNC = WHY_NUMBER[Dependency.SYNCHRONISATION]


class UnmeasuredRun(NamedTuple):
    """What a job or a captured script runs, without times."""

    name: str
    job: Job | None
    graphs: Sequence[Program]  # steps of ranks
    segments: Sequence[TracedSegment]


def call_segments(graphs: Sequence[Program], run: str) -> list[TracedSegment]:
    """Every phase of every step of every rank, by rank and time; equal programs are one object.

    The seconds of a collective are those of the rank that came last, which waited for nobody; they are NaN where not
    all of its ranks were traced.
    """
    met = meetings(graphs)[0]
    shared: dict[object, Program] = {}
    return [
        segment
        for place, graph in enumerate(graphs)
        for segment in _Calls(graph, _collective_seconds(graphs, place, met)).segments(run, shared)
    ]


def _collective_seconds(graphs: Sequence[Program], place: int, met: Sequence[Meeting]) -> Floats:
    """``(n,)``: seconds of each collective without waiting for other ranks, NaN if they are unknown."""
    graph = graphs[place]
    found = np.full(len(graph), np.nan)
    for members in met:
        node = members.get(place)
        if node is not None:
            work = graph.works[graph.columns["work"][node]]
            if isinstance(work, Collective) and len(members) == work.group_size:
                found[node] = min(float(graphs[each].duration_s[at]) for each, at in members.items())
    return found


class _Calls:
    """Merge the nodes of a rank's graph that belong to one call.

    Shapes: ``n`` nodes, ``m`` calls in the order of their first nodes.
    """

    def __init__(self, graph: Program, collective_s: Floats) -> None:
        nodes = graph.columns
        self._graph = graph
        own = np.flatnonzero(graph.on_device & (nodes["step"] >= 0))
        joined = (nodes["kind"][own] == OP) & (nodes["call"][own] >= 0)
        keys = np.stack([nodes["call"][own], nodes["stream"][own], nodes["work"][own], nodes["step"][own]])
        keys[0, ~joined] = -1 - own[~joined]
        _, first, label = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        self._first = own[first[order]]  # (m,): first node of each call
        self._call = np.full(len(graph), -1, dtype=np.int64)  # (n,): call of each node
        self._call[own] = rank[label.reshape(-1)]
        count = len(self._first)
        spent = graph.duration_s[own] + self._host_gaps()[own]
        self._seconds: Floats = np.bincount(self._call[own], spent, minlength=count).astype(np.float64)
        collectives = nodes["kind"][self._first] == COLLECTIVE
        self._seconds[collectives] = collective_s[self._first[collectives]]
        self._start, self._end = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(self._start, self._call[own], graph.start_s[own])
        np.maximum.at(self._end, self._call[own], graph.end_s[own])
        self._edges = self._all_edges()
        self._place = np.full(count, -1, dtype=np.int64)  # of each call in the segment at hand

    def _host_gaps(self) -> Floats:
        """``(n,)``: seconds of the host before each op of a host that computes; zeros for a device."""
        graph = self._graph
        gaps = np.zeros(len(graph))
        if graph.device == "cpu":
            into = graph.edge_columns["why"] == _HOST_ORDER
            np.maximum.at(gaps, graph.edge_columns["target"][into], graph.delay_s[into])
            gaps[graph.columns["kind"] != OP] = 0.0
        return gaps

    def _all_edges(self) -> Ints:
        """Distinct edges between calls, ``(3, e)``: source, target and kind, by target."""
        source, target, why = (self._graph.edge_columns[name] for name in ("source", "target", "why"))
        before, after = self._neighbours()
        a, b = self._call[source], self._call[target]
        keep = (a >= 0) & (b >= 0) & ~np.isin(why, [*_IMPLIED, _HOST_ORDER])
        found = [np.stack([a[keep], b[keep], why[keep]])]
        if self._graph.device == "cpu":
            launched = (a < 0) & (b >= 0) & (why == _LAUNCH)  # host work before it issued a collective
            waited = (a >= 0) & (b < 0) & (why == _SYNC)  # and after it waited for one
            found.append(np.stack([before[source[launched]], b[launched], np.full(int(launched.sum()), _SYNC)]))
            found.append(np.stack([a[waited], after[target[waited]], np.full(int(waited.sum()), _SYNC)]))
        edges = np.concatenate(found, axis=1)
        edges = edges[:, (edges[0] >= 0) & (edges[0] < edges[1])]
        return np.unique(edges[[1, 0, 2]], axis=1)[[1, 0, 2]]

    def _neighbours(self) -> tuple[Ints, Ints]:
        """``(n,)`` each: the call of the last op before each node, and of the first op after it; -1: none."""
        ops = np.flatnonzero((self._call >= 0) & (self._graph.columns["kind"] == OP))
        calls = np.concatenate([self._call[ops], [-1]])
        every = np.arange(len(self._graph))
        low = np.searchsorted(ops, every, "left") - 1
        high = np.searchsorted(ops, every, "right")
        return calls[low], calls[np.minimum(high, len(ops))]

    def segments(self, run: str, shared: dict[object, Program]) -> list[TracedSegment]:
        graph = self._graph
        step, phase = graph.columns["step"][self._first], graph.columns["phase"][self._first]
        key = step * (len(PHASES) + 1) + np.where(phase < 0, len(PHASES), phase)  # in the order of the labels
        order, keys = np.argsort(key, kind="stable"), np.arange(len(graph.steps_s) * (len(PHASES) + 1) + 1)
        bounds = np.searchsorted(key[order], keys)
        owner = np.where(key[self._edges[0]] == key[self._edges[1]], key[self._edges[0]], -1)
        by_key = np.argsort(owner, kind="stable")
        edge_bounds = np.searchsorted(owner[by_key], keys)
        found = []
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            calls = order[bounds[number] : bounds[number + 1]]
            edges = self._edges[:, by_key[edge_bounds[number] : edge_bounds[number + 1]]]
            step_number, index = divmod(number, len(PHASES) + 1)
            label = (*PHASES, OTHER)[index]
            found.append(self._segment(calls, edges, (label, step_number, run), shared))
        return found

    def _segment(
        self, calls: Ints, ends: Ints, about: tuple[str, int, str], shared: dict[object, Program]
    ) -> TracedSegment:
        graph, place, (label, step, run) = self._graph, self._place, about
        place[calls] = np.arange(len(calls))
        columns = (graph.columns["work"][self._first[calls]], graph.columns["stream"][self._first[calls]])
        edges = (place[ends[0]], place[ends[1]], ends[2])
        program = Program.of_rows(graph.works, graph.streams, columns, edges, label)
        return TracedSegment(
            program=shared.setdefault(program.digest_key, program),
            slot_s=self._seconds[calls],
            label=label,
            rank=graph.rank,
            busy=1,
            run=run,
            step=step,
            start_s=self._start[calls],
            end_s=self._end[calls],
            span_s=float(self._end[calls].max() - self._start[calls].min()),
        )
