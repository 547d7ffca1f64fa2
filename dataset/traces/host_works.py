"""Ops and communication calls of a host that computes: one pass over its calls in order of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.rank_trace import Rendezvous
from stepsight.dataset.kinds import c10d_calls
from stepsight.dataset.kinds.call_dims import count
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.traces.classify import (
    ELEMENT_BYTES,
    Scope,
    annotated_op,
    call_table,
    classify,
    classify_unknown,
    parse_annotation,
)
from stepsight.dataset.traces.event_columns import Annotation, RankEvents


def _aten_names(words: str) -> frozenset[str]:
    return frozenset(f"aten::{word}" for word in words.split())


# Calls that move nothing: metadata, allocation, bookkeeping.  Their time is host gap.
_WEIGHTLESS = _aten_names(
    "view reshape _reshape_alias transpose t permute as_strided slice select narrow expand expand_as squeeze "
    "unsqueeze detach alias empty empty_like empty_strided new_empty new_empty_strided resize_ resize_as_ "
    "resolve_conj resolve_neg split split_with_sizes chunk unbind unflatten flatten view_as unsafe_split "
    "unsafe_chunk numpy_T mT contiguous set_ set_data record_stream lift_fresh result_type is_nonzero item "
    "_local_scalar_dense size stride data_ptr is_pinned swapaxes movedim _unsafe_view view_as_real "
    "view_as_complex real diagonal to_dense _has_compatible_shallow_copy_type unfold broadcast_tensors "
    "broadcast_to detach_ squeeze_ unsqueeze_ transpose_ t_ as_strided_ swapaxes_"
) | {"detach", "detach_", "view", "slice", "torch::autograd::AccumulateGrad", "torch::autograd::GraphRoot", "aten::T"}
# Runtime calls that put something on a device; all others are the host's own.
_LAUNCHES = ("Launch", "Memcpy", "Memset", "EventRecord", "WaitEvent")
_EVALUATE = "autograd::engine::evaluate_function: "
_OURS = "stepsight::"
# Wrappers that are no work of their own even where nothing within them is.
_WRAPPERS = _aten_names(
    "to linear matmul layer_norm scaled_dot_product_attention zeros ones full zeros_like ones_like full_like "
    "new_zeros new_full type_as dropout lift requires_grad_ _fused_sdp_choice is_same_size pin_memory "
    "_pin_memory _nested_tensor_size conj conj_physical"
)
_BOOKKEEPING = ("autograd::", "torch::", "c10d::", "profiler::", "gloo:", "nccl:", "torch.distributed", "record_param")
_ANNOTATION, _OP, _COMMUNICATION = range(3)


@dataclass(slots=True)
class Work:
    """One op or collective while it is being read; microseconds.

    Attributes:
        work: Signature.
        name: Call it comes from.
        issue: When the host came to it.
        start: When it began.
        end: When it ended.
        own: Time within it that is its own.
        stream: Host thread or group.
        known: False for a call of no known kind.
        meets: Of a collective.
        recorded: Calls that a profiler recorded within it, itself included.
    """

    work: Op | Collective
    name: str
    issue: float
    start: float
    end: float
    own: float
    stream: Any
    known: bool = True
    meets: Rendezvous | None = None
    recorded: int = 1


@dataclass(slots=True)
class Call:
    """An annotated or recorded communication call on the host."""

    values: dict[str, Any]
    start: float
    end: float


@dataclass(slots=True)
class _Thread:
    """What is running on a host thread while its calls are read."""

    node: Work | None = None  # classified call
    node_end: float = -1.0
    maybe: Work | None = None  # call of no known kind
    maybe_end: float = -1.0
    last: Work | None = None
    scope: Scope = field(default_factory=Scope)
    scope_end: float = -1.0
    call: Call | None = None
    call_end: float = -1.0
    c10d_end: float = -1.0
    top: list[tuple[float, float]] = field(default_factory=list)
    top_end: float = -1.0


class HostWorks:
    """What one pass over a host's calls finds; microseconds.

    Attributes:
        ops: By order of start.
        calls: ``stepsight::collective`` annotations, and c10d calls that no annotation encloses.
        waits: ``stepsight::wait`` annotations.
        workers: ``gloo:*`` spans: kind, start, end.
        main: The thread of the segments, or that with the most calls; None without any call.
        top: Outermost calls of that thread, ``(start, end)``.

    Raises:
        ValueError: If one of our own annotations is malformed.
    """

    def __init__(self, events: RankEvents) -> None:
        self.ops: list[Work] = []
        self.calls: list[Call] = []
        self.waits: list[Call] = []
        self.workers: list[tuple[str, float, float]] = []
        self._worker_threads: set[int] = set()
        self.main: int | None = None
        self._events, self._known, self._communication = events, call_table(), c10d_calls()
        self._names, self._signatures, self._sequence = (
            events.ops[name].tolist() for name in ("name", "signature", "sequence")
        )
        self._forward_dims: dict[int, tuple[int, ...]] = {}  # of each forward product, by its sequence number
        threads: dict[int, _Thread] = {}
        self._read(threads)
        if self.main is None:
            self.main = max(
                (tid for tid in threads if threads[tid].top), key=lambda tid: len(threads[tid].top), default=None
            )
        self.top = threads[self.main].top if self.main in threads else []
        self.ops.sort(key=lambda node: node.start)
        self._name_threads()

    def _name_threads(self) -> None:
        """Name the streams of ops after their threads; what gloo's workers copy is part of their collectives."""
        names = {self.main: "compute"}
        self.ops = [work for work in self.ops if work.stream == self.main or work.stream not in self._worker_threads]
        for work in self.ops:
            work.stream = names.setdefault(work.stream, f"host{len(names)}")

    def _read(self, threads: dict[int, _Thread]) -> None:
        for kind, row, start, end, tid in _in_order(self._events):
            thread = threads.get(tid)
            if thread is None:
                thread = threads[tid] = _Thread()
            if kind == _ANNOTATION:
                self._annotation(thread, self._events.annotations[row], tid)
                continue
            if start >= thread.top_end:
                thread.top.append((start, end))
                thread.top_end = end
            if thread.node is not None and start < thread.node_end:
                thread.node.recorded += 1
            elif kind == _OP and start >= thread.c10d_end:
                self._op(thread, row, start, end, tid)
        for thread in threads.values():
            self._commit(thread)

    def _op(self, thread: _Thread, row: int, start: float, end: float, tid: int) -> None:
        """Add a framework call that lies within no known op."""
        name, sequence = self._events.names[self._names[row]], self._sequence[row]
        if name in self._known:
            scope = thread.scope if start < thread.scope_end and sequence < 0 else Scope()
            before = thread.last.work if thread.last is not None else None
            op = classify(name, self._arguments(row), scope, before.dtype if isinstance(before, Op) else "fp32")
            if op is None:
                return
            if op.kind == "linear" and sequence >= 0:
                self._forward_dims[sequence] = op.dims
            self._add(thread, Work(op, name, start, start, end, end - start, tid))
        elif name.startswith(_EVALUATE):
            thread.scope = Scope(name[len(_EVALUATE) :], self._forward_dims.get(sequence, ()))
            thread.scope_end = end
        elif name in self._communication:
            self.calls.append(_c10d_call(name, self._arguments(row), start, end))
            thread.c10d_end = end
        elif start >= thread.maybe_end and _may_be_work(name):
            self._commit(thread)
            op = classify_unknown(self._arguments(row))
            if op is not None:
                thread.maybe = Work(op, name, start, start, end, end - start, tid, known=False)
                thread.maybe_end = end

    def _arguments(self, row: int) -> dict[str, Any]:
        return self._events.arguments(self._signatures[row])

    def _add(self, thread: _Thread, node: Work) -> None:
        if node.start < thread.maybe_end:
            thread.maybe = None
        self._commit(thread)
        last = thread.last
        if last is not None and isinstance(node.work, Op) and node.work.record.in_parts and last.work == node.work:
            last.end, last.own, last.recorded = node.end, last.own + node.own, last.recorded + 1
            node = last
        else:
            self.ops.append(node)
        thread.node, thread.node_end, thread.last = node, node.end, node

    def _commit(self, thread: _Thread) -> None:
        """Nothing known was found within the call of no known kind: it is work itself."""
        if thread.maybe is not None:
            self.ops.append(thread.maybe)
            thread.last, thread.maybe = thread.maybe, None

    def _annotation(self, thread: _Thread, mark: Annotation, tid: int) -> None:
        start, end = mark.start, mark.end
        if mark.name.startswith("gloo:"):
            self.workers.append((mark.name[5:], start, end))
            self._worker_threads.add(tid)
        if not mark.name.startswith(_OURS):
            return
        word, values = mark.name[len(_OURS) :].split(" ", 1)[0], parse_annotation(mark.name)
        if word == "op" and start >= thread.node_end:
            name = f"{_OURS}{values['kind']}"
            self._add(thread, Work(annotated_op(values), name, start, start, end, end - start, tid))
        elif word == "segment":
            self.main = tid
        elif word == "collective":
            thread.call = Call(dict(values), start, end)
            thread.call_end = thread.c10d_end = end
            self.calls.append(thread.call)
        elif word == "modelled" and thread.call is not None and start < thread.call_end:
            thread.call.values.update(values)
        elif word == "wait":
            self.waits.append(Call(dict(values), start, end))


