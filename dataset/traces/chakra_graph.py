"""Chakra execution traces to graphs: nodes with durations and data dependencies, one rank or many.

What starts when is not taken from such traces.  The times of the graph are those of a walk: each node starts when what
it depends on has ended and its stream is free, a collective when all of its ranks are there.  So the measured step is
the one that the dependencies imply, and a warning says so.
"""

from __future__ import annotations

import ast
import heapq
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.bounded import parsing, read_unpacked, read_varint
from stepsight.dataset.base.errors import MALFORMED, TraceError
from stepsight.dataset.graph.program import COLLECTIVE, HOST, OP, Dependency, Program
from stepsight.dataset.graph.rank_trace import Rendezvous
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, OP_KINDS, Collective, Op
from stepsight.dataset.traces.assembly import Assembly, edges_by_kind
from stepsight.dataset.traces.classify import NAMES, Scope, call_table, classify, classify_unknown, intern_op
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
    found, world = list[list[ChakraNode]](), max(len(files), 1 + max(ranks))
    for number, (path, rank) in enumerate(zip(files, ranks, strict=True)):
        nodes = _ordered(read_nodes(path), path)
        told = next((each.attrs["ngpus"] for each in nodes if "ngpus" in each.attrs), None)
        world = max(world, min(told, _MOST_RANKS)) if isinstance(told, int) else world
        _place(nodes, rank)
        found.append(nodes)
        if on_file is not None:
            on_file(number + 1, len(files))
    _walk(found)
    sizes = Counter(name for nodes in found for name in {node.met[0] for node in nodes if node.met is not None})
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
        rule = "dependencies of a Chakra trace must not form a circle"
        raise TraceError(f"{rule}, got nodes {circle} … that wait for each other: {path}") from None
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
        met = ""
        if node.type in (SEND, RECEIVE):  # sender, receiver and tag of a message, if the trace states them
            ends = {"comm_src": rank, "comm_dst": rank, "comm_tag": 0} | node.attrs
            ends["comm_src" if node.type == SEND else "comm_dst"] = rank
            source, target, tag = (ends[name] for name in ("comm_src", "comm_dst", "comm_tag"))
            met = f"message {source} to {target}, tag {tag}" if source != target else ""
        if node.type == COMM and node.kind == "collective":
            met = str(node.attrs.get("pg_name") or node.attrs.get("comm_group") or "")[:80]
        if met or (node.type == COMM and node.kind == "collective"):
            numbers[met] = numbers.get(met, -1) + 1
            node.met = (met, numbers[met])


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
        told = "got collectives that deadlock: the traces are of different jobs or different steps"
        raise TraceError(f"ranks must meet in the same order, {told}") from None


def _graph(nodes: list[ChakraNode], world: int, sizes: Mapping[str, int]) -> Program:
    start, end = (np.array([getattr(node, name) for node in nodes]) for name in ("start_us", "end_us"))
    edges, last = list[tuple[int, int, Dependency]](), dict[str, int]()
    for node in nodes:
        if node.stream in last:
            order = Dependency.HOST_ORDER if node.kind == "host" else Dependency.STREAM_ORDER
            edges.append((last[node.stream], node.place, order))
        last[node.stream] = node.place
        edges += [(one.place, node.place, _WHY[one.kind == "host", node.kind == "host"]) for one in node.before]
    steps = Steps([(0.0, float(end.max(initial=0.0)))], whole=False)
    built = Assembly(start, end, start, start, [*edges_by_kind(edges)], steps)
    for node in nodes:
        columns = {"stream": built.streams[node.stream], "name": built.names[node.name], "kind": HOST, "known": 1}
        if node.kind != "host":
            work, known = _work(node, max(sizes[node.met[0]], 2) if node.met else 2, world)
            columns |= {"kind": COLLECTIVE if isinstance(work, Collective) else OP, "known": int(known)}
            columns["work"] = built.works[work]
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
    op, named = _classified(next((each for each in node.before if each.kind == "host"), node)), named_kind(node.name)
    kind = named or "opaque"
    return op or intern_op(kind, (0,) * len(OP_KINDS[kind].dim_names), "fp32"), bool(op or named)


