"""Rows of graphs: the features, targets and relations of the nodes of a program."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import digest
from stepsight.dataset.graph.columns import NODE_KINDS, Dependency, Floats, Ints, NodeArrays
from stepsight.dataset.graph.graph_table import (
    EDGE_NUMBERS,
    NUMBERS,
    RENDEZVOUS,
    WORK_TYPES,
    GraphTable,
    Key,
    Rows,
    edge_types,
    kind_names,
    node_numbers,
    signatures,
    work_numbers,
)
from stepsight.dataset.graph.relations import RELATIONS, positions, relation_pairs

About = dict[str, list[Any]]

_LEAST_TOLD = 8  # least number of nodes that identifies a graph
_TYPES = (*NODE_KINDS, "stream")
_RELATIONS = (*RELATIONS, "runs_on", "runs")
NUMBER = {relation: number for number, relation in enumerate(_RELATIONS)}


class Measured(NamedTuple):
    """What is known of the nodes of a program, ``(n,)`` each unless said otherwise."""

    alone: Floats  # seconds where nothing ran beside it
    seconds: Floats  # in context
    start_s: Floats  # NaN: unknown
    end_s: Floats
    launch: Floats  # (n, 2): host seconds from the launch before, and calls recorded in that time
    beside: Floats  # seconds that overlapped with collectives
    node: Ints  # place in the rank's graph, or in the segment
    call: Ints  # index of the graph's calls

    @classmethod
    def of(cls, program: NodeArrays, alone: Floats, launch: Floats, beside: Floats, call: Ints) -> Measured:
        """Nodes with the program's own times, each in its place."""
        times = (program.duration_s, program.start_s, program.end_s)
        return cls(alone, *times, launch, beside, np.arange(len(program)), call)


class Pairs(NamedTuple):
    """Edges, ``(e,)`` each."""

    source: Ints
    target: Ints
    relation: Ints  # index of ``_RELATIONS``
    delay_s: Floats


class Peers(NamedTuple):
    """Collectives of other ranks, ``(p,)`` each: additional nodes without a stream."""

    node: Ints  # the rank's own collective of the same rendezvous
    seconds: Floats


def listed_pairs(program: NodeArrays) -> Pairs:
    """All relations of a program as pairs."""
    relations = relation_pairs(program).items()
    found = [np.stack([*pairs, np.full(pairs.shape[1], NUMBER[name])]) for name, pairs in relations]
    source, target, relation = np.concatenate(found, axis=1)
    return Pairs(source, target, relation, np.zeros(len(source)))


def program_table(program: NodeArrays, alone: Floats, busy: int = 1, hardware: str = "") -> GraphTable:
    """A program of ``n`` nodes as a segment; ``alone``, ``(n,)``: seconds of each on its own, NaN: unknown."""
    count = len(program)
    measured = Measured.of(program, alone, np.zeros((count, 2)), np.zeros(count), np.full(count, -1))
    values = {"scope": "segment", "segment": program.label, "rank": program.rank, "busy": busy, "hardware": hardware}
    values |= {"step": 0, "micro_batch": 0, "stage": 0, "wait_s": 0.0, "span_s": 0.0, "events": 0.0, "calls": []}
    about = {name: [value] for name, value in values.items()}
    return GraphRows(program, np.zeros(count, dtype=np.int64), measured).table(listed_pairs(program), about)


