"""Steps of a rank's graph as arrays for learning: features, targets, launch times, relations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.intervals import covered
from stepsight.dataset.graph.program import COLLECTIVE, HOST, NODE_KINDS, OP, WHY, WHY_NUMBER, Dependency, Program
from stepsight.dataset.graph.relations import CONCURRENT
from stepsight.dataset.graph.rendezvous import Meeting
from stepsight.dataset.trace_graphs.graph_schema import (
    EDGE_NUMBERS,
    NUMBERS,
    RENDEZVOUS,
    GraphPart,
    edge_types,
    kind_names,
    node_numbers,
    signatures,
    work_numbers,
)
from stepsight.dataset.traces.device_graph import is_wait

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_WINDOW = 4  # nearest nodes of another stream, before and after, that count as concurrent
_MOST_PEERS = 8  # most ranks of a collective in a rank's graph


class RankParts:
    """Splits the graph of one rank into steps.

    Args:
        graphs: Of all ranks of the run.
        place: Which of them.
        met: Collectives that the ranks share.
    """

    def __init__(self, graphs: Sequence[Program], place: int, met: Sequence[Meeting]) -> None:
        self._graphs, self._place, self._graph = graphs, place, graphs[place]
        graph = self._graph
        self._met = {members[place]: members for members in met if place in members}
        self._works, self._signatures = work_numbers(graph.works), signatures(graph.works)
        names = {name: number for number, name in enumerate(kind_names())}
        self._kinds = np.array([*(names[work.kind] for work in graph.works), names["host"]], dtype=np.int64)
        self._position = positions(graph.columns["stream"])
        self._alone = _seconds_alone(graph)
        self._launch, self._beside = launch_times(graph), beside_collectives(graph)
        self._features = self._all_features()
        self._within = np.full(len(graph), -1, dtype=np.int64)  # of each node within its type, in the part at hand
        self._by_step, self._edge_bounds = self._edges_by_step()

    def parts(self) -> list[GraphPart]:
        """Every step in which a device, or a computing host, was active."""
        found = []
        step = self._graph.columns["step"]
        order = np.argsort(step, kind="stable")
        bounds = np.searchsorted(step[order], np.arange(len(self._graph.steps_s) + 1))
        for number in range(len(self._graph.steps_s)):
            nodes = np.sort(order[bounds[number] : bounds[number + 1]])
            if self._graph.on_device[nodes].any():
                found.append(self._part(nodes, number))
        return found

    def _edges_by_step(self) -> tuple[Ints, Ints]:
        """Edges within steps, sorted by step, and where those of each step begin: a long trace has thousands."""
        step = self._graph.columns["step"]
        source, target = step[self._graph.edge_columns["source"]], step[self._graph.edge_columns["target"]]
        own = np.flatnonzero((source == target) & (source >= 0))
        order = own[np.argsort(source[own], kind="stable")]
        return order, np.searchsorted(source[order], np.arange(len(self._graph.steps_s) + 1))

    def _all_features(self) -> NDArray[np.float32]:
        nodes = self._graph.columns
        launch = np.stack([nodes[name] for name in ("blocks", "threads", "registers", "shared_bytes")], axis=1)
        return node_numbers(self._works[nodes["work"]], launch.astype(np.float64), nodes["known"], nodes["phase"])

    def _part(self, nodes: Ints, step: int) -> GraphPart:
        graph = self._graph
        part = GraphPart("step", "step", step, events=graph.events / (len(graph.steps_s) + graph.observed))
        part.span_s = float(graph.steps_s[step, 1] - graph.steps_s[step, 0])
        place = self._within
        kind = graph.columns["kind"][nodes]
        work = graph.columns["work"][nodes]
        with np.errstate(divide="ignore"):
            seconds = np.log(np.stack([self._alone[nodes], graph.duration_s[nodes]], axis=1))
        seconds[~np.isfinite(seconds)] = np.nan
        for number, name in enumerate(NODE_KINDS):
            chosen = nodes[kind == number]
            place[chosen] = np.arange(len(chosen))
            part.x[name] = self._features[chosen]
            part.y[name] = seconds[kind == number].astype(np.float32)
            part.kind[name] = self._kinds[work[kind == number]]
            part.node[name] = chosen
            part.signature[name] = self._signatures[work[kind == number]]
            part.share[name] = np.ones(len(chosen))
            part.launch[name], part.beside[name] = self._launch[chosen], self._beside[chosen]
            part.call[name], part.recorded[name] = np.full(len(chosen), -1), graph.columns["recorded"][chosen]
        self._add_calls(part)
        inside = self._by_step[self._edge_bounds[step] : self._edge_bounds[step + 1]]
        self._add_edges(part, nodes, place, inside)
        self._add_streams(part, nodes)
        self._add_peers(part)
        return part

    def _add_calls(self, part: GraphPart) -> None:
        """Names of the calls that a host runs itself."""
        if self._graph.device == "cpu":
            used, part.call["op"] = np.unique(self._graph.columns["name"][part.node["op"]], return_inverse=True)
            part.calls = tuple(self._graph.names[name] for name in used.tolist())

    def _add_edges(self, part: GraphPart, nodes: Ints, place: Ints, inside: Ints) -> None:
        graph = self._graph
        source, target, why = (graph.edge_columns[name][inside] for name in ("source", "target", "why"))
        pairs = [(source, target, why, graph.delay_s[inside])]
        beside = concurrent_pairs(graph, nodes, inside, self._position)
        pairs.append((*beside, np.full(len(beside[0]), len(WHY)), np.zeros(len(beside[0]))))
        source, target, why, delay = (np.concatenate(each) for each in zip(*pairs, strict=True))
        numbers = self._edge_numbers(source, target, delay)
        kinds = graph.columns["kind"]
        code = (why * 3 + kinds[source]) * 3 + kinds[target]
        relations = (*(each.value for each in WHY), CONCURRENT)
        for a, relation, b in edge_types():
            if relation in relations:
                wanted = (relations.index(relation) * 3 + NODE_KINDS.index(a)) * 3 + NODE_KINDS.index(b)
                chosen = np.flatnonzero(code == wanted)
                ends = np.stack([place[source[chosen]], place[target[chosen]]])
                part.edges[a, relation, b] = ends, numbers[chosen]

    def _edge_numbers(self, source: Ints, target: Ints, delay: Floats) -> NDArray[np.float32]:
        graph, end = self._graph, self._graph.end_s
        overlap = np.minimum(end[source], end[target]) - np.maximum(graph.start_s[source], graph.start_s[target])
        moved = self._works[graph.columns["work"][source], 1]
        same = graph.columns["stream"][source] == graph.columns["stream"][target]
        distance = np.where(same, self._position[target] - self._position[source], 0)
        return np.stack([np.maximum(overlap, 0.0), moved, distance, delay], axis=1).astype(np.float32)

    def _add_streams(self, part: GraphPart, nodes: Ints) -> None:
        stream = self._graph.columns["stream"]
        used = np.unique(stream[nodes])
        number = np.zeros(len(self._graph.streams), dtype=np.int64)
        number[used] = np.arange(len(used))
        part.streams = tuple(self._graph.streams[each] for each in used.tolist())
        device = [[float(not name.startswith("host"))] for name in part.streams]
        part.x["stream"] = np.array(device, dtype=np.float32).reshape(-1, 1)
        for name in NODE_KINDS:
            chosen = part.node[name]
            ends = np.stack([np.arange(len(chosen)), number[stream[chosen]]])
            nothing = np.zeros((len(chosen), len(EDGE_NUMBERS)), dtype=np.float32)
            part.edges[name, "runs_on", "stream"] = ends, nothing
            part.edges["stream", "runs", name] = ends[::-1].copy(), nothing

    def _add_peers(self, part: GraphPart) -> None:
        """Collectives of other ranks in the same rendezvous, as additional nodes without a stream of this rank."""
        features: list[NDArray[np.float32]] = []
        works: list[int] = []
        seconds: list[list[float]] = []
        pairs: list[tuple[int, int]] = []
        count = len(part.node["collective"])
        for own, node in enumerate(part.node["collective"].tolist()):
            members = self._met.get(node, {})
            for place in [place for place in members if place != self._place][:_MOST_PEERS]:
                peer, other = self._graphs[place], members[place]
                row = self._features[node].copy()
                row[NUMBERS.index("is_peer")] = 1.0
                features.append(row)
                works.append(int(self._graph.columns["work"][node]))
                seconds.append([np.nan, np.log(max(peer.duration_s[other], 1e-9))])
                pairs.append((count + len(pairs), own))
        ends = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        numbers = np.zeros((len(pairs), len(EDGE_NUMBERS)), dtype=np.float32)
        if pairs:
            numbers[:, 1] = np.stack(features)[:, 1]
            more = {
                "x": np.stack(features),
                "y": np.array(seconds, dtype=np.float32),
                "kind": self._kinds[works],
                "node": np.full(len(pairs), -1),
                "signature": self._signatures[works],
                "share": np.ones(len(pairs)),
                "launch": np.zeros((len(pairs), 2)),
                "beside": np.zeros(len(pairs)),
                "call": np.full(len(pairs), -1),
                "recorded": np.zeros(len(pairs), dtype=np.int64),
            }
            for name, values in more.items():
                column = getattr(part, name)
                column["collective"] = np.concatenate([column["collective"], values])
        part.edges["collective", RENDEZVOUS, "collective"] = ends, numbers


def positions(stream: Ints) -> Ints:
    """Position of each node on its stream."""
    order = np.argsort(stream, kind="stable")
    firsts = np.searchsorted(stream[order], stream[order], "left")
    position = np.empty(len(stream), dtype=np.int64)
    position[order] = np.arange(len(stream)) - firsts
    return position


def _seconds_alone(graph: Program) -> Floats:
    """Median duration of each node's signature and kernel without concurrent work, NaN if it never ran alone.

    Collectives and host calls have none: a collective's duration holds waiting for others.
    """
    ops = np.flatnonzero(graph.columns["kind"] == OP)  # outside of steps, an observer may have slowed them
    busy = np.flatnonzero(graph.columns["kind"] != HOST)
    start, end = graph.start_s, graph.end_s
    begins, finishes = np.sort(start[busy]), np.sort(end[busy])
    beside = np.searchsorted(begins, end[ops], "left") - np.searchsorted(finishes, start[ops], "right") - 1
    alone = ops[(beside <= 0) & ((graph.columns["step"][ops] >= 0) | (graph.observed == 0))]
    out = np.full(len(graph), np.nan)
    if not len(alone):
        return out
    width = len(graph.names) + 1
    keys = graph.columns["work"] * width + graph.columns["name"]
    order = alone[np.lexsort((graph.duration_s[alone], keys[alone]))]
    distinct, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
    medians = graph.duration_s[order[first + counts // 2]]
    found = np.searchsorted(distinct, keys[ops])
    found = np.minimum(found, len(distinct) - 1)
    known = distinct[found] == keys[ops]
    out[ops[known]] = medians[found[known]]
    return out


def concurrent_pairs(graph: Program, nodes: Ints, inside: Ints, position: Ints) -> tuple[Ints, Ints]:
    """Nodes of different device streams neither of which precedes the other, in both directions, a few nearest each.

    A vector clock for each node says how far each stream is that the node follows.

    Args:
        graph: Of the rank.
        nodes: Those of a part, in order.
        inside: Edges between them.
        position: Place of each node of the rank on its stream.
    """
    stream = graph.columns["stream"]
    work = nodes[graph.on_device[nodes]]
    columns = {int(each): number for number, each in enumerate(np.unique(stream[work]))}
    if len(columns) < 2:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    clocks = _clocks(graph, nodes, inside, columns, position)
    pairs = []
    for one in columns:
        for other in columns:
            if one < other:
                pairs.append(_beside(graph, work[stream[work] == one], work[stream[work] == other]))
    first, second = (np.concatenate(each) for each in zip(*pairs, strict=True))
    column = np.zeros(len(graph.streams), dtype=np.int64)
    column[list(columns)] = list(columns.values())
    at = (np.searchsorted(nodes, first), np.searchsorted(nodes, second))
    follows = clocks[at[0], column[stream[second]]] > position[second]
    precedes = clocks[at[1], column[stream[first]]] > position[first]
    free = ~follows & ~precedes
    first, second = first[free], second[free]
    return np.concatenate([first, second]), np.concatenate([second, first])


def _beside(graph: Program, one: Ints, other: Ints) -> tuple[Ints, Ints]:
    """Each node of a stream with the nearest of another."""
    middle = np.searchsorted(graph.start_s[other], graph.start_s[one])
    places = middle[:, None] + np.arange(-_WINDOW, _WINDOW)[None, :]
    valid = (places >= 0) & (places < len(other))
    left = np.repeat(one, valid.sum(axis=1))
    return left, other[places[valid]]


def _clocks(graph: Program, nodes: Ints, inside: Ints, columns: dict[int, int], position: Ints) -> Ints:
    source, target = graph.edge_columns["source"], graph.edge_columns["target"]
    order = inside[np.argsort(target[inside], kind="stable")]
    clocks = np.zeros((len(nodes), len(columns)), dtype=np.int64)
    stream, device = graph.columns["stream"][nodes].tolist(), (graph.columns["kind"][nodes] != HOST).tolist()
    places = position[nodes].tolist()
    rows = clocks.tolist()
    for x, y in zip(*(np.searchsorted(nodes, each[order]).tolist() for each in (source, target)), strict=True):
        mine, theirs = rows[y], rows[x]
        for column, value in enumerate(theirs):
            if value > mine[column]:
                mine[column] = value
        if device[x]:
            column = columns[stream[x]]
            mine[column] = max(mine[column], places[x] + 1)
    return np.array(rows, dtype=np.int64).reshape(len(nodes), len(columns))


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


def beside_collectives(graph: Program) -> Floats:
    """``(n,)``: seconds of each op that overlapped with a collective of its rank."""
    out = np.zeros(len(graph))
    ops, others = (np.flatnonzero(graph.columns["kind"] == kind) for kind in (OP, COLLECTIVE))
    start, end = graph.start_s, graph.end_s
    out[ops] = covered(start[others], end[others], start[ops], end[ops])
    return out