def _classified(call: ChakraNode) -> Op | None:
    """The op that a framework call is, by its name and the shapes of its inputs."""
    name = _PART.sub("", call.name)
    known = name in call_table()
    if not (known or name.startswith("aten::")) or max(len(call.shapes), len(call.types)) > _MOST_TEXT:
        return None
    with suppress(*MALFORMED, SyntaxError, MemoryError):
        shapes, types = ast.literal_eval(call.shapes), ast.literal_eval(call.types)
        if isinstance(shapes, list) and isinstance(types, list):
            plain = [str(each).removeprefix("Tensor(").removesuffix(")") for each in types]
            args = {"Input Dims": shapes, "Input type": plain}
            return classify(name, args, Scope()) if known else classify_unknown(args)
    return None


def _collective_kind(node: ChakraNode) -> str | None:
    if node.type in (SEND, RECEIVE):
        return "send_recv"
    told = node.attrs.get("comm_type")
    if isinstance(told, int) and 0 <= told < len(COMM_TYPES):
        return COMM_TYPES[told] if COMM_TYPES[told] in COLLECTIVE_KINDS else None
    name = f"{told or ''} {node.name}".lower().replace("_", "").replace("-", "")
    return next((kind for kind in COLLECTIVE_KINDS if kind.replace("_", "") in name), None)


COMP, COMM, SEND, RECEIVE = "COMP_NODE", "COMM_COLL_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE"
NODE_TYPES: tuple[str, ...] = tuple(NAMES["chakra"]["node_types"])
COMM_TYPES: tuple[str, ...] = tuple(NAMES["chakra"]["collectives"])
_MOST_US = 2**53
_TEXTS, _BOOLS = (29,), (27,)  # fields of AttributeProto
_SIGNED, _ZIGZAG = (7, 9), (15, 17)
_KEYS: Mapping[str, str] = NAMES["chakra"]["keys"]  # of JSON, and ours
_KNOWN = frozenset(NAMES["chakra"]["known"])  # keys of JSON that are no attributes


@dataclass
class ChakraNode:
    """One node."""

    id: int  # of the node
    name: str = ""  # of the call, kernel or collective
    type: str = NODE_TYPES[0]  # one of ``NODE_TYPES``
    data_deps: tuple[int, ...] = ()  # nodes that end before it begins
    duration_us: float = 0.0  # microseconds
    shapes: str = ""  # of the inputs, as text
    types: str = ""
    attrs: dict[str, Any] = field(default_factory=dict)  # named attributes
    # where it stands among the nodes of its rank
    place: int = -1
    before: list[ChakraNode] = field(default_factory=list, repr=False)  # what it depends on
    stream: str = ""
    kind: str = "op"  # or ``collective`` or ``host``
    met: tuple[str, int] | None = None  # group and number of a collective or message
    start_us: float = 0.0
    end_us: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.duration_us < _MOST_US:
            raise ValueError(f"a duration must be from 0 to {_MOST_US:g} us, got {self.duration_us} of node {self.id}")
        if self.type not in NODE_TYPES:
            rule = f"the type of node {self.id} must be one of {', '.join(NODE_TYPES)}"
            raise ValueError(f"{rule}, got {self.type!r:.40}")


def read_nodes(path: Path) -> list[ChakraNode]:
    """Read the nodes of one rank's trace, protobuf (``.et``) or JSON.

    The protobuf form is a sequence of messages, each after its length: one ``GlobalMetadata``, then ``Node`` after
    ``Node`` (``schema/protobuf/et_def.proto`` of mlcommons/chakra).  The JSON forms are a table with
    ``workload_graph``, and nodes one after the other as protobuf prints them.
    """
    with parsing(f"{path} must be a whole Chakra execution trace (protobuf or JSON)", TraceError):
        data = read_unpacked(path)
        nodes = list(_json_nodes(data) if data.lstrip()[:1] in (b"{", b"[") else _wire_nodes(data))
    for number, count in Counter(node.id for node in nodes).most_common(1):
        if count > 1:
            raise TraceError(f"every node of a Chakra trace must have an id of its own, got {number} twice in {path}")
    if not nodes:
        raise TraceError(f"a Chakra trace must hold nodes, got none in {path}")
    return nodes


def _wire_nodes(data: bytes) -> Iterator[ChakraNode]:
    _, at = _bytes(data, 0) if data else (b"", 0)  # the metadata
    while at < len(data):
        message, at = _bytes(data, at)
        yield _wire_node(message)


