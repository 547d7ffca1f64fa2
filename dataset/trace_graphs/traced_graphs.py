"""Graphs of traced steps and of segments: what was measured of their nodes, and which relations they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.columns import Flags, Floats, Ints, covered
from stepsight.dataset.graph.graph_rows import NUMBER, About, Measured, Pairs, graph_table, listed_pairs, overlap
from stepsight.dataset.graph.graph_table import GraphTable
from stepsight.dataset.graph.program import COLLECTIVE, HOST, OP, WHY_NUMBER, Dependency, Program
from stepsight.dataset.graph.rank_trace import Meeting, TracedSegment, meetings
from stepsight.dataset.graph.relations import CONCURRENT, concurrent_pairs
from stepsight.dataset.traces.device_graph import is_wait

_NEAREST = 8  # nodes of another stream that count as concurrent in a step
_MOST_PEERS = 8  # most ranks of a collective in a rank's graph


def step_graphs(graphs: Sequence[Program]) -> GraphTable:
    """Every step of every rank of a run in which a device, or a computing host, was active."""
    met = meetings(graphs)[0]
    return GraphTable.joined([_steps(graphs, place, met) for place in range(len(graphs))])


def _steps(graphs: Sequence[Program], place: int, met: Sequence[Meeting]) -> GraphTable:
    graph = graphs[place]
    step, names = graph.columns["step"], graph.columns["name"]
    active = np.unique(step[graph.on_device & (step >= 0)])
    number = np.full(len(graph.steps_s) + 1, -1)  # the last one: of no step
    number[active] = np.arange(len(active))
    owner, call = number[step], np.full(len(graph), -1)
    calls: list[list[str]] = [[] for _ in active]
    for each in range(len(active)) if graph.device == "cpu" else ():  # calls that a host runs itself
        ops = np.flatnonzero((owner == each) & (graph.columns["kind"] == OP))
        used, call[ops] = np.unique(names[ops], return_inverse=True)
        calls[each] = [graph.names[name] for name in used.tolist()]
    alone, times = _seconds_alone(graph), (graph.duration_s, graph.start_s, graph.end_s)
    beside = beside_collectives(graph.columns["kind"], *times[1:])
    measured = Measured(alone, *times, launch_times(graph), beside, np.arange(len(graph)), call)
    one, other = concurrent_pairs(graph, _NEAREST)
    edges = graph.edge_columns
    pairs = Pairs(
        np.concatenate([edges["source"], one]),
        np.concatenate([edges["target"], other]),
        np.concatenate([edges["why"], np.full(len(one), NUMBER[CONCURRENT])]),
        np.concatenate([graph.delay_s, np.zeros(len(one))]),
    )
    about: About = {
        name: [value] * len(active)
        for name, value in (
            ("scope", "step"), ("rank", graph.rank), ("segment", "step"), ("busy", 1), ("micro_batch", 0),
            ("stage", 0), ("wait_s", 0.0), ("events", graph.events / (len(graph.steps_s) + graph.observed)),
        )
    }  # fmt: skip
    about |= {"step": active.tolist(), "calls": calls, "span_s": np.diff(graph.steps_s[active]).reshape(-1).tolist()}
    found = [
        (members[place], float(graphs[each].duration_s[node]) or np.nan)
        for members in met
        if place in members and owner[members[place]] >= 0
        for each, node in [peer for peer in members.items() if peer[0] != place][:_MOST_PEERS]
    ]
    peer, peer_s = np.array(sorted(found, key=lambda each: each[0]), dtype=np.float64).reshape(-1, 2).T
    return graph_table(graph, owner, measured, pairs, about, (peer.astype(np.int64), peer_s))


_TIMES = {"slot_s": np.nan, "launch_s": 0.0, "launch_events": 0.0, "start_s": np.nan, "end_s": np.nan}


def segment_graphs(segments: Sequence[TracedSegment]) -> GraphTable:
    """One graph for each of at least one segment of a run.

    An op's seconds alone are the median of its signature on its rank where nothing ran beside it, without the time of
    the host before it.  Collectives have none.
    """
    programs = [segment.program for segment in segments]
    lengths, program = [len(each) for each in programs], Program.of_parts(programs)
    drawn = {key: listed_pairs(each) for key, each in {id(each): each for each in programs}.items()}
    every = [drawn[id(each)] for each in programs]
    before = np.repeat(np.cumsum([0, *lengths])[:-1], [len(each.source) for each in every])
    source, target, relation, delay_s = (np.concatenate(column) for column in zip(*every, strict=True))
    pairs = Pairs(source + before, target + before, relation, delay_s)
    slot, launch_s, launch_events, start, end = (
        np.concatenate([of if len(of := getattr(s, name)) else np.full(len(s.program), none) for s in segments])
        for name, none in _TIMES.items()
    )
    owner, first = np.repeat(np.arange(len(segments)), lengths), np.cumsum([0, *lengths])
    kind = program.columns["kind"]
    own = np.where(np.isnan(start), slot, np.minimum(slot, end - start))
    beside = (pairs.relation == NUMBER[CONCURRENT]) & (overlap(start, end, pairs.source, pairs.target) > 0)
    free = (own > 0) & (kind == OP)
    free[pairs.source[beside]] = False
    rank = np.array([segment.rank for segment in segments])[owner]
    keys = np.stack([rank, program.columns["work"], program.columns["share"]])
    parts = [slice(*each) for each in zip(first.tolist(), first[1:].tolist(), strict=False)]
    measured = Measured(
        alone=np.where(kind == OP, _medians(keys, own, free), np.nan),
        seconds=slot,
        start_s=start,
        end_s=end,
        launch=np.stack([launch_s, launch_events], axis=1),
        beside=np.concatenate([beside_collectives(kind[each], start[each], end[each]) for each in parts]),
        node=np.arange(len(program)) - first[owner],
        call=np.full(len(program), -1),
    )
    about: About = {
        name: [getattr(segment, name) for segment in segments]
        for name in ("rank", "step", "busy", "micro_batch", "stage", "wait_s", "span_s")
    }
    about |= {"scope": ["segment"] * len(segments), "segment": [segment.label for segment in segments]}
    about |= {"calls": [[] for _ in segments], "events": [0.0] * len(segments)}
    return graph_table(program, owner, measured, pairs, about)


def _medians(keys: NDArray[Any], values: Floats, chosen: Flags) -> Floats:
    """``(n,)``: median of the chosen values with the same key, NaN where there is none; ``keys``: ``(c, n)``."""
    _, key = np.unique(keys, axis=1, return_inverse=True)
    order = np.flatnonzero(chosen)
    order = order[np.lexsort((values[order], key.reshape(-1)[order]))]
    distinct, first, counts = np.unique(key.reshape(-1)[order], return_index=True, return_counts=True)
    found = np.full(int(key.max(initial=-1)) + 1, np.nan)
    found[distinct] = (values[order[first + (counts - 1) // 2]] + values[order[first + counts // 2]]) / 2
    return np.asarray(found[key.reshape(-1)])


def _seconds_alone(graph: Program) -> Floats:
    """Median duration of each node's signature and kernel without concurrent work, NaN if it never ran alone.

    Collectives and host calls have none: a collective's duration holds waiting for others.
    """
    is_op = graph.columns["kind"] == OP
    ops, busy = np.flatnonzero(is_op), np.flatnonzero(graph.on_device)
    start, end = graph.start_s, graph.end_s
    begins, finishes = np.sort(start[busy]), np.sort(end[busy])
    beside = np.searchsorted(begins, end[ops], "left") - np.searchsorted(finishes, start[ops], "right") - 1
    alone = np.zeros(len(graph), dtype=np.bool_)  # outside of steps, an observer may have slowed them
    alone[ops] = (beside <= 0) & ((graph.columns["step"][ops] >= 0) | (graph.observed == 0))
    medians = _medians(np.stack([graph.columns["work"], graph.columns["name"]]), graph.duration_s, alone)
    return np.where(is_op, medians, np.nan)


def launch_times(graph: Program) -> Floats:
    """Seconds of the host, and calls recorded in that time, of each op and collective, ``(n, 2)``.

    A call of the framework may launch several kernels: the first holds the seconds of all, the others 0.  Calls that
    wait for the device, the first of a thread, and calls after loading data tell nothing: 0.
    """
    out = np.zeros((len(graph), 2))
    if graph.device == "cpu":
        return out
    own = _host_seconds(graph)
    edges = np.flatnonzero(graph.edge_columns["why"] == WHY_NUMBER[Dependency.LAUNCH])
    source, target = graph.edge_columns["source"][edges], graph.edge_columns["target"][edges]
    recorded = max(graph.events - int(graph.on_device.sum()), 0) / max(len(np.unique(source)), 1)
    call, work, step = (graph.columns[name][target] for name in ("call", "work", "step"))
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


def _host_seconds(graph: Program) -> Floats:
    """``(n,)``: what each call of the host takes, with the host's work since the call before it on its thread; NaN for
    the first, for calls that wait for the device, and after loading data."""
    out = np.full(len(graph), np.nan)
    waits = np.array([is_wait(name) for name in graph.names], dtype=np.bool_)[graph.columns["name"]]
    marks = np.array([name == "step" for name in graph.names], dtype=np.bool_)[graph.columns["name"]]
    host = graph.columns["kind"] == HOST
    for stream in np.unique(graph.columns["stream"][host]).tolist():
        nodes = np.flatnonzero(host & (graph.columns["stream"] == stream) & ~marks)
        out[nodes[1:]] = graph.end_s[nodes[1:]] - graph.end_s[nodes[:-1]]
    out[waits] = np.nan
    for begin, until in graph.loading_s.tolist():
        out[(graph.start_s >= begin) & (graph.start_s - out <= until)] = np.nan
    return out


def beside_collectives(kind: Ints, start: Floats, end: Floats) -> Floats:
    """``(n,)``: seconds of each op that overlapped with a collective of its rank; 0 if unknown."""
    out = np.zeros(len(kind))
    ops, others = np.flatnonzero(kind == OP), np.flatnonzero(kind == COLLECTIVE)
    out[ops] = covered(start[others], end[others], start[ops], end[ops])
    return np.nan_to_num(out)
