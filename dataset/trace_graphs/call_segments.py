"""Segments of imported traces: the ops and collectives of each phase of each step, one node per call.

A call may launch several kernels; predictions know calls.  Calls of the host are no nodes of a segment: what they
order becomes an edge between the ops around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stepsight.dataset.graph.columns import Floats, Ints
from stepsight.dataset.graph.program import COLLECTIVE, OP, PHASES, WHY_NUMBER, Dependency, Program
from stepsight.dataset.graph.rank_trace import TracedSegment, meetings
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective

_LABELS = (*PHASES, "other")  # the last one: of nodes outside all phases
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
    met, shared = meetings(graphs)[0], dict[object, Program]()
    found: list[TracedSegment] = []
    for place, graph in enumerate(graphs):
        collective_s = np.full(len(graph), np.nan)
        for members in met:
            work = graph.works[graph.columns["work"][members[place]]] if place in members else None
            if isinstance(work, Collective) and len(members) == work.group_size:
                collective_s[members[place]] = min(graphs[each].duration_s[at] for each, at in members.items())
        found += _rank_segments(graph, collective_s, run, shared)
    return found


def _rank_segments(
    graph: Program, collective_s: Floats, run: str, shared: dict[object, Program]
) -> Iterator[TracedSegment]:
    """Segments of a rank: nodes of one call are merged into ``m`` calls, in the order of their first nodes."""
    nodes, own = graph.columns, np.flatnonzero(graph.on_device & (graph.columns["step"] >= 0))
    keys = np.stack([nodes["call"][own], nodes["stream"][own], nodes["work"][own], nodes["step"][own]])
    alone = (nodes["kind"][own] != OP) | (nodes["call"][own] < 0)
    keys[0, alone] = -1 - own[alone]
    _, seen, label = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    first, of_node = own[np.sort(seen)], np.full(len(graph), -1, dtype=np.int64)
    of_node[own] = np.argsort(np.argsort(seen))[label.reshape(-1)]
    gaps, into = np.zeros(len(graph)), (graph.edge_columns["why"] == _HOST_ORDER) & (graph.device == "cpu")
    np.maximum.at(gaps, graph.edge_columns["target"][into], graph.delay_s[into])  # of the host before what it runs
    spent = graph.duration_s + np.where(nodes["kind"] == OP, gaps, 0.0)
    seconds = np.bincount(of_node[own], spent[own], len(first)).astype(np.float64)
    collectives = nodes["kind"][first] == COLLECTIVE
    seconds[collectives] = collective_s[first[collectives]]
    start, end, place = np.full(len(first), np.inf), np.full(len(first), -np.inf), np.full(len(first), -1)
    np.minimum.at(start, of_node[own], graph.start_s[own])
    np.maximum.at(end, of_node[own], graph.end_s[own])
    key = nodes["step"][first] * len(_LABELS) + nodes["phase"][first] % len(_LABELS)  # in the order of the labels
    edges = _edges(graph, of_node)
    edges = edges[:, key[edges[0]] == key[edges[1]]]
    order, by_key = np.argsort(key, kind="stable"), np.argsort(key[edges[0]], kind="stable")
    every = np.arange(len(graph.steps_s) * len(_LABELS) + 1)
    bounds, edge_bounds = np.searchsorted(key[order], every), np.searchsorted(key[edges[0]][by_key], every)
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        calls, ends = order[slice(*bounds[number : number + 2])], edges[:, by_key[slice(*edge_bounds[number:][:2])]]
        place[calls] = np.arange(len(calls))
        columns = (nodes["work"][first[calls]], nodes["stream"][first[calls]])
        listed, (step, phase) = (place[ends[0]], place[ends[1]], ends[2]), divmod(number, len(_LABELS))
        program = Program.of_rows(graph.works, graph.streams, columns, listed, _LABELS[phase])
        yield TracedSegment(
            program=shared.setdefault(program.digest_key, program),
            slot_s=seconds[calls],
            label=_LABELS[phase],
            rank=graph.rank,
            busy=1,
            run=run,
            step=step,
            start_s=start[calls],
            end_s=end[calls],
            span_s=float(end[calls].max() - start[calls].min()),
        )


def _edges(graph: Program, of_node: Ints) -> Ints:
    """Distinct edges between calls, ``(3, e)``: source, target and kind, by target; ``of_node``: the call of each."""
    source, target, why = (graph.edge_columns[name] for name in ("source", "target", "why"))
    a, b = of_node[source], of_node[target]
    keep = (a >= 0) & (b >= 0) & ~np.isin(why, [*_IMPLIED, _HOST_ORDER])
    found = [np.stack([a[keep], b[keep], why[keep]])]
    if graph.device == "cpu":
        ops, every = np.flatnonzero((of_node >= 0) & (graph.columns["kind"] == OP)), np.arange(len(graph))
        calls = np.append(of_node[ops], -1)  # of the last op before each node, and of the first one after it
        before, after = calls[np.searchsorted(ops, every) - 1], calls[np.searchsorted(ops, every, "right")]
        launched = (a < 0) & (b >= 0) & (why == _LAUNCH)  # host work before it issued a collective
        waited = (a >= 0) & (b < 0) & (why == _SYNC)  # and after it waited for one
        for ends in ((before[source[launched]], b[launched]), (a[waited], after[target[waited]])):
            found.append(np.stack([*ends, np.full(len(ends[0]), _SYNC)]))
    edges = np.concatenate(found, axis=1)
    edges = edges[:, (edges[0] >= 0) & (edges[0] < edges[1])]
    return np.unique(edges[[1, 0, 2]], axis=1)[[1, 0, 2]]
