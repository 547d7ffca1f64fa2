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
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.graph.rank_graph import COLLECTIVE, HOST, OP, RankGraph
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
_WALKED = "the step is the one that durations and dependencies imply: Chakra traces hold no measured step"


@dataclass
class _Rank:
    """One rank while it is read: nodes in an order such that each follows its dependencies."""

    rank: int  # which
    nodes: list[ChakraNode]  # in order
    before: list[list[int]]  # places of what each depends on
    stream: list[str] = field(default_factory=list)  # of each node
    kind: list[int] = field(default_factory=list)  # ``OP``, ``COLLECTIVE`` or ``HOST`` of each
    # group and number of each collective or message, None for what is none
    meets: list[tuple[str, int] | None] = field(default_factory=list)
    start_us: list[float] = field(default_factory=list)  # as walked
    end_us: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what is missing


def read_chakra(
    files: Sequence[Path], ranks: Sequence[int], on_file: Callable[[int, int], None] | None = None
) -> list[RankGraph]:
    """Read the Chakra traces of a job's ranks as graphs; ``on_file`` is told how many files are read, of how many.

    Raises:
        TraceError: If a file is no whole trace, dependencies form a circle, or ranks wait for each other in one.
    """
    found, world = [], max(len(files), 1 + max(ranks))
    for number, (path, rank) in enumerate(zip(files, ranks, strict=True)):
        nodes = read_nodes(path)
        told = next((each.attrs.get("ngpus") for each in nodes if "ngpus" in each.attrs), None)
        world = max(world, min(told, _MOST_RANKS)) if isinstance(told, int) else world
        found.append(_placed(_ordered(nodes, rank, path)))
        if on_file is not None:
            on_file(number + 1, len(files))
    _walk(found)
    members: dict[str, set[int]] = {}
    for each in found:
        for met in filter(None, each.meets):
            members.setdefault(met[0], set()).add(each.rank)
    return [_graph(each, world, {name: len(ranks) for name, ranks in members.items()}) for each in found]


def _ordered(nodes: list[ChakraNode], rank: int, path: Path) -> _Rank:
    """Sort nodes such that each follows its dependencies, otherwise by id."""
    by_id = {node.id: node for node in nodes}
    absent = sum(dep not in by_id for node in nodes for dep in node.data_deps)
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
    place: dict[int, int] = {}
    ready = sorted(sorter.get_ready())
    while ready:
        node = heapq.heappop(ready)
        place[node] = len(place)
        sorter.done(node)
        for other in sorter.get_ready():
            heapq.heappush(ready, other)
    found = _Rank(rank, [by_id[node] for node in place], [sorted(place[dep] for dep in before[node]) for node in place])
    if absent:
        found.warnings.append(f"dependencies on nodes that the trace does not hold: {absent}; they are left out")
    idle = sum(node.type in (COMP, COMM, SEND, RECEIVE) and not node.duration_us for node in nodes)
    if idle:
        found.warnings.append(f"nodes without a duration: {idle} of {len(nodes)}; they take no time")
    return found


def _placed(rank: _Rank) -> _Rank:
    """Stream, kind and meeting of each node."""
    said = [_flag(node.attrs.get("is_cpu_op")) for node in rank.nodes]
    hosted = all(each is True for each in said)
    numbers: dict[str, int] = {}
    for node, on_host in zip(rank.nodes, said, strict=True):
        communicates = node.type in (COMM, SEND, RECEIVE)
        number = node.attrs.get("stream", node.attrs.get("tid", ""))
        if on_host and not hosted:
            rank.stream.append(f"host{number}")
            rank.kind.append(HOST)
        else:
            usual = "comm" if communicates else "compute"
            rank.stream.append(usual if on_host or number == "" else f"stream{number}")
            rank.kind.append(COLLECTIVE if communicates else OP)
        met = None
        if communicates and rank.kind[-1] == COLLECTIVE and node.type == COMM:
            group = str(node.attrs.get("pg_name") or node.attrs.get("comm_group") or "")[:80]
            numbers[group] = numbers.get(group, -1) + 1
            met = (group, numbers[group])
        elif communicates and node.type in (SEND, RECEIVE):
            message = _message(node, rank.rank)
            numbers[message] = numbers.get(message, -1) + 1
            met = (message, numbers[message]) if message else None
        rank.meets.append(met)
    return rank


def _message(node: ChakraNode, rank: int) -> str:
    """Sender, receiver and tag of a message; empty if the trace does not state them."""
    ends = {"comm_src": rank, "comm_dst": rank, "comm_tag": 0} | node.attrs
    ends["comm_src" if node.type == SEND else "comm_dst"] = rank
    source, target, tag = (ends[name] for name in ("comm_src", "comm_dst", "comm_tag"))
    return f"message {source} to {target}, tag {tag}" if source != target else ""


def _flag(value: Any) -> bool | None:
    return {"true": True, "false": False}.get(str(value).lower(), bool(value) if isinstance(value, int) else None)


