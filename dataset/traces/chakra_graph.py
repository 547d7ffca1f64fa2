"""Chakra execution traces to graphs: nodes with durations and data dependencies, one rank or many.

What starts when is not taken from such traces.  The times of the graph are those of a walk: each node starts when what
it depends on has ended and its stream is free, a collective when all of its ranks are there.  So the measured step is
the one that the dependencies imply, and a warning says so.
"""

from __future__ import annotations

import ast
import heapq
import re
from collections.abc import Callable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import COLLECTIVE, HOST, OP, Dependency, Program
from stepsight.dataset.graph.rank_trace import Rendezvous
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, OP_KINDS, Collective, Op
from stepsight.dataset.traces.assembly import Assembly, edges_by_kind
from stepsight.dataset.traces.chakra_nodes import COMM, COMM_TYPES, COMP, RECEIVE, SEND, ChakraNode, read_nodes
from stepsight.dataset.traces.classify import Scope, call_table, classify, classify_unknown, intern_op
from stepsight.dataset.traces.host_calls import Steps
from stepsight.dataset.traces.kernel_kinds import named_kind

_PART = re.compile(r"\(\d+\)$")  # of a call that the converter split at its launches
_MOST_TEXT = 100_000
_MOST_RANKS = 2**20
_WHY = {  # of a data dependency, by whether the host runs the node before and the node after
    (True, True): Dependency.HOST_ORDER,
    (True, False): Dependency.LAUNCH,
    (False, True): Dependency.SYNCHRONISATION,
    (False, False): Dependency.DATA,
}
_WALKED = "the step is the one that durations and dependencies imply: Chakra traces hold no measured step"


def read_chakra(
    files: Sequence[Path], ranks: Sequence[int], on_file: Callable[[int, int], None] | None = None
) -> list[Program]:
    """Read the Chakra traces of a job's ranks as graphs; ``on_file`` is told how many files are read, of how many."""
    found: list[list[ChakraNode]] = []
    world = max(len(files), 1 + max(ranks))
    for number, (path, rank) in enumerate(zip(files, ranks, strict=True)):
        nodes = _ordered(read_nodes(path), path)
        told = next((each.attrs["ngpus"] for each in nodes if "ngpus" in each.attrs), None)
        world = max(world, min(told, _MOST_RANKS)) if isinstance(told, int) else world
        _place(nodes, rank)
        found.append(nodes)
        if on_file is not None:
            on_file(number + 1, len(files))
    _walk(found)
    members: dict[str, set[int]] = {}
    for rank, nodes in zip(ranks, found, strict=True):
        for node in nodes:
            if node.met is not None:
                members.setdefault(node.met[0], set()).add(rank)
    sizes = {name: len(each) for name, each in members.items()}
    return [_graph(nodes, world, sizes).replace(rank=rank) for rank, nodes in zip(ranks, found, strict=True)]


def _ordered(nodes: list[ChakraNode], path: Path) -> list[ChakraNode]:
    """Nodes such that each follows its dependencies, otherwise by id."""
    by_id = {node.id: node for node in nodes}
    before = {node.id: {dep for dep in node.data_deps if dep in by_id and dep != node.id} for node in nodes}
    sorter = TopologicalSorter(before)
    try:
        sorter.prepare()
    except CycleError as error:
        circle = ", ".join(map(str, error.args[1][:4]))
        raise TraceError(
            f"dependencies of a Chakra trace must not form a circle, got nodes {circle} … that wait for each other: "
            f"{path}"
        ) from None
    found: list[ChakraNode] = []
    ready = sorted(sorter.get_ready())
    while ready:
        node = by_id[heapq.heappop(ready)]
        node.place, node.before = len(found), sorted((by_id[dep] for dep in before[node.id]), key=lambda one: one.place)
        found.append(node)
        sorter.done(node.id)
        for other in sorter.get_ready():
            heapq.heappush(ready, other)
    return found


