"""Rows of graphs: the features, targets and relations of the nodes of a program."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import digest
from stepsight.dataset.graph.columns import NODE_KINDS, PHASES, Dependency, Floats, Graph, Ints
from stepsight.dataset.graph.graph_table import (
    EDGE_NUMBERS,
    RENDEZVOUS,
    WORK_TYPES,
    GraphTable,
    Key,
    Rows,
    edge_types,
    kind_names,
    signatures,
    work_numbers,
)
from stepsight.dataset.graph.relations import RELATIONS, positions, relation_pairs

About = dict[str, list[Any]]
Peers = tuple[Ints, Floats]  # (p,): the rank's own collective that each one of another rank meets, and its seconds

_LEAST_TOLD = 8  # least number of nodes that identifies a graph
_LAUNCHED = ("blocks", "threads", "registers", "shared_bytes")
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


class Pairs(NamedTuple):
    """Edges, ``(e,)`` each."""

    source: Ints
    target: Ints
    relation: Ints  # index of ``_RELATIONS``
    delay_s: Floats


def listed_pairs(program: Graph) -> Pairs:
    """All relations of a program as pairs."""
    relations = relation_pairs(program).items()
    found = [np.stack([*pairs, np.full(pairs.shape[1], NUMBER[name])]) for name, pairs in relations]
    source, target, relation = np.concatenate(found, axis=1)
    return Pairs(source, target, relation, np.zeros(len(source)))


def program_table(program: Graph, alone: Floats, busy: int = 1, hardware: str = "") -> GraphTable:
    """A program of ``n`` nodes as a segment; ``alone``, ``(n,)``: seconds of each on its own, NaN: unknown."""
    count, times = len(program), (program.duration_s, program.start_s, program.end_s)
    launch, beside, call = np.zeros((count, 2)), np.zeros(count), np.full(count, -1)
    values = {"scope": "segment", "segment": program.label, "rank": program.rank, "busy": busy, "hardware": hardware}
    values |= {"step": 0, "micro_batch": 0, "stage": 0, "wait_s": 0.0, "span_s": 0.0, "events": 0.0, "calls": []}
    about = {name: [value] for name, value in values.items()}
    measured = Measured(alone, *times, launch, beside, np.arange(count), call)
    return graph_table(program, np.zeros(count, dtype=np.int64), measured, listed_pairs(program), about)


def graph_table(
    program: Graph, owner: Ints, measured: Measured, pairs: Pairs, about: About, peers: Peers | None = None
) -> GraphTable:
    """Graphs of the nodes of one program, of which peers are collectives of other ranks, without a stream.

    ``owner``, ``(n,)``, is the graph of each node, -1: none.  Pairs of nodes of two graphs are left out; streams and
    digests are added to ``about``; only steps have peers.
    """
    nodes, own = program.columns, np.flatnonzero(owner >= 0)
    peer, peer_s = peers or (np.zeros(0, dtype=np.int64), np.zeros(0))
    held = np.stack([owner, nodes["stream"]])[:, own]
    held, first, runs_on = np.unique(held, axis=1, return_index=True, return_inverse=True)
    order = np.lexsort((first, held[0]))
    (graph_of, stream), shown = held[:, order], np.concatenate([own, peer])  # rows: own nodes, peers, then streams
    runs_on = len(shown) + np.argsort(order)[runs_on.reshape(-1)]
    graph = np.concatenate([owner[shown], graph_of])
    kind = np.concatenate([nodes["kind"][shown], np.full(len(stream), len(NODE_KINDS))])
    names = [program.streams[each] for each in stream.tolist()]
    device = [not (peers is not None and name.startswith("host")) for name in names]
    columns, found = _columns(program, measured, shown, peer_s), dict[Key, Rows]()
    for number, name in enumerate(_TYPES):
        mine = np.flatnonzero(kind == number)
        mine = mine[np.argsort(graph[mine], kind="stable")]
        found[name] = {"graph": graph[mine]}
        if name == "stream":
            found[name]["x"] = np.array(device, dtype=np.float32).reshape(-1, 1)
        else:
            found[name] |= {each: values[mine] for each, values in columns.items()}
    inside = (owner[pairs.source] == owner[pairs.target]) & (owner[pairs.source] >= 0)
    pairs, row, rows = Pairs(*(each[inside] for each in pairs)), np.full(len(owner), -1), np.arange(len(shown))
    row[own] = rows[: len(own)]
    listed = (
        (row[pairs.source], row[pairs.target], pairs.relation),
        (rows[len(own) :], row[peer], NUMBER[RENDEZVOUS]),
        (rows[: len(own)], runs_on, NUMBER["runs_on"]),
        (runs_on, rows[: len(own)], NUMBER["runs"]),
    )
    ends = np.concatenate([np.stack(np.broadcast_arrays(*each)) for each in listed], axis=1)
    numbers = np.zeros((ends.shape[1], len(EDGE_NUMBERS)), dtype=np.float32)
    numbers[: len(pairs.source)] = _edge_numbers(program, measured, pairs)
    numbers[len(pairs.source) :][: len(peer), 1] = work_numbers(program.works)[nodes["work"][peer], 1]
    streams: list[list[str]] = [[] for _ in about["scope"]]
    for each, name in zip(graph_of.tolist(), names, strict=True):
        streams[each].append(name)
    table = GraphTable({**about, "streams": streams}, found | _by_type(ends, numbers, graph, kind))
    table.about["digest"] = [_digest(table, place) for place in range(len(streams))]
    return table


def _columns(program: Graph, measured: Measured, rows: Ints, peer_s: Floats) -> Rows:
    """Arrays of ops, collectives and host calls by row; the last rows are those of peers."""
    nodes, works, work = program.columns, program.works, program.columns["work"][rows]
    own = np.arange(len(rows)) < len(rows) - len(peer_s)
    numbers, (blocks, threads, registers, shared) = work_numbers(works)[work], (nodes[name][rows] for name in _LAUNCHED)
    sizes = np.log1p(blocks), np.log1p(threads), registers / 256.0, np.log1p(shared)
    flags = nodes["known"][rows] > 0, ~own, *(nodes["phase"][rows] == phase for phase in range(len(PHASES)))
    x = np.column_stack([numbers[:, :-2], *sizes, numbers[:, -2:], *flags])  # NUMBERS
    seconds = np.stack([measured.alone[rows], measured.seconds[rows]], axis=1)
    seconds[~own, 0], seconds[~own, 1] = np.nan, peer_s
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.log(seconds)
    y[~np.isfinite(y)] = np.nan
    number = {name: place for place, name in enumerate(kind_names())}
    kinds = np.array([*(number[each.kind] for each in works), number["host"]], dtype=np.int64)
    return {
        "x": x.astype(np.float32),
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


def _edge_numbers(program: Graph, measured: Measured, pairs: Pairs) -> NDArray[np.float32]:
    nodes, (source, target, _, delay_s) = program.columns, pairs
    shared = overlap(measured.start_s, measured.end_s, source, target)
    moved = work_numbers(program.works)[nodes["work"][source], 1]
    position, same = positions(nodes["stream"]), nodes["stream"][source] == nodes["stream"][target]
    distance = np.where(same, position[target] - position[source], 0)
    each = np.array([*(float(work.num_bytes) for work in program.works), 0.0])
    upto = np.concatenate([[0.0], np.cumsum(each[nodes["work"]])])
    since = np.log1p(np.maximum(upto[target] - upto[source + 1], 0.0))  # reuse distance: bytes that move between
    return np.stack([shared, moved, distance, delay_s, since], axis=1).astype(np.float32)


def _by_type(ends: Ints, numbers: NDArray[np.float32], graph: Ints, kind: Ints) -> dict[Key, Rows]:
    """Edges by type; a relation that does not exist between two kinds of work counts as synchronisation.

    ``ends``: ``(3, e)``: rows of sources and targets, and relations; ``graph`` and ``kind`` of rows.
    """
    (source, target, relation), place = ends, positions(graph * len(_TYPES) + kind)  # within a type and a graph
    types = [(NUMBER[name], _TYPES.index(a), _TYPES.index(b)) for a, name, b in edge_types()]
    known = np.zeros((len(_RELATIONS), len(_TYPES), len(_TYPES)), dtype=np.bool_)
    known[tuple(np.array(types).T)] = True
    there = known[relation, kind[source], kind[target]]
    relation = np.where(there, relation, NUMBER[Dependency.SYNCHRONISATION.value])
    found: dict[Key, Rows] = {}
    for key, (name, a, b) in zip(edge_types(), types, strict=True):
        mine = np.flatnonzero((relation == name) & (kind[source] == a) & (kind[target] == b))
        mine = mine[np.argsort(graph[source[mine]], kind="stable")]
        places = np.stack([place[source[mine]], place[target[mine]]], axis=1)
        found[key] = {"graph": graph[source[mine]], "ends": places, "edge_attr": numbers[mine]}
    return found


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