def host_call_starts(events: RankEvents, main: int | None) -> NDArray[np.float64]:
    """When recorded calls of a thread (None: of all) started, weightless ones of any thread included, in order."""
    ops, runtime, marks = events.ops, events.runtime, [*events.annotations, *events.comms]
    own = np.ones(len(ops), dtype=np.bool_) if main is None else (ops["thread"] == main) | _weightless(events)
    launching = np.array([any(word in name for word in _LAUNCHES) for name in events.names], dtype=np.bool_)
    called = launching[runtime["name"]] & ((runtime["thread"] == main) | (main is None))
    marked = np.array([each.start for each in marks if main is None or each.thread == main], dtype=np.float64)
    return np.sort(np.concatenate([ops.start[own], runtime.start[called], marked]))


def _weightless(events: RankEvents) -> NDArray[np.bool_]:
    """``(n,)``: which framework calls move nothing."""
    return np.array([name in _WEIGHTLESS for name in events.names], dtype=np.bool_)[events.ops["name"]]


def _in_order(events: RankEvents) -> Iterator[tuple[int, int, float, float, int]]:
    """Kind, row, start, end and thread of what the host did, in order of time, outer calls first."""
    columns: list[list[Any]] = []
    for kind, marks in ((_ANNOTATION, events.annotations), (_COMMUNICATION, events.comms)):
        about = [[each.start for each in marks], [each.end for each in marks], [each.thread for each in marks]]
        columns.append([np.full(len(marks), kind), np.arange(len(marks)), *map(np.array, about)])
    rows, ops = np.flatnonzero(~_weightless(events)), events.ops
    columns.append([np.full(len(rows), _OP), rows, ops.start[rows], ops.end[rows], ops["thread"][rows]])
    kinds, places, start, end, thread = (np.concatenate(each) for each in zip(*columns, strict=True))
    order = np.lexsort((-end, start))
    kind, row, tid = (each[order].astype(np.int64).tolist() for each in (kinds, places, thread))
    return zip(kind, row, start[order].tolist(), end[order].tolist(), tid, strict=True)


def _may_be_work(name: str) -> bool:
    return "::" in name and name not in _WRAPPERS and name not in _WEIGHTLESS and not name.startswith(_BOOKKEEPING)


def _c10d_call(name: str, args: dict[str, Any], start: float, end: float) -> Call:
    kind, index = c10d_calls()[name]
    dims, types = args.get("Input Dims") or [], args.get("Input type") or []
    shape = dims[index] if index < len(dims) else []
    dtype = types[index] if index < len(types) else ""
    return Call({"kind": kind, "num_bytes": count(shape) * ELEMENT_BYTES.get(dtype, 4), "async": "1"}, start, end)
