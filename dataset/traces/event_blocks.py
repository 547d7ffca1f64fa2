"""Read Kineto files as lists of events, one block of the file at a time.

A trace of a gigabyte becomes several gigabytes of objects if it is parsed whole.  Its events are one long list, so
the text can be cut between any two of them: a block that begins at an event and is whole JSON ends at one too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, field

from stepsight.dataset.base.bounded import reason, unpacked_blocks
from stepsight.dataset.base.errors import TraceError

BLOCK = 2**20  # bytes that are parsed at once
_MOST_HEADER = 64 * 2**20  # bytes before the first event
_BOM = b"\xef\xbb\xbf"  # with which some editors start a text
_ARCHIVES = (("tar", 257, b"ustar"), ("zip", 0, b"PK\x03\x04"))  # kind, where its sign is, the sign
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_WINDOW = 2**16  # bytes at the end of a block in which an event ends
_MOST_CUTS = 16  # attempts before more is read


def is_trace(path: Path) -> bool:
    """Whether a file looks like a Kineto trace: its first block names the list of events, or is one."""
    if not path.name.endswith((".json", ".json.gz")):
        return False
    try:
        text = next(iter(unpacked_blocks(path, BLOCK)), b"")
    except OSError:
        return False
    return _BEGIN.search(text) is not None or (text.lstrip()[:1] == b"[" and b'"ph"' in text)


class EventBlocks:
    """The events of one file in blocks.

    After all were read, ``header`` has the top-level keys beside the events, and ``warnings`` what was put right.
    """

    def __init__(self, path: Path, block: int = BLOCK) -> None:
        self.header: dict[str, Any] = {}
        self.warnings: list[str] = []
        self._path, self._block = path, block

    def __iter__(self) -> Iterator[list[Event]]:
        """Yield lists of events."""
        parts = unpacked_blocks(self._path, self._block)
        try:
            text, listed = self._first(parts)
            for part in parts:
                text += part
                if len(text) >= self._block:
                    events, text = self._cut(text)
                    if events:
                        yield events
        except OSError as error:
            raise TraceError(f"a trace must be a readable file, got {self._path} ({error.strerror})") from None
        events, text = self._cut(text)  # the last event is parsed together with the keys after it
        yield events
        tree = self._parse((b"[" if listed else b'{"traceEvents":[') + text)
        last = tree if listed else tree.pop("traceEvents", None)
        if not isinstance(last, list):
            raise TraceError(f"a Kineto trace must hold a list traceEvents, got {type(last).__name__} in {self._path}")
        if not listed:
            self.header.update(tree)
        yield events_of(msgspec.json.encode(last))

    def _first(self, parts: Iterator[bytes]) -> tuple[bytes, bool]:
        """Text from the first event on, and whether the file is a bare list of events."""
        text = b""
        for part in parts:
            text = (text + part).removeprefix(_BOM)
            for kind, begin, sign in _ARCHIVES:
                if text[begin:].startswith(sign):
                    rule = f"{self._path} must be the trace of one rank, got a {kind} archive"
                    raise TraceError(f"{rule}: unpack it and import the traces that it holds")
            start = text.lstrip()[:1]
            if start == b"[":
                return text.lstrip()[1:], True
            if start == b"{" and (found := _BEGIN.search(text)):
                self.header = self._parse(text[: found.end()] + b"]}")
                self.header.pop("traceEvents", None)
                return text[found.end() :], False
            if len(text) > _MOST_HEADER:
                break
        if not text.strip():
            raise TraceError(f"a trace must hold JSON, got an empty file {self._path}")
        tree = self._parse(text)
        if isinstance(tree, dict) and "traceEvents" in tree:
            tree = tree["traceEvents"]
        keys = f"keys {', '.join(sorted(map(str, tree))[:8])}" if isinstance(tree, dict) else type(tree).__name__
        raise TraceError(f"a Kineto trace must hold a list traceEvents, got {keys} in {self._path}")

    def _cut(self, text: bytes) -> tuple[list[Event], bytes]:
        """Events up to the last complete one, and the text after it."""
        ends = [found.start() + 1 for found in _BETWEEN.finditer(text, max(len(text) - _WINDOW, 0))]
        for cut, mended in [
            *((cut, False) for cut in ends[: -_MOST_CUTS - 1 : -1]),
            *((cut, True) for cut in ends[-1:]),
        ]:
            whole = b"[" + text[:cut] + b"]"
            try:
                events = events_of(strict(whole) if mended else whole)
            except (ValueError, RecursionError):
                continue
            self._warn(mended)
            return events, text[text.index(b",", cut) + 1 :]
        return [], text

    def _parse(self, text: bytes) -> Any:
        with suppress(ValueError):
            return parse(text)
        try:
            tree = parse(strict(text))
        except RecursionError as error:
            raise TraceError(f"{self._path} must be events: {reason(error)}") from None
        except ValueError:
            rule = f"{self._path} must be whole JSON"
            raise TraceError(f"{rule}: it is truncated or corrupt, profile again or copy it anew") from None
        self._warn(True)
        return tree

    def _warn(self, mended: bool) -> None:
        if mended and not self.warnings:
            why = "NaN, control characters or bytes that are not UTF-8"
            self.warnings.append(f"the file is not strict JSON ({why}): read all the same")


NO_TEXT = Raw(b"null")


class Event(msgspec.Struct, gc=False):
    """Common fields of all events; microseconds."""

    ph: Any
    name: Any = UNSET
    cat: Any = None
    ts: Any = UNSET
    dur: Any = UNSET
    pid: Any = None
    tid: Any = UNSET
    args: Raw = NO_TEXT

    def table(self) -> dict[str, Any]:
        """All fields of ``args``."""
        return dict(parse(self.args) or {})


class OpArgs(msgspec.Struct, gc=False):
    """Fields of a framework call: sizes as JSON text, and its numbers."""

    dims: Raw = field(name="Input Dims", default=NO_TEXT)
    dims_1_8: Raw = field(name="Input dims", default=NO_TEXT)  # as PyTorch 1.8 writes it
    types: Raw = field(name="Input type", default=NO_TEXT)
    strides: Raw = field(name="Input Strides", default=NO_TEXT)
    literals: Raw = field(name="Concrete Inputs", default=NO_TEXT)
    sequence: Any = field(name="Sequence number", default=-1)
    record: Any = field(name="Record function id", default=0)
    external: Any = field(name="External id", default=-1)


class CallArgs(msgspec.Struct, gc=False):
    """Fields of a call of the device's runtime."""

    correlation: Any = -1
    external: Any = field(name="External id", default=-1)