def _walk(ranks: Sequence[_Rank]) -> None:
    """Start and end of all nodes: after their dependencies, in order on their stream, collectives together."""
    members: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for number, rank in enumerate(ranks):
        rank.start_us, rank.end_us = [0.0] * len(rank.nodes), [0.0] * len(rank.nodes)
        for node, met in enumerate(rank.meets):
            if met is not None:
                members.setdefault(met, []).append((number, node))
    at, free = [0] * len(ranks), [dict[str, float]() for _ in ranks]
    arrived: dict[tuple[str, int], int] = {}
    sent: dict[tuple[str, int], float] = {}  # end of each message
    held: list[bool] = [False] * len(ranks)
    active = list(range(len(ranks)))
    while active:
        number = active.pop()
        rank, held[number] = ranks[number], False
        while at[number] < len(rank.nodes):
            node, stream = at[number], rank.stream[at[number]]
            begin = max([free[number].get(stream, 0.0), *(rank.end_us[dep] for dep in rank.before[node])])
            rank.start_us[node] = begin
            met = rank.meets[node]
            together = members[met] if met is not None else [(number, node)]
            if met is not None and len(together) > 1 and rank.nodes[node].type in (SEND, RECEIVE):
                if rank.nodes[node].type == SEND:  # it starts at once, independent of who waits for it
                    sent[met] = begin + rank.nodes[node].duration_us
                    active += [one for one, _ in together if held[one] and ranks[one].meets[at[one]] == met]
                elif met not in sent:
                    held[number] = True
                    break
                end = max(begin + rank.nodes[node].duration_us, sent[met])  # the receiver waits for it
                rank.end_us[node] = free[number][stream] = end
                at[number] += 1
                continue
            if len(together) > 1 and met is not None:
                arrived[met] = arrived.get(met, 0) + 1
                if arrived[met] < len(together):
                    held[number] = True
                    break
            last = max(ranks[one].start_us[other] for one, other in together)
            seconds = min(ranks[one].nodes[other].duration_us for one, other in together)
            for one, other in together:
                ranks[one].end_us[other] = last + seconds
                free[one][ranks[one].stream[other]] = last + seconds
                at[one] += 1
                if held[one]:
                    active.append(one)
    if any(held):
        raise TraceError(
            "ranks must meet in the same order, got collectives that deadlock: the traces are "
            "of different jobs or different steps"
        )


def _graph(rank: _Rank, world: int, sizes: dict[str, int]) -> RankGraph:
    start, end = np.array(rank.start_us), np.array(rank.end_us)
    edges: list[tuple[int, int, Dependency]] = []
    last: dict[str, int] = {}
    for node, deps in enumerate(rank.before):
        order = Dependency.HOST_ORDER if rank.kind[node] == HOST else Dependency.STREAM_ORDER
        if rank.stream[node] in last:
            edges.append((last[rank.stream[node]], node, order))
        last[rank.stream[node]] = node
        edges += [(one, node, _why(rank.kind[one], rank.kind[node])) for one in deps]
    bounds = Steps([(0.0, float(end.max(initial=0.0)))], -1, "nothing")
    built = Assembly(start, end, start, start, [*edges_by_kind(edges)], bounds)
    nodes, hosted = built.columns, all(kind != HOST for kind in rank.kind)
    nodes["kind"] = np.array(rank.kind, np.int64)
    for place, each in enumerate(rank.nodes):
        nodes["stream"][place], nodes["name"][place] = built.streams[rank.stream[place]], built.names[each.name]
        nodes["known"][place] = 1
        met = rank.meets[place]
        if rank.kind[place] != HOST:
            work, known = _work(rank, place, max(sizes.get(met[0], 1), 2) if met else 2, world)
            nodes["work"][place], nodes["known"][place] = built.works[work], int(known)
            nodes["kind"][place] = COLLECTIVE if isinstance(work, Collective) else OP
        if met is not None and world > 1 and each.type == COMM:
            built.meet(place, Rendezvous(met[0], met[1], ()))
    device = "cpu" if hosted and any(_flag(node.attrs.get("is_cpu_op")) for node in rank.nodes) else "cuda"
    graph = built.graph(device, "cpu" if device == "cpu" else "", len(start))
    return replace(graph, rank=rank.rank, world_size=world, warnings=(_WALKED, *rank.warnings))


def _why(before: int, after: int) -> Dependency:
    """Kind of a data dependency by its two nodes."""
    if before == HOST:
        return Dependency.HOST_ORDER if after == HOST else Dependency.LAUNCH
    return Dependency.SYNCHRONISATION if after == HOST else Dependency.DATA


def _work(rank: _Rank, place: int, group: int, world: int) -> tuple[Op | Collective, bool]:
    """Signature of a node, and whether its kind is known."""
    node = rank.nodes[place]
    size = node.attrs.get("comm_size", node.attrs.get("tensor_size", 0))
    size = size if isinstance(size, int) and 0 <= size < 2**60 else 0
    if rank.kind[place] == COLLECTIVE:
        kind = _collective_kind(node)
        group = max(group, world) if kind != "send_recv" and not node.attrs.get("pg_name") else group
        if kind is not None:
            return Collective(kind, size, max(group, 2), max(group, 2)), True
    moved = {"MEM_LOAD_NODE": "from_host", "MEM_STORE_NODE": "to_host"}.get(node.type)
    if moved is not None:
        return intern_op(moved, (max(size // 4, 0),), "fp32"), True
    call = next((rank.nodes[dep] for dep in rank.before[place] if rank.kind[dep] == HOST), node)
    op = _classified(call)
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
