"""Events of one rank as columns: only the needed fields of a million events in a hundred megabytes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from stepsight.dataset.base.bounded import parsing
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.columns import Floats, Ints
from stepsight.dataset.traces import event_blocks
from stepsight.dataset.traces.classify import NAMES
from stepsight.dataset.traces.event_blocks import NO_TEXT, Event, args_of, parse

_MOST_US = 2.0**53  # clocks count microseconds since 1970 at most; larger floats skip values
_HOST, _RUNTIME, _DEVICE, _SYNC, _ANNOTATION = range(5)
_OTHER = "mtia"  # categories of accelerators whose events have another form
_NO_DIMS = (b"null", b"[]")
_COMMUNICATION = "record_param_comms"
_MARKS = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)")  # annotations that PyTorch 1.8 writes as operators
_CATEGORIES = {name: kind for kind, names in enumerate(NAMES["categories"].values()) for name in names.split()}


class Interned(dict[Any, int]):
    """Numbers of distinct values, in order of first use; a lookup of a new value assigns the next number."""

    def __missing__(self, thing: Any) -> int:
        if UNSET in (thing if isinstance(thing, tuple) else (thing,)):
            raise ValueError("no name or no tid")
        number = self[thing] = len(self)
        return number


@dataclass
class Table:
    """``n`` events of one category in order of start; microseconds."""

    start: Floats  # ``(n,)``
    end: Floats  # ``(n,)``
    columns: dict[str, Ints] = field(default_factory=dict)  # other numbers by name, each ``(n,)``

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, name: str) -> Ints:
        return self.columns[name]

    def take(self, rows: Any) -> Table:
        """Some rows of the table, in that order."""
        return Table(self.start[rows], self.end[rows], {name: column[rows] for name, column in self.columns.items()})

    def joined(self, other: Table) -> Table:
        """The events of both tables, in order."""
        columns = {name: np.concatenate([values, other[name]]) for name, values in self.columns.items()}
        found = Table(np.concatenate([self.start, other.start]), np.concatenate([self.end, other.end]), columns)
        return found.take(np.lexsort((-found.end, found.start)))


def picked(values: NDArray[Any], index: Ints, otherwise: Any) -> NDArray[Any]:
    """``values[index]``; ``otherwise`` where the index is -1, which stands for none."""
    return np.where(index >= 0, np.append(values, 0)[index], otherwise)


class _Rows:
    """A growing table: a start, a duration and other numbers for each event; ``order``: the rows, sorted by start."""

    def __init__(self, *names: str) -> None:
        self.names, self.parts = names, list[Floats]()
        self.count, self.order = 0, np.zeros(0, dtype=np.int64)

    def add(self, events: list[Event], *columns: list[Any]) -> None:
        """Add events, each with its number in every column."""
        times = ([event.ts for event in events], [event.dur for event in events])
        if UNSET in times[0]:
            raise ValueError("no ts")
        self.parts.append(np.array((*times, *columns), dtype=np.float64).T)
        self.count += len(events)

    def table(self, what: str, path: Path, warnings: list[str]) -> Table:
        """All events in order of start, outer ones first."""
        rows = np.concatenate([np.zeros((0, 2 + len(self.names))), *self.parts])
        start, length = rows[:, 0].copy(), rows[:, 1]
        _check_times(start, length, path)
        if negative := int((length < 0).sum()):
            warnings.append(f"negative durations: {negative} {what} events last less than nothing; they count as 0")
        numbers = np.clip(np.nan_to_num(rows[:, 2:]), -_MOST_US, _MOST_US).astype(np.int64)
        end = start + np.maximum(length, 0.0)
        self.order = np.lexsort((-end, start))
        return Table(start, end, dict(zip(self.names, numbers.T, strict=True))).take(self.order)


def _check_times(start: Floats, length: Floats, path: Path) -> None:
    wrong = np.flatnonzero(~((start >= 0) & (start <= _MOST_US) & (np.abs(length) <= _MOST_US)))
    if len(wrong):
        ts, dur = start[wrong[0]], length[wrong[0]]
        raise TraceError(f"ts and dur must lie within 0 and {_MOST_US:.0e} microseconds, got {ts}, {dur} in {path}")


@dataclass
class Annotation:
    """A named span of a host thread, or a recorded communication call; microseconds."""

    name: str
    start: float
    end: float
    thread: int
    args: dict[str, Any]


class RankEvents:
    """Events of one rank's file.

    Raises ``TraceError`` if the file is no whole Kineto trace, or an event lacks what every event has.

    Columns of ``ops``: ``name``, ``signature``, ``thread``, ``sequence`` (autograd's, -1: none), ``record`` (number of
    the function) and ``external`` (id); of ``runtime``: ``name``, ``thread``, ``correlation`` and ``external``; of
    ``device``: ``kernel`` (number of the launch), ``stream``, ``correlation``, ``external`` and ``bytes`` of a copy.

    Attributes:
        ops, runtime, device: Calls of host threads; calls of the device's runtime; kernels and copies.
        syncs: Arguments of ``cuda_sync`` events.
        annotations, comms: Annotations of users and libraries, and recorded communication calls, in order of start.
        collective_args: What a kernel says of the collective that it is, by row of ``device``.
        names: Names of ops and runtime calls.
        kernels: Of device events: category, name and the JSON text of grid, block, registers and shared memory.
        streams: Device and stream ids.
        header, warnings: Top-level keys of the file beside the events; what was found wrong and put right.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.num_events, self.syncs = path, 0, list[dict[str, Any]]()
        self.annotations, self.comms = list[Annotation](), list[Annotation]()
        self.collective_args: dict[int, dict[str, Any]] = {}
        self._ops = _Rows("name", "signature", "thread", "sequence", "record", "external")
        self._runtime = _Rows("name", "thread", "correlation", "external")
        self._device = _Rows("kernel", "stream", "correlation", "external", "bytes")
        self._names, self._signatures, self._kernels = Interned(), Interned(), Interned()
        self._threads, self._streams = Interned(), Interned()
        self._kinds, self._arguments = dict[Any, int](), dict[int, dict[str, Any]]()
        self._named: dict[int, str] = {}  # names of ops that are annotations or communication calls, by number
        complete, blocks = 0, event_blocks.EventBlocks(path)
        rule = "every event must be a table with ph, and a complete one with name, tid, ts and dur"
        with parsing(f"{rule}, got {path}", TraceError):
            for events in blocks:
                self.num_events += len(events)
                complete += self._add(events)
        if not complete:
            rule = "a Kineto trace must hold complete events (ph = X)"
            raise TraceError(f"{rule}, got none among {self.num_events} in {path}")
        self.header, self.warnings = blocks.header, list(blocks.warnings)
        tables = (("host", self._ops), ("runtime", self._runtime), ("device", self._device))
        self.ops, self.runtime, self.device = (rows.table(what, path, self.warnings) for what, rows in tables)
        order = np.argsort(self._device.order)
        self.collective_args = {int(order[row]): args for row, args in self.collective_args.items()}
        for marks in (self.annotations, self.comms):
            times = np.array([(each.start, each.end - each.start) for each in marks]).reshape(-1, 2)
            _check_times(times[:, 0], times[:, 1], path)
            marks.sort(key=lambda each: (each.start, -each.end))
        self.names, self.streams, self._texts = list(self._names), list(self._streams), list(self._signatures)
        self.kernels = [(str(category).lower(), name, _json(launch)) for category, name, launch in self._kernels]
        other = sorted(str(category) for category, kind in self._kinds.items() if kind < 0 and _OTHER in str(category))
        if not len(self.device) and (other or self.header.get("deviceProperties")):
            what = f"its events are of category {', '.join(other)[:80]}" if other else "it holds no kernels"
            self.warnings.append(f"the graph is that of the host: the trace names an accelerator, and {what}")
        del self._ops, self._runtime, self._device  # as much memory again

    def arguments(self, signature: int) -> dict[str, Any]:
        """Dims, types, strides and literals of calls with a signature, by the profiler's names; of -1, none."""
        if signature not in self._arguments:
            key = self._texts[signature] if signature >= 0 else 0
            values = () if isinstance(key, int) else parse(_json(key[1:]))
            named = zip(("Input Dims", "Input type", "Input Strides", "Concrete Inputs"), values, strict=False)
            self._arguments[signature] = {name: value for name, value in named if value is not None}
        return self._arguments[signature]

    def with_calls(self, prefixes: tuple[str, ...]) -> RankEvents:
        """The events with some annotations, by their beginnings, as framework calls; autograd's number is a part's."""
        marks = [each for each in self.annotations if each.name.startswith(prefixes)]
        if not marks:
            return self
        changed, ops, names = copy(self), self.ops, Interned({name: number for number, name in enumerate(self.names)})
        columns = {name: np.full(len(marks), -1) for name in ops.columns}
        start, end = (np.array([getattr(mark, name) for mark in marks]) for name in ("start", "end"))
        columns["name"] = np.array([names[mark.name] for mark in marks])
        columns["record"][:] = 0
        columns["signature"], columns["thread"] = -1 - columns["name"], np.array([mark.thread for mark in marks])
        for thread in np.unique(columns["thread"]):
            own, rows = columns["thread"] == thread, np.flatnonzero((ops["thread"] == thread) & (ops["sequence"] >= 0))
            rows = np.append(rows, -1)[np.searchsorted(ops.start[rows], start[own])]
            inside = picked(ops.start, rows, np.inf) < end[own]
            columns["sequence"][own] = np.where(inside, picked(ops["sequence"], rows, -1), -1)
        changed.ops, changed.names = ops.joined(Table(start, end, columns)), list(names)
        changed.annotations = [each for each in self.annotations if not each.name.startswith(prefixes)]
        return changed

    def _add(self, events: list[Event]) -> int:
        """Add the events of a block, by category; return how many are complete."""
        kinds, sorted_out = self._kinds, [list[Event]() for _ in range(6)]
        add = [each.append for each in sorted_out]
        for event in events:
            if event.ph == "X" and event.dur is not UNSET:
                kind = kinds.get(event.cat)
                if kind is None:
                    kind = kinds[event.cat] = _CATEGORIES.get(str(event.cat).lower(), -1)
                add[kind](event)
        self._add_ops(sorted_out[_HOST])
        args, threads = args_of(event_blocks.CallArgs, runtime := sorted_out[_RUNTIME]), self._threads
        thread = [threads[event.pid, event.tid] for event in runtime]
        self._runtime.add(runtime, self._numbers(runtime), thread, *_listed(args, "correlation", "external"))
        self._add_kernels(sorted_out[_DEVICE])
        self.syncs += [event.table() for event in sorted_out[_SYNC]]
        self.annotations += [self._stretch(event) for event in sorted_out[_ANNOTATION]]
        return sum(map(len, sorted_out))

    def _add_ops(self, events: list[Event]) -> None:
        signatures, threads = self._signatures, self._threads
        numbers = self._numbers(events)
        if self._named and not self._named.keys().isdisjoint(numbers):
            kept = []  # annotations are no ops; communication calls are, and are stored too
            for row, number in enumerate(numbers):
                name = self._named.get(number)
                if name is not None:
                    (self.comms if name == _COMMUNICATION else self.annotations).append(self._stretch(events[row]))
                if name in (None, _COMMUNICATION):
                    kept.append(row)
            events, numbers = [events[row] for row in kept], [numbers[row] for row in kept]
        args = args_of(event_blocks.OpArgs, events)
        signature = [
            signatures[number]
            if each.dims is NO_TEXT and each.dims_1_8 is NO_TEXT
            else signatures[(number, *_sizes(each))]
            for number, each in zip(numbers, args, strict=True)
        ]
        thread = [threads[event.pid, event.tid] for event in events]
        self._ops.add(events, numbers, signature, thread, *_listed(args, "sequence", "record", "external"))

    def _numbers(self, events: list[Event]) -> list[int]:
        """Numbers of the events' names."""
        names, before = self._names, len(self._names)
        numbers = [names[event.name] for event in events]
        for number, name in enumerate(islice(names, before, None), before):
            if name.startswith((_COMMUNICATION, *_MARKS)):
                self._named[number] = name
        return numbers

    def _add_kernels(self, events: list[Event]) -> None:
        args, kernels, streams = args_of(event_blocks.KernelArgs, events), self._kernels, self._streams
        kernel, stream = list[int](), list[int]()
        for event, each in zip(events, args, strict=True):
            if each.collective is not NO_TEXT:
                self.collective_args[self._device.count + len(kernel)] = event.table()
            launch = (bytes(each.grid), bytes(each.block), bytes(each.registers), bytes(each.shared_bytes))
            kernel.append(kernels[event.cat, event.name, launch])
            device = event.pid if each.device is UNSET else each.device
            stream.append(streams[device, event.tid if each.stream is UNSET else each.stream])
        self._device.add(events, kernel, stream, *_listed(args, "correlation", "external", "num_bytes"))

    def _stretch(self, event: Event) -> Annotation:
        if event.ts is UNSET or event.dur is UNSET:
            raise ValueError("no ts")
        end = float(event.ts) + max(float(event.dur), 0.0)
        return Annotation(str(event.name), float(event.ts), end, self._threads[event.pid, event.tid], event.table())


def _listed(args: Sequence[Any], *names: str) -> list[list[Any]]:
    return [list(map(attrgetter(name), args)) for name in names]


def _sizes(args: event_blocks.OpArgs) -> tuple[bytes, ...]:
    """Dims, types, strides and literals as JSON text; nothing without dims."""
    dims = next((text for text in (bytes(args.dims), bytes(args.dims_1_8)) if text not in _NO_DIMS), None)
    return () if dims is None else (dims, bytes(args.types), bytes(args.strides), bytes(args.literals))


def _json(parts: tuple[bytes, ...]) -> bytes:
    return b"[" + b",".join(parts) + b"]"