def _place(nodes: list[ChakraNode], rank: int) -> None:
    """Set stream, kind and meeting of each node."""
    hosted = all(_on_cpu(node) is True for node in nodes)
    numbers: dict[str, int] = {}
    for node in nodes:
        communicates, on_cpu = node.type in (COMM, SEND, RECEIVE), _on_cpu(node)
        number = node.attrs.get("stream", node.attrs.get("tid", ""))
        if on_cpu and not hosted:
            node.stream, node.kind = f"host{number}", "host"
        else:
            usual = "comm" if communicates else "compute"
            node.stream = usual if on_cpu or number == "" else f"stream{number}"
            node.kind = "collective" if communicates else "op"
        met = _message(node, rank) if node.type in (SEND, RECEIVE) else ""
        if node.type == COMM and node.kind == "collective":
            met = str(node.attrs.get("pg_name") or node.attrs.get("comm_group") or "")[:80]
        if met or (node.type == COMM and node.kind == "collective"):
            numbers[met] = numbers.get(met, -1) + 1
            node.met = (met, numbers[met])


def _message(node: ChakraNode, rank: int) -> str:
    """Sender, receiver and tag of a message; empty if the trace does not state them."""
    ends = {"comm_src": rank, "comm_dst": rank, "comm_tag": 0} | node.attrs
    ends["comm_src" if node.type == SEND else "comm_dst"] = rank
    source, target, tag = (ends[name] for name in ("comm_src", "comm_dst", "comm_tag"))
    return f"message {source} to {target}, tag {tag}" if source != target else ""


def _on_cpu(node: ChakraNode) -> bool | None:
    value = node.attrs.get("is_cpu_op")
    return {"true": True, "false": False}.get(str(value).lower(), bool(value) if isinstance(value, int) else None)


def _walk(ranks: Sequence[list[ChakraNode]]) -> None:
    """Set start and end of all nodes: after their dependencies, in order on their stream, collectives together."""
    members: dict[Any, list[ChakraNode]] = {}
    for node in chain.from_iterable(ranks):
        if node.met is not None:
            members.setdefault(node.met, []).append(node)
    met = {key: together for key, together in members.items() if len(together) > 1}
    # who sends a message waits for nobody; all others of a meeting have ended when it has
    behind = {id(node): key for key, together in met.items() for node in together if node.type != SEND}
    waits: dict[Any, list[Any]] = {key: list(map(id, together)) for key, together in met.items()}
    by_id, earlier = {id(node): node for node in chain.from_iterable(ranks)}, dict[int, list[ChakraNode]]()
    for nodes in ranks:
        newest: dict[str, ChakraNode] = {}
        for node in nodes:
            earlier[id(node)] = [*node.before, *([newest[node.stream]] if node.stream in newest else [])]
            waits[id(node)] = [behind.get(id(each), id(each)) for each in earlier[id(node)]]
            newest[node.stream] = node
    try:
        for key in TopologicalSorter(waits).static_order():
            if key in by_id:
                node = by_id[key]
                node.start_us = max((each.end_us for each in earlier[key]), default=0.0)
                node.end_us = node.start_us + node.duration_us
                continue
            together = met[key]
            sent = max((node.end_us for node in together if node.type == SEND), default=None)
            last = max(node.start_us for node in together) + min(node.duration_us for node in together)
            for node in together:
                node.end_us = last if sent is None else max(node.end_us, sent if node.type != SEND else 0.0)
    except CycleError:
        raise TraceError(
            "ranks must meet in the same order, got collectives that deadlock: the traces are "
            "of different jobs or different steps"
        ) from None


