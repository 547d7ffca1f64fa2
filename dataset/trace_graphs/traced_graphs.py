"""Rows of the dataset's graphs: features, targets and relations of traced steps and of segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import digest
from stepsight.dataset.graph.graph_schema import (
    EDGE_NUMBERS,
    NUMBERS,
    RENDEZVOUS,
    WORK_TYPES,
    edge_types,
    kind_names,
    node_numbers,
    signatures,
    work_numbers,
)
from stepsight.dataset.graph.graph_table import GraphTable, Key, Rows
from stepsight.dataset.graph.intervals import covered
from stepsight.dataset.graph.program import COLLECTIVE, HOST, NODE_KINDS, OP, WHY_NUMBER, Dependency, Program
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.graph.relations import CONCURRENT, RELATIONS, concurrent_pairs, positions, relation_pairs
from stepsight.dataset.graph.rendezvous import Meeting, meetings
from stepsight.dataset.traces.device_graph import is_wait

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
About = dict[str, list[Any]]

_NEAREST = 8  # nodes of another stream that count as concurrent in a step
_MOST_PEERS = 8  # most ranks of a collective in a rank's graph
_LEAST_TOLD = 8  # least number of nodes that identifies a graph
_TYPES = (*NODE_KINDS, "stream")
_RELATIONS = (*RELATIONS, "runs_on", "runs")
_NUMBER = {relation: number for number, relation in enumerate(_RELATIONS)}


class _Measured(NamedTuple):
    """What is known of the nodes of a program, ``(n,)`` each unless said otherwise."""

    alone: Floats  # seconds where nothing ran beside it
    seconds: Floats  # in context
    start_s: Floats  # NaN: unknown
    end_s: Floats
    launch: Floats  # (n, 2): host seconds from the launch before, and calls recorded in that time
    beside: Floats  # seconds that overlapped with collectives
    node: Ints  # place in the rank's graph, or in the segment
    call: Ints  # index of the graph's calls


class _Pairs(NamedTuple):
    """Edges, ``(e,)`` each."""

    source: Ints
    target: Ints
    relation: Ints  # index of ``_RELATIONS``
    delay_s: Floats


class _Peers(NamedTuple):
    """Collectives of other ranks, ``(p,)`` each: additional nodes without a stream."""

    node: Ints  # the rank's own collective of the same rendezvous
    seconds: Floats


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
    measured = _Measured(
        alone=_seconds_alone(graph),
        seconds=graph.duration_s,
        start_s=graph.start_s,
        end_s=graph.end_s,
        launch=launch_times(graph),
        beside=beside_collectives(graph.columns["kind"], graph.start_s, graph.end_s),
        node=np.arange(len(graph)),
        call=call,
    )
    one, other = concurrent_pairs(graph, _NEAREST)
    edges = graph.edge_columns
    pairs = _Pairs(
        np.concatenate([edges["source"], one]),
        np.concatenate([edges["target"], other]),
        np.concatenate([edges["why"], np.full(len(one), _NUMBER[CONCURRENT])]),
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
    return _Rows(graph, owner, measured, _peers(graphs, place, met, owner)).table(pairs, about)


def _peers(graphs: Sequence[Program], place: int, met: Sequence[Meeting], owner: Ints) -> _Peers:
    found = [
        (members[place], max(float(graphs[each].duration_s[node]), 1e-9))
        for members in met
        if place in members and owner[members[place]] >= 0
        for each, node in [peer for peer in members.items() if peer[0] != place][:_MOST_PEERS]
    ]
    found.sort(key=lambda peer: peer[0])
    return _Peers(np.array([node for node, _ in found], dtype=np.int64), np.array([seconds for _, seconds in found]))


_TIMES = {"slot_s": np.nan, "launch_s": 0.0, "launch_events": 0.0, "start_s": np.nan, "end_s": np.nan}


def segment_graphs(segments: Sequence[TracedSegment], alone: Floats | None = None) -> GraphTable:
    """One graph for each of at least one segment of a run.

    An op's seconds alone are the median of its signature on its rank where nothing ran beside it, without the time of
    the host before it.  Collectives have none.  ``alone`` are those of all nodes, where they are known.
    """
    program, pairs, lengths = _joined([segment.program for segment in segments])
    slot, launch_s, launch_events, start, end = (
        np.concatenate([_whole(getattr(each, name), len(each.program), none) for each in segments])
        for name, none in _TIMES.items()
    )
    owner, first = np.repeat(np.arange(len(segments)), lengths), np.cumsum([0, *lengths])
    kind = program.columns["kind"]
    if alone is None:
        own = np.where(np.isnan(start), slot, np.minimum(slot, end - start))
        beside = (pairs.relation == _NUMBER[CONCURRENT]) & (_overlap(start, end, pairs.source, pairs.target) > 0)
        free = (own > 0) & (kind == OP)
        free[pairs.source[beside]] = False
        rank = np.array([segment.rank for segment in segments])[owner]
        keys = np.stack([rank, program.columns["work"], program.columns["share"]])
        alone = np.where(kind == OP, _medians(keys, own, free), np.nan)
    parts = [slice(*each) for each in zip(first.tolist(), first[1:].tolist(), strict=False)]
    measured = _Measured(
        alone=alone,
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
    return _Rows(program, owner, measured).table(pairs, about)


def program_graph(program: Program, alone: Floats, busy: int, hardware: str) -> GraphTable:
    """A segment without a trace: targets have the seconds of each node alone, ``(n,)``."""
    none = np.full(len(program), np.nan)
    table = segment_graphs([TracedSegment(program, none, program.label, 0, busy, "")], alone)
    table.about["hardware"] = [hardware]
    return table


def _whole(values: Floats, count: int, none: float) -> Floats:
    return values if len(values) else np.full(count, none)


def _joined(programs: Sequence[Program]) -> tuple[Program, _Pairs, list[int]]:
    """The nodes of programs as those of one, the pairs of all relations, and how many nodes each has."""
    works: dict[Any, int] = {}
    streams: dict[Any, int] = {}
    drawn: dict[int, tuple[Rows, Ints]] = {}
    for program in programs:
        if id(program) not in drawn:
            columns = {
                "share": np.ones(len(program)),
                **program.columns,
                "name": np.zeros(len(program), dtype=np.int64),
            }
            for name, things, numbers in (("work", program.works, works), ("stream", program.streams, streams)):
                number = [numbers.setdefault(thing, len(numbers)) for thing in things]
                columns[name] = np.array([*number, -1])[columns[name]]
            relations = relation_pairs(program).items()
            found = [np.stack([*pairs, np.full(pairs.shape[1], _NUMBER[name])]) for name, pairs in relations]
            drawn[id(program)] = columns, np.concatenate(found, axis=1)
    every = [drawn[id(program)] for program in programs]
    lengths = [len(program) for program in programs]
    columns = {name: np.concatenate([each[name] for each, _ in every]) for name in every[0][0]}
    first = np.repeat(np.cumsum([0, *lengths])[:-1], [pairs.shape[1] for _, pairs in every])
    source, target, relation = np.concatenate([pairs for _, pairs in every], axis=1)
    joined = Program.of_columns(columns=columns, works=tuple(works), streams=tuple(streams), names=("",))
    return joined, _Pairs(source + first, target + first, relation, np.zeros(len(source))), lengths


class _Rows:
    """Rows of graphs of one program, ``(r,)`` each: of its nodes, then of peers, then of streams.

    Args:
        program: All nodes, ``n``.
        owner: ``(n,)``: the graph of each node, -1: none.
        measured: What is known of the nodes.
        peers: Of steps; None for segments.
    """

    def __init__(self, program: Program, owner: Ints, measured: _Measured, peers: _Peers | None = None) -> None:
        self._program, self._owner, self._measured = program, owner, measured
        nodes, own = program.columns, np.flatnonzero(owner >= 0)
        held = np.stack([owner, nodes["stream"]])[:, own]
        streams, first, runs_on = np.unique(held, axis=1, return_index=True, return_inverse=True)
        order = np.lexsort((first, streams[0]))
        streams, runs_on = streams[:, order], np.argsort(order)[runs_on.reshape(-1)]
        self._in_step = peers is not None
        self._peers = peers or _Peers(np.zeros(0, dtype=np.int64), np.zeros(0))
        self._streams, self._num_own = streams, len(own)
        self._nodes = np.concatenate([own, self._peers.node])  # that rows show
        self._runs_on = len(self._nodes) + runs_on
        self._graph = np.concatenate([owner[self._nodes], streams[0]])
        self._kind = np.concatenate([nodes["kind"][self._nodes], np.full(streams.shape[1], len(NODE_KINDS))])
        self._place = positions(self._graph * len(_TYPES) + self._kind)  # of each row within its type and graph

    def table(self, pairs: _Pairs, about: About) -> GraphTable:
        """The graphs; pairs of nodes of two graphs are left out, and ``about`` gets streams and digests."""
        columns = self._columns()
        found: dict[Key, Rows] = {}
        names = [self._program.streams[stream] for stream in self._streams[1].tolist()]
        device = [not (self._in_step and name.startswith("host")) for name in names]
        for number, name in enumerate(_TYPES):
            mine = np.flatnonzero(self._kind == number)
            mine = mine[np.argsort(self._graph[mine], kind="stable")]
            found[name] = {"graph": self._graph[mine]}
            if name == "stream":
                found[name]["x"] = np.array(device, dtype=np.float32).reshape(-1, 1)
            else:
                found[name] |= {each: values[mine] for each, values in columns.items()}
        streams: list[list[str]] = [[] for _ in about["scope"]]
        for graph, name in zip(self._streams[0].tolist(), names, strict=True):
            streams[graph].append(name)
        table = GraphTable({**about, "streams": streams}, found | self._edges(pairs))
        table.about["digest"] = [_digest(table, place) for place in range(len(streams))]
        return table

    def _columns(self) -> Rows:
        """Arrays of ops, collectives and host calls by row."""
        nodes, rows, measured = self._program.columns, self._nodes, self._measured
        own, works, work = np.arange(len(rows)) < self._num_own, self._program.works, nodes["work"][rows]
        launched = [nodes[name][rows] for name in ("blocks", "threads", "registers", "shared_bytes")]
        sizes = np.stack(launched, axis=1).astype(np.float64)
        x = node_numbers(work_numbers(works)[work], sizes, nodes["known"][rows], nodes["phase"][rows])
        x[~own, NUMBERS.index("is_peer")] = 1.0
        seconds = np.stack([measured.alone[rows], measured.seconds[rows]], axis=1)
        seconds[~own, 0], seconds[~own, 1] = np.nan, self._peers.seconds
        with np.errstate(divide="ignore", invalid="ignore"):
            y = np.log(seconds)
        y[~np.isfinite(y)] = np.nan
        number = {name: place for place, name in enumerate(kind_names())}
        kinds = np.array([*(number[each.kind] for each in works), number["host"]], dtype=np.int64)
        return {
            "x": x,
            "y": y.astype(np.float32),
            "kind": kinds[work],
            "node": np.where(own, measured.node[rows], -1),
            "signature": signatures(works)[work],
            "share": nodes["share"][rows] if "share" in nodes else np.ones(len(rows)),
            "launch": np.where(own[:, None], measured.launch[rows], 0.0),
            "beside": np.where(own, measured.beside[rows], 0.0),
            "call": np.where(own, measured.call[rows], -1),
            "recorded": np.where(own, nodes["recorded"][rows], 0),
        }

    def _edges(self, pairs: _Pairs) -> dict[Key, Rows]:
        """Edges by type; a relation that does not exist between two kinds of work counts as synchronisation."""
        owner, own = self._owner, np.arange(self._num_own)
        inside = np.flatnonzero((owner[pairs.source] == owner[pairs.target]) & (owner[pairs.source] >= 0))
        pairs = _Pairs(pairs.source[inside], pairs.target[inside], pairs.relation[inside], pairs.delay_s[inside])
        row = np.full(len(owner), -1)
        row[self._nodes[own]] = own
        peer = np.arange(self._num_own, len(self._nodes))
        listed = (
            (row[pairs.source], row[pairs.target], pairs.relation),
            (peer, row[self._peers.node], _NUMBER[RENDEZVOUS]),
            (own, self._runs_on, _NUMBER["runs_on"]),
            (self._runs_on, own, _NUMBER["runs"]),
        )
        ends = np.concatenate([np.stack(np.broadcast_arrays(*each)) for each in listed], axis=1)
        source, target, relation = ends
        numbers = np.zeros((len(source), len(EDGE_NUMBERS)), dtype=np.float32)
        numbers[: len(inside)] = self._edge_numbers(pairs)
        moved = slice(len(inside), len(inside) + len(peer))
        numbers[moved, 1] = work_numbers(self._program.works)[self._program.columns["work"][self._peers.node], 1]
        known = np.zeros((len(_RELATIONS), len(_TYPES), len(_TYPES)), dtype=np.bool_)
        types = [(_NUMBER[name], _TYPES.index(a), _TYPES.index(b)) for a, name, b in edge_types()]
        known[tuple(np.array(types).T)] = True
        kinds = self._kind[source], self._kind[target]
        relation = np.where(known[relation, *kinds], relation, _NUMBER[Dependency.SYNCHRONISATION.value])
        graph = self._graph[source]
        found: dict[Key, Rows] = {}
        for key, (name, a, b) in zip(edge_types(), types, strict=True):
            mine = np.flatnonzero((relation == name) & (kinds[0] == a) & (kinds[1] == b))
            mine = mine[np.argsort(graph[mine], kind="stable")]
            places = np.stack([self._place[source[mine]], self._place[target[mine]]], axis=1)
            found[key] = {"graph": graph[mine], "ends": places, "edge_attr": numbers[mine]}
        return found

    def _edge_numbers(self, pairs: _Pairs) -> NDArray[np.float32]:
        nodes, (source, target, _, delay_s) = self._program.columns, pairs
        overlap = _overlap(self._measured.start_s, self._measured.end_s, source, target)
        moved = work_numbers(self._program.works)[nodes["work"][source], 1]
        position, same = positions(nodes["stream"]), nodes["stream"][source] == nodes["stream"][target]
        distance = np.where(same, position[target] - position[source], 0)
        return np.stack([overlap, moved, distance, delay_s], axis=1).astype(np.float32)


def _digest(table: GraphTable, place: int) -> str:
    """Digest of the nodes of a graph and their durations; empty for few nodes, which may be equal by chance."""
    own = {name: slice(*table.bounds[name][place : place + 2].tolist()) for name in WORK_TYPES}
    if sum(each.stop - each.start for each in own.values()) < _LEAST_TOLD:
        return ""
    columns: list[Any] = [table.rows[n][each][own[n]] for n in WORK_TYPES for each in ("kind", "signature")]
    columns += [table.rows[name]["y"][own[name], 1] for name in WORK_TYPES]
    return digest(*(np.ascontiguousarray(column).tobytes() for column in columns))


def _overlap(start: Floats, end: Floats, one: Ints, other: Ints) -> Floats:
    """Seconds for which the nodes of each pair overlapped; 0 if their times are unknown."""
    shared = np.minimum(end[one], end[other]) - np.maximum(start[one], start[other])
    return np.asarray(np.fmax(shared, 0.0))


def _medians(keys: NDArray[Any], values: Floats, chosen: NDArray[np.bool_]) -> Floats:
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