class KernelArgs(msgspec.Struct, gc=False):
    """Fields of a kernel or a copy; its launch as JSON text."""

    correlation: Any = -1
    external: Any = field(name="External id", default=-1)
    num_bytes: Any = field(name="bytes", default=-1)
    device: Any = UNSET
    stream: Any = UNSET
    grid: Raw = NO_TEXT
    block: Raw = NO_TEXT
    registers: Raw = field(name="registers per thread", default=NO_TEXT)
    shared_bytes: Raw = field(name="shared memory", default=NO_TEXT)
    collective: Raw = field(name="Collective name", default=NO_TEXT)


Args = TypeVar("Args", OpArgs, CallArgs, KernelArgs)

_EVENTS = msgspec.json.Decoder(list[Event])
_ARGS: dict[type, Any] = {kind: msgspec.json.Decoder(list[kind]) for kind in (OpArgs, CallArgs, KernelArgs)}  # type: ignore[valid-type]


def events_of(text: bytes) -> list[Event]:
    """Events of a JSON list."""
    try:
        return _EVENTS.decode(text)
    except msgspec.ValidationError as error:
        raise TypeError(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def args_of(kind: type[Args], events: Sequence[Event]) -> list[Args]:
    """Arguments of events of one category, as structures of one type; defaults for what is no table."""
    texts = [event.args if event.args is not NO_TEXT else b"{}" for event in events]
    try:
        return list(_ARGS[kind].decode(b"[" + b",".join(texts) + b"]"))
    except msgspec.ValidationError:
        tables = (text if bytes(text)[:1] == b"{" else b"{}" for text in texts)
        return list(_ARGS[kind].decode(b"[" + b",".join(tables) + b"]"))


def parse(text: bytes | Raw) -> Any:
    """Parse strict JSON to Python's values."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def strict(text: bytes) -> bytes:
    """Strict JSON of what Python parses: NaN becomes null, broken characters are replaced."""
    found = json.loads(text.decode("utf-8", "replace"), strict=False, parse_constant=lambda _: None)
    return json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