def _graph(nodes: list[ChakraNode], world: int, sizes: dict[str, int]) -> Program:
    start, end = (np.array([getattr(node, name) for node in nodes]) for name in ("start_us", "end_us"))
    edges: list[tuple[int, int, Dependency]] = []
    last: dict[str, int] = {}
    for node in nodes:
        if node.stream in last:
            order = Dependency.HOST_ORDER if node.kind == "host" else Dependency.STREAM_ORDER
            edges.append((last[node.stream], node.place, order))
        last[node.stream] = node.place
        edges += [(one.place, node.place, _WHY[one.kind == "host", node.kind == "host"]) for one in node.before]
    bounds = Steps([(0.0, float(end.max(initial=0.0)))], -1, "nothing")
    built = Assembly(start, end, start, start, [*edges_by_kind(edges)], bounds)
    for node in nodes:
        columns, work, known = {"kind": HOST, "known": 1}, None, True
        if node.kind != "host":
            work, known = _work(node, max(sizes[node.met[0]], 2) if node.met else 2, world)
            columns = {"kind": COLLECTIVE if isinstance(work, Collective) else OP, "known": int(known)}
            columns["work"] = built.works[work]
        columns |= {"stream": built.streams[node.stream], "name": built.names[node.name]}
        for name, value in columns.items():
            built.columns[name][node.place] = value
        if node.met is not None and world > 1 and node.type == COMM:
            built.meet(node.place, Rendezvous(*node.met))
    device = "cpu" if all(node.kind != "host" for node in nodes) and any(map(_on_cpu, nodes)) else "cuda"
    warnings, ids = [_WALKED], {node.id for node in nodes}
    if absent := sum(dep not in ids for node in nodes for dep in node.data_deps):
        warnings.append(f"dependencies on nodes that the trace does not hold: {absent}; they are left out")
    if idle := sum(node.type in (COMP, COMM, SEND, RECEIVE) and not node.duration_us for node in nodes):
        warnings.append(f"nodes without a duration: {idle} of {len(nodes)}; they take no time")
    graph = built.graph(device, "cpu" if device == "cpu" else "", len(nodes))
    return graph.replace(world_size=world, warnings=tuple(warnings))


def _work(node: ChakraNode, group: int, world: int) -> tuple[Op | Collective, bool]:
    """Signature of a node, and whether its kind is known."""
    size = node.attrs.get("comm_size", node.attrs.get("tensor_size", 0))
    size = size if isinstance(size, int) and 0 <= size < 2**60 else 0
    if node.kind == "collective":
        kind = _collective_kind(node)
        group = max(group, world) if kind != "send_recv" and not node.attrs.get("pg_name") else group
        if kind is not None:
            return Collective(kind, size, max(group, 2), max(group, 2)), True
    moved = {"MEM_LOAD_NODE": "from_host", "MEM_STORE_NODE": "to_host"}.get(node.type)
    if moved is not None:
        return intern_op(moved, (max(size // 4, 0),), "fp32"), True
    op = _classified(next((each for each in node.before if each.kind == "host"), node))
    if op is not None:
        return op, True
    named = named_kind(node.name)
    if named is not None:
        return intern_op(named, (0,) * len(OP_KINDS[named].dim_names), "fp32"), True
    return intern_op("opaque", (0, 0, 0, 0), "fp32"), False


def _classified(call: ChakraNode) -> Op | None:
    """The op that a framework call is, by its name and the shapes of its inputs."""
    name = _PART.sub("", call.name)
    if name not in call_table() and not name.startswith("aten::"):
        return None
    shapes, types = _literal(call.shapes), _literal(call.types)
    if not isinstance(shapes, list) or not isinstance(types, list):
        return None
    plain = [str(each).removeprefix("Tensor(").removesuffix(")") for each in types]
    args = {"Input Dims": shapes, "Input type": plain}
    try:
        return classify(name, args, Scope()) if name in call_table() else classify_unknown(args)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError):
        return None


def _literal(text: str) -> Any:
    if not text or len(text) > _MOST_TEXT:
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _collective_kind(node: ChakraNode) -> str | None:
    if node.type in (SEND, RECEIVE):
        return "send_recv"
    told = node.attrs.get("comm_type")
    if isinstance(told, int) and 0 <= told < len(COMM_TYPES):
        return COMM_TYPES[told] if COMM_TYPES[told] in COLLECTIVE_KINDS else None
    name = f"{told or ''} {node.name}".lower().replace("_", "").replace("-", "")
    return next((kind for kind in COLLECTIVE_KINDS if kind.replace("_", "") in name), None)
