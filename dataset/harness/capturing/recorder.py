"""The record of one rank: ops, collectives and waits in the order of issue, and their dependencies.

A *node* is an op, a collective, or a wait of the host.  Streams and events follow CUDA's rules: a node starts after
the node before it on its stream, and after what its stream was told to wait for.  Edges say that, and name the node
that wrote what an op reads where stream order or a wait covers it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..ops.callables import TYPES

OP, COLLECTIVE, HOST = range(3)
COMPUTE = "compute"
DATA, LAUNCH, SYNCHRONISATION = "data", "launch", "synchronisation"

Clock = dict[str, int]  # newest finished node of each stream
Mark = tuple[Clock, list[int]]  # state of an event: the finished nodes, and its dependencies


class Recorder:
    """Records nodes while ``active``; the memory of storages is always tracked."""

    def __init__(self) -> None:
        self.active = False
        self.stream = COMPUTE
        self.works: dict[Any, int] = {}
        self.names: dict[str, int] = {}
        self.nodes: list[tuple[int, ...]] = []  # kind, work, stream, phase, name, evaluation, sequence, seq of group
        self.edges: dict[tuple[int, int], str] = {}
        self.streams: dict[str, int] = {COMPUTE: 0}
        self.live_bytes: list[int] = []
        self.notes: dict[str, None] = {}
        self.stream_names = (f"stream {number}" for number in itertools.count(1))  # of those that the script makes
        self._known = defaultdict[str, Clock](dict)
        self._pending = defaultdict[str, list[int]](list)
        self._last: Clock = {}
        self._host = -1  # newest wait of the host
        self._launched: Clock = {}  # newest wait of the host that each stream is known to come after
        self._storages: dict[int, _Storage] = {}
        self._bytes = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing within a block."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    def work(self, key: Any) -> int:
        """Index of a distinct work."""
        return self.works.setdefault(key, len(self.works))

    def add(
        self, what: tuple[int, int, int, str], reads: Iterable[Any], writes: Iterable[Any], scope: tuple[int, int, int]
    ) -> int:
        """Write a node down on the current stream; reads and writes are untyped storages.

        ``what``: kind, its work and its number in its group (-1: none), name.  ``scope``: phase, evaluation of autograd
        (-1: forward), sequence number of autograd.
        """
        index, stream = len(self.nodes), self.stream
        known = self._known[stream]
        for before in self._pending.pop(stream, ()):
            self.edges.setdefault((before, index), SYNCHRONISATION)
        if self._host > self._launched.get(stream, -1):
            self.edges.setdefault((self._host, index), LAUNCH)
            self._launched[stream] = self._host
        for writer in (self.follow(storage).writer for storage in reads):
            if writer < 0:
                continue
            of = self._stream_of(writer)
            if known.get(of, -1) >= writer:
                self.edges.setdefault((writer, index), DATA)
            elif self.nodes[writer][0] == COLLECTIVE:  # waited for where Python does not see it, as DDP's reducer does
                self.edges.setdefault((writer, index), SYNCHRONISATION)
                known[of] = writer
        for storage in writes:
            self.follow(storage).writer = index
        self._append(stream, what, scope)
        self._last[stream] = known[stream] = index
        return index

    def _append(self, stream: str, what: tuple[int, int, int, str], scope: tuple[int, int, int]) -> None:
        (kind, work, seq, name), (phase, evaluation, sequence) = what, scope
        place, number = self.streams.setdefault(stream, len(self.streams)), self.names.setdefault(name, len(self.names))
        self.nodes.append((kind, work, place, phase, number, evaluation, sequence, seq))
        self.live_bytes.append(self._bytes)

    def wait_on_host(self, stream: str | None, name: str, phase: int) -> None:
        """Let the host wait for one stream, or for all."""
        if not self.active:
            return
        index = len(self.nodes)
        for each in self.streams if stream is None else (stream,):
            self.edges |= {(before, index): SYNCHRONISATION for before in self._reached(each)}
        if self._host >= 0:
            self.edges.setdefault((self._host, index), "host_order")
        self._append("host", (HOST, -1, -1, name), (phase, -1, -1))
        self._host = index

    def _reached(self, stream: str) -> list[int]:
        """Nodes after which what a stream has been given is over."""
        return [*self._pending[stream], *([self._last[stream]] if stream in self._last else [])]

    def mark(self, stream: str) -> Mark:
        """Where a stream is now: what an event on it keeps."""
        return dict(self._known[stream]), self._reached(stream)

    def wait(self, stream: str, mark: Mark) -> None:
        """Let a stream wait for what an event keeps."""
        clock, nodes = mark
        known, pending = self._known[stream], self._pending[stream]
        pending += [each for each in nodes if known.get(self._stream_of(each), -1) < each and each not in pending]
        for other, node in clock.items():
            known[other] = max(known.get(other, -1), node)

    def note(self, text: str) -> None:
        """Say once what the user should know."""
        self.notes.setdefault(text)

    def resized(self, storage: Any) -> None:
        """Count a storage's memory anew."""
        found, size = self.follow(storage), storage.nbytes()
        self._bytes, found.num_bytes = self._bytes + size - found.num_bytes, size

    def follow(self, storage: Any) -> _Storage:
        """Count the memory of a storage while it is alive."""
        key = storage._cdata
        found = self._storages.get(key)
        if found is None:
            alive = weakref.ref(storage, lambda _: self._forget(key))
            found = self._storages[key] = _Storage(storage.nbytes(), alive)
            self._bytes += found.num_bytes
        return found

    def _forget(self, key: int) -> None:
        if gone := self._storages.pop(key, None):
            self._bytes -= gone.num_bytes

    def _stream_of(self, node: int) -> str:
        return list(self.streams)[self.nodes[node][2]]


