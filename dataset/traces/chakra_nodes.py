"""Nodes of a Chakra execution trace (MLCommons): protobuf (``.et``) or JSON.

The protobuf form is a sequence of messages, each after its length: one ``GlobalMetadata``, then ``Node`` after ``Node``
(``schema/protobuf/et_def.proto`` of mlcommons/chakra).  The JSON forms are a table with ``workload_graph``, and nodes
one after the other as protobuf prints them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepsight.dataset.base.bounded import read_unpacked, read_varint
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.traces.classify import NAMES

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
            raise ValueError(
                f"the type of node {self.id} must be one of {', '.join(NODE_TYPES)}, got {self.type!r:.40}"
            )


def read_nodes(path: Path) -> list[ChakraNode]:
    """Read the nodes of one rank's trace."""
    try:
        data = read_unpacked(path)
    except (OSError, ValueError) as error:
        raise TraceError(f"a Chakra trace must be readable, got {path}: {error}") from None
    try:
        nodes = list(_json_nodes(data) if data.lstrip()[:1] in (b"{", b"[") else _wire_nodes(data))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise TraceError(f"{path} must be a whole Chakra execution trace (protobuf or JSON): {error}") from None
    seen: set[int] = set()
    for node in nodes:
        if node.id in seen:
            raise TraceError(f"every node of a Chakra trace must have an id of its own, got {node.id} twice in {path}")
        seen.add(node.id)
    if not nodes:
        raise TraceError(f"a Chakra trace must hold nodes, got none in {path}")
    return nodes


def _wire_nodes(data: bytes) -> Iterator[ChakraNode]:
    at, messages = 0, []
    while at < len(data):
        message, at = _bytes(data, at)
        messages.append(message)
    return map(_wire_node, messages[1:])


def _wire_node(message: bytes) -> ChakraNode:
    node: dict[str, Any] = {"id": 0, "attrs": {}}
    deps: list[int] = []
    for number, value in _fields(message):
        if isinstance(value, int) != (number in (1, 3, 7)) and number in (1, 2, 3, 7, 8, 10):
            raise ValueError(f"field {number} of a node must be of another type, got {value!r:.40}")
        if isinstance(value, int):
            if number in (1, 7):
                node["id" if number == 1 else "duration_us"] = value
            elif number == 3:
                node["type"] = NODE_TYPES[value] if value < len(NODE_TYPES) else str(value)
            elif number == 5:
                deps.append(value)
        elif number == 2:
            node["name"] = _text(value)
        elif number == 5:
            at = 0
            while at < len(value):
                dep, at = read_varint(value, at)
                deps.append(dep)
        elif number == 8:
            told = dict(_fields(value))
            node["shapes"], node["types"] = (_text(told.get(place, b"")) for place in (2, 3))
        elif number == 10:
            attr = dict(_fields(value))
            node["attrs"][_text(attr.pop(1, b""))] = _wire_value(attr)
    return ChakraNode(data_deps=tuple(deps), **node)


def _wire_value(attr: Mapping[int, int | bytes]) -> Any:
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


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        value: int | bytes
        if key & 7 == 0:
            value, at = read_varint(message, at)
        elif key & 7 in (1, 2, 5):
            value, at = _bytes(message, at, {1: 8, 5: 4}.get(key & 7))
        else:
            raise ValueError(f"a field must be of wire type 0, 1, 2 or 5, got {key & 7}")
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
    inputs = named.get("inputs") or {}
    return ChakraNode(
        int(str(named["id"])),
        str(named.get("name", "")),
        kind,
        tuple(int(dep) for dep in named.get("data_deps", ())),
        float(named.get("duration", 0)),
        str(inputs.get("shapes", "")),
        str(inputs.get("types", "")),
        attrs,
    )


def _json_value(attr: Mapping[str, Any]) -> Any:
    value = next((value for key, value in attr.items() if key not in ("name", "docString", "doc_string")), None)
    if not isinstance(value, str) or {"stringVal", "string_val"} & set(attr):
        return value
    return int(value) if re.fullmatch(r"-?\d{1,20}", value) else value  # protobuf prints 64 bits as text
