"""Events of Kineto files as typed structures: only the needed fields of the JSON are parsed.

A block of events is decoded in two passes.  The first reads what every event has and keeps ``args`` as text; the second
reads of ``args`` what the category needs.  No dictionary is made of an event, unless a field is of an unusual type.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType, field

NOTHING = Raw(b"{}")
NO_TEXT = Raw(b"null")
Whole = int | None


class Event(msgspec.Struct, gc=False):
    """Common fields of all events; microseconds."""

    ph: str
    name: str | UnsetType = UNSET
    cat: str | None = None
    ts: float | UnsetType = UNSET
    dur: float | UnsetType = UNSET
    pid: int | str | None = None
    tid: int | str | UnsetType = UNSET
    args: Raw = NOTHING

    def table(self) -> dict[str, Any]:
        """All fields of ``args``."""
        return table_of(self.args)


class OpArgs(msgspec.Struct, gc=False):
    """Fields of a framework call: sizes as JSON text, and its numbers."""

    dims: Raw = field(name="Input Dims", default=NO_TEXT)
    dims_1_8: Raw = field(name="Input dims", default=NO_TEXT)  # as PyTorch 1.8 writes it
    types: Raw = field(name="Input type", default=NO_TEXT)
    strides: Raw = field(name="Input Strides", default=NO_TEXT)
    literals: Raw = field(name="Concrete Inputs", default=NO_TEXT)
    sequence: Whole = field(name="Sequence number", default=-1)
    record: Whole = field(name="Record function id", default=0)
    external: Whole = field(name="External id", default=-1)


class CallArgs(msgspec.Struct, gc=False):
    """Fields of a call of the device's runtime."""

    correlation: Whole = -1
    external: Whole = field(name="External id", default=-1)


class KernelArgs(msgspec.Struct, gc=False):
    """Fields of a kernel or a copy; its launch as JSON text."""

    correlation: Whole = -1
    external: Whole = field(name="External id", default=-1)
    num_bytes: Whole = field(name="bytes", default=-1)
    device: int | str | UnsetType | None = UNSET
    stream: int | str | UnsetType | None = UNSET
    grid: Raw = NO_TEXT
    block: Raw = NO_TEXT
    registers: Raw = field(name="registers per thread", default=NO_TEXT)
    shared_bytes: Raw = field(name="shared memory", default=NO_TEXT)
    collective: Raw = field(name="Collective name", default=NO_TEXT)


Args = TypeVar("Args", OpArgs, CallArgs, KernelArgs)

_EVENTS = msgspec.json.Decoder(list[Event])
_ARGS: dict[type, Any] = {kind: msgspec.json.Decoder(list[kind]) for kind in (OpArgs, CallArgs, KernelArgs)}  # type: ignore[valid-type]


def events_of(text: bytes) -> list[Event]:
    """Events of a JSON list.

    Raises:
        ValueError: If the text is no JSON.
        KeyError, TypeError, AttributeError: If an event is no table with ``ph``.
    """
    try:
        return list(_EVENTS.decode(text))
    except (msgspec.DecodeError, RecursionError):
        return [event_of(table) for table in parse(text)]


def event_of(table: dict[str, Any]) -> Event:
    """An event of a parsed table, with fields of any type."""
    given = {name: table[name] for name in Event.__struct_fields__ if name in table}
    given["args"] = Raw(json.dumps(table.get("args") or {}).encode())
    return Event(**{"ph": table["ph"], **given})


def args_of(kind: type[Args], events: Sequence[Event]) -> list[Args]:
    """Arguments of events of one category, as structures of one type."""
    try:
        return list(_ARGS[kind].decode(b"[" + b",".join([event.args for event in events]) + b"]"))
    except (msgspec.DecodeError, RecursionError):
        return [_filled(kind, event.table()) for event in events]


def _filled(kind: type[Args], table: dict[str, Any]) -> Args:
    given: dict[str, Any] = {}
    for info in msgspec.structs.fields(kind):
        if info.encode_name in table:
            value = table[info.encode_name]
            given[info.name] = Raw(json.dumps(value).encode()) if info.type is Raw else value
    return kind(**given)


def table_of(text: bytes | Raw) -> dict[str, Any]:
    """A JSON table; empty for a missing one."""
    try:
        found = parse(text)
    except ValueError:
        found = tolerant(bytes(text))
    return dict(found or {})


def parse(text: bytes | Raw) -> Any:
    """Parse strict JSON to Python's values.

    Raises:
        ValueError: If it is none.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def tolerant(text: bytes) -> Any:
    """Parse JSON as Python does: with NaN, control characters in names and bytes that are not UTF-8."""
    return json.loads(text.decode("utf-8", "replace"), strict=False)