@dataclass(slots=True)
class _Storage:
    """A storage that is alive: its bytes, and the node that wrote it last."""

    num_bytes: int
    alive: weakref.ref[Any]
    writer: int = -1


def storage_of(tensor: torch.Tensor) -> Any:
    """The untyped storage of a tensor; of a sparse one, that of its values."""
    return (tensor._values() if tensor.layout is torch.sparse_coo else tensor).untyped_storage()


_NAMES = {dtype: name for name, dtype in TYPES.items()}  # the profiler's

COMPOSITE = "stepsight::op"  # then kind, dims and type of an op
Signature = tuple[Any, ...]  # name, dims, types, strides, literals; dims, type and number of the outputs


def signature_of(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> Signature:
    """Signature of a call: equal calls have equal ones."""
    rows: list[tuple[Any, ...]] = []
    given = [t for t in (*outputs, *args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    touched = {t.shape: t._values() for t in given if t.layout is torch.sparse_coo}  # dense ones have these rows used
    for place, (name, default) in enumerate(_arguments(func)):
        value = args[place] if place < len(args) else kwargs.get(name, default)
        if isinstance(value, torch.Tensor):
            value = touched.get(value.shape, value)
            rows.append((tuple(value.shape), _NAMES.get(value.dtype, "float"), value.stride(), ""))
        elif isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            kind = f"TensorList {_NAMES.get(value[0].dtype, 'float')}"
            rows.append((tuple(tuple(t.shape) for t in value), kind, (), ""))
        else:
            rows.append(((), "Scalar", (), "" if value is None else str(value)))
    made: tuple[Any, ...] = ()
    if outputs:
        first = touched.get(outputs[0].shape, outputs[0])
        made = tuple(first.shape), _NAMES.get(first.dtype, "float"), len(outputs)
    return func._schema.name, *(zip(*rows, strict=True) if rows else ((),) * 4), made


@lru_cache(4096)
def _arguments(func: Any) -> tuple[tuple[str, Any], ...]:
    """Names and defaults: the dispatcher leaves out what is as by default."""
    return tuple((argument.name, argument.default_value) for argument in func._schema.arguments)