class GraphRows:
    """Rows of graphs of one program, ``(r,)`` each: of its nodes, then of peers, then of streams.

    Args:
        program: All nodes, ``n``.
        owner: ``(n,)``: the graph of each node, -1: none.
        measured: What is known of the nodes.
        peers: Of steps; None for segments.
    """

    def __init__(self, program: NodeArrays, owner: Ints, measured: Measured, peers: Peers | None = None) -> None:
        self._program, self._owner, self._measured = program, owner, measured
        nodes, own = program.columns, np.flatnonzero(owner >= 0)
        held = np.stack([owner, nodes["stream"]])[:, own]
        streams, first, runs_on = np.unique(held, axis=1, return_index=True, return_inverse=True)
        order = np.lexsort((first, streams[0]))
        streams, runs_on = streams[:, order], np.argsort(order)[runs_on.reshape(-1)]
        self._in_step = peers is not None
        self._peers = peers or Peers(np.zeros(0, dtype=np.int64), np.zeros(0))
        self._streams, self._num_own = streams, len(own)
        self._nodes = np.concatenate([own, self._peers.node])  # that rows show
        self._runs_on = len(self._nodes) + runs_on
        self._graph = np.concatenate([owner[self._nodes], streams[0]])
        self._kind = np.concatenate([nodes["kind"][self._nodes], np.full(streams.shape[1], len(NODE_KINDS))])
        self._place = positions(self._graph * len(_TYPES) + self._kind)  # of each row within its type and graph

    def table(self, pairs: Pairs, about: About) -> GraphTable:
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

    def _edges(self, pairs: Pairs) -> dict[Key, Rows]:
        """Edges by type; a relation that does not exist between two kinds of work counts as synchronisation."""
        owner, own = self._owner, np.arange(self._num_own)
        inside = np.flatnonzero((owner[pairs.source] == owner[pairs.target]) & (owner[pairs.source] >= 0))
        pairs = Pairs(pairs.source[inside], pairs.target[inside], pairs.relation[inside], pairs.delay_s[inside])
        row = np.full(len(owner), -1)
        row[self._nodes[own]] = own
        peer = np.arange(self._num_own, len(self._nodes))
        listed = (
            (row[pairs.source], row[pairs.target], pairs.relation),
            (peer, row[self._peers.node], NUMBER[RENDEZVOUS]),
            (own, self._runs_on, NUMBER["runs_on"]),
            (self._runs_on, own, NUMBER["runs"]),
        )
        ends = np.concatenate([np.stack(np.broadcast_arrays(*each)) for each in listed], axis=1)
        source, target, relation = ends
        numbers = np.zeros((len(source), len(EDGE_NUMBERS)), dtype=np.float32)
        numbers[: len(inside)] = self._edge_numbers(pairs)
        moved = slice(len(inside), len(inside) + len(peer))
        numbers[moved, 1] = work_numbers(self._program.works)[self._program.columns["work"][self._peers.node], 1]
        known = np.zeros((len(_RELATIONS), len(_TYPES), len(_TYPES)), dtype=np.bool_)
        types = [(NUMBER[name], _TYPES.index(a), _TYPES.index(b)) for a, name, b in edge_types()]
        known[tuple(np.array(types).T)] = True
        kinds = self._kind[source], self._kind[target]
        relation = np.where(known[relation, *kinds], relation, NUMBER[Dependency.SYNCHRONISATION.value])
        graph = self._graph[source]
        found: dict[Key, Rows] = {}
        for key, (name, a, b) in zip(edge_types(), types, strict=True):
            mine = np.flatnonzero((relation == name) & (kinds[0] == a) & (kinds[1] == b))
            mine = mine[np.argsort(graph[mine], kind="stable")]
            places = np.stack([self._place[source[mine]], self._place[target[mine]]], axis=1)
            found[key] = {"graph": graph[mine], "ends": places, "edge_attr": numbers[mine]}
        return found

    def _edge_numbers(self, pairs: Pairs) -> NDArray[np.float32]:
        nodes, (source, target, _, delay_s) = self._program.columns, pairs
        shared = overlap(self._measured.start_s, self._measured.end_s, source, target)
        moved = work_numbers(self._program.works)[nodes["work"][source], 1]
        position, same = positions(nodes["stream"]), nodes["stream"][source] == nodes["stream"][target]
        distance = np.where(same, position[target] - position[source], 0)
        each = np.array([*(float(work.num_bytes) for work in self._program.works), 0.0])
        upto = np.concatenate([[0.0], np.cumsum(each[nodes["work"]])])
        since = np.log1p(np.maximum(upto[target] - upto[source + 1], 0.0))  # reuse distance: bytes that move between
        return np.stack([shared, moved, distance, delay_s, since], axis=1).astype(np.float32)


def _digest(table: GraphTable, place: int) -> str:
    """Digest of the nodes of a graph and their durations; empty for few nodes, which may be equal by chance."""
    own = {name: slice(*table.bounds[name][place : place + 2].tolist()) for name in WORK_TYPES}
    if sum(each.stop - each.start for each in own.values()) < _LEAST_TOLD:
        return ""
    columns: list[Any] = [table.rows[n][each][own[n]] for n in WORK_TYPES for each in ("kind", "signature")]
    columns += [table.rows[name]["y"][own[name], 1] for name in WORK_TYPES]
    return digest(*(np.ascontiguousarray(column).tobytes() for column in columns))


def overlap(start: Floats, end: Floats, one: Ints, other: Ints) -> Floats:
    """Seconds for which the nodes of each pair overlapped; 0 if their times are unknown."""
    shared = np.minimum(end[one], end[other]) - np.maximum(start[one], start[other])
    return np.asarray(np.fmax(shared, 0.0))