def _wire_node(message: bytes) -> ChakraNode:
    node: dict[str, Any] = {"id": 0, "attrs": {}, "data_deps": []}
    for number, value in _fields(message):
        if isinstance(value, int) != (number in (1, 3, 7)) and number in (1, 2, 3, 7, 8, 10):
            raise ValueError(f"field {number} of a node must be of another type, got {value!r:.40}")
        if number in (1, 2, 7):
            node[{1: "id", 2: "name", 7: "duration_us"}[number]] = _text(value) if number == 2 else value
        elif number == 3:
            node["type"] = NODE_TYPES[value] if value < len(NODE_TYPES) else str(value)
        elif number == 5 and isinstance(value, int):
            node["data_deps"].append(value)
        elif number == 5:
            at = 0
            while at < len(value):
                dep, at = read_varint(value, at)
                node["data_deps"].append(dep)
        elif number == 8:
            told = dict(_fields(value))
            node["shapes"], node["types"] = (_text(told.get(place, b"")) for place in (2, 3))
        elif number == 10:
            attr = dict(_fields(value))
            node["attrs"][_text(attr.pop(1, b""))] = _wire_value(attr)
    return ChakraNode(**{**node, "data_deps": tuple(node["data_deps"])})


def _wire_value(attr: Mapping[int, Any]) -> Any:
    """The value of an attribute, from its last field that holds one."""
    found: Any = None
    for number, value in attr.items():
        if isinstance(value, bytes):
            found = _text(value) if number in _TEXTS else found
        elif number in _BOOLS:
            found = bool(value)
        elif number > 2:
            found = value - 2**64 if number in _SIGNED and value >= 2**63 else value
            found = (value >> 1) ^ -(value & 1) if number in _ZIGZAG else found
    return found


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values, whole numbers or bytes, of the fields of a message."""
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        if key & 7 not in (0, 1, 2, 5):
            raise ValueError(f"a field must be of wire type 0, 1, 2 or 5, got {key & 7}")
        value, at = read_varint(message, at) if key & 7 == 0 else _bytes(message, at, {1: 8, 5: 4}.get(key & 7))
        yield key >> 3, value


def _bytes(data: bytes, at: int, length: int | None = None) -> tuple[bytes, int]:
    """Bytes of a length, which stands before them if it is not given, and where they end."""
    if length is None:
        length, at = read_varint(data, at)
    if at + length > len(data):
        raise ValueError(f"a message of {length} bytes begins {len(data) - at} bytes before the end")
    return data[at : at + length], at + length


def _text(value: int | bytes) -> str:
    if isinstance(value, int):
        raise ValueError(f"a text must be bytes, got the number {value}")
    return value.decode()


def _json_nodes(data: bytes) -> Iterator[ChakraNode]:
    for table in _tables(data.decode("utf-8")):
        if "workload_graph" in table:
            yield from map(_json_node, table["workload_graph"])
        elif "name" in table and "id" in table:
            yield _json_node(table)
        elif not ({"version", "attr"} & set(table)) and table:
            raise ValueError(f"a table must be a node, the metadata or hold workload_graph, got {sorted(table)[:4]}")


def _tables(text: str) -> Iterator[Mapping[str, Any]]:
    """JSON tables one after the other, or in one list."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text) and text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        found, at = decoder.raw_decode(text, at)
        for table in found if isinstance(found, list) else [found]:
            if not isinstance(table, dict):
                raise ValueError(f"a trace must hold tables, got {table!r:.40}")
            yield table


def _json_node(table: Mapping[str, Any]) -> ChakraNode:
    named: dict[str, Any] = {_KEYS.get(key, key): value for key, value in table.items()}
    kind = named.get("type", COMP)
    kind = NODE_TYPES[kind] if isinstance(kind, int) and 0 <= kind < len(NODE_TYPES) else str(kind)
    attrs = {str(each["name"]): _json_value(each) for each in named.get("attr", ())}
    attrs |= {key: value for key, value in named.items() if key not in _KNOWN}
    inputs, deps = named.get("inputs") or {}, tuple(int(dep) for dep in named.get("data_deps", ()))
    name, duration_us = str(named.get("name", "")), float(named.get("duration", 0))
    shapes, types = (str(inputs.get(each, "")) for each in ("shapes", "types"))
    return ChakraNode(int(str(named["id"])), name, kind, deps, duration_us, shapes, types, attrs)


def _json_value(attr: Mapping[str, Any]) -> Any:
    value = next((value for key, value in attr.items() if key not in ("name", "docString", "doc_string")), None)
    if not isinstance(value, str) or {"stringVal", "string_val"} & set(attr):
        return value
    return int(value) if re.fullmatch(r"-?\d{1,20}", value) else value  # protobuf prints 64 bits as text
