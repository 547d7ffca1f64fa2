"""One pass over the events in order of time: what is work, what is scope, what is an annotation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepsight.dataset.graph.rank_trace import Rendezvous, Span
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
    intern_op,
)
from stepsight.dataset.traces.event_columns import Annotation, RankEvents, Table


def aten_names(words: str) -> frozenset[str]:
    """Full names of ATen calls listed by their short ones."""
    return frozenset(f"aten::{word}" for word in words.split())


# Calls that move nothing: metadata, allocation, bookkeeping.  Their time is host gap.
WEIGHTLESS = aten_names(
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
_WRAPPERS = aten_names(
    "to linear matmul layer_norm scaled_dot_product_attention zeros ones full zeros_like ones_like full_like "
    "new_zeros new_full type_as dropout lift requires_grad_ _fused_sdp_choice is_same_size pin_memory "
    "_pin_memory _nested_tensor_size conj conj_physical"
)
_BOOKKEEPING = ("autograd::", "torch::", "c10d::", "profiler::", "gloo:", "nccl:", "torch.distributed", "record_param")
_ANNOTATION, _OP, _COMMUNICATION, _LAUNCH = range(4)


@dataclass(slots=True)
class Work:
    """One op or collective while it is being read; microseconds.

    Attributes:
        work: Signature.
        name: Call it comes from.
        issue: When the host came to it.
        start: When it began, on host or device.
        end: When it ended.
        own: Time within it that is its own.
        stream: Host thread, device stream or group.
        known: False for a call of no known kind.
        meets: Of a collective.
        blocks: Of a collective: the host waited for it immediately.
        issued: Of device work: when the host had launched all of it.
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
    blocks: bool = False
    issued: float = 0.0
    recorded: int = 1

    @property
    def is_message(self) -> bool:
        """Whether it is a collective that sends a message from one rank to one."""
        return isinstance(self.work, Collective) and self.work.record.route == "message"


@dataclass(slots=True)
class Call:
    """An annotated or recorded communication call on the host."""

    values: dict[str, Any]
    start: float
    end: float
    thread: Any


@dataclass(slots=True)
class _Thread:
    node: Work | None = None  # classified call that is running
    node_end: float = -1.0
    maybe: Work | None = None  # call of no known kind that is running
    maybe_end: float = -1.0
    last: Work | None = None
    scope: Scope = field(default_factory=Scope)
    scope_end: float = -1.0
    comm: Call | None = None
    comm_end: float = -1.0
    c10d_end: float = -1.0
    top: list[tuple[float, float]] = field(default_factory=list)
    top_end: float = -1.0


@dataclass(slots=True)
class Swept:
    """What one pass found; times in microseconds.

    Attributes:
        host: Compute calls by order of start.
        spans: Annotated segments.
        steps: Bounds of whole steps.
        slowed_steps: Bounds of steps that another observer slowed (``et=1``): they are not evaluated.
        calls: ``stepsight::collective`` annotations, and c10d calls that no annotation encloses.
        waits: ``stepsight::wait`` annotations.
        workers: ``gloo:*`` spans: kind, start, end.
        worker_threads: Threads of these spans.
        launches: By correlation id: when launched, by which call, within which communication.
        external: Likewise by external id.
        threads: Outermost calls (start, end) by host thread.
        segment_thread: Thread that carries our segments, None if there are none.
        forward_dims: Dims of each forward product, by its autograd sequence number.
    """

    host: list[Work] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    slowed_steps: list[tuple[float, float]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    waits: list[Call] = field(default_factory=list)
    workers: list[tuple[str, float, float]] = field(default_factory=list)
    worker_threads: set[Any] = field(default_factory=set)
    launches: dict[int, tuple[float, Work | None, Call | None]] = field(default_factory=dict)
    external: dict[int, tuple[float, Work | None, Call | None]] = field(default_factory=dict)
    threads: dict[Any, list[tuple[float, float]]] = field(default_factory=dict)
    segment_thread: Any = None
    forward_dims: dict[int, tuple[int, ...]] = field(default_factory=dict)


def parse_annotation(name: str) -> dict[str, str]:
    """``stepsight::op kind=add dims=8`` to its keys and values."""
    return dict(part.split("=", 1) for part in name.split(" ")[1:] if "=" in part)


def sweep(events: RankEvents) -> Swept:
    """Sort out the events of one rank.

    Raises:
        ValueError: If one of our own annotations is malformed.
    """
    out, threads, scan = Swept(), {}, _Scan(events)  # type: Swept, dict[int, _Thread], _Scan
    for kind, row, start, end, tid in _in_order(events):
        if kind == _LAUNCH:
            _launch(out, threads.get(tid), events.runtime, row, start)
            continue
        thread = threads.get(tid)
        if thread is None:
            thread = threads[tid] = _Thread()
        if kind == _ANNOTATION:
            _annotation(out, thread, events.annotations[row], start, end, tid)
            continue
        if start >= thread.top_end:
            thread.top.append((start, end))
            thread.top_end = end
        if start < thread.node_end or start < thread.c10d_end:
            if kind == _COMMUNICATION:
                _record_communication(thread, events.comms[row])
            if thread.node is not None and start < thread.node_end:
                thread.node.recorded += 1
        elif kind == _COMMUNICATION:
            _record_communication(thread, events.comms[row])
        else:
            scan.call(out, thread, row, start, end)
    for tid, thread in threads.items():
        _commit(out, thread)
        if thread.top:
            out.threads[tid] = thread.top
    out.host.sort(key=lambda node: node.start)
    return out


def weightless(events: RankEvents) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """``(n,)``: which framework calls move nothing."""
    named = np.array([name in WEIGHTLESS for name in events.names], dtype=np.bool_)
    return named[events.ops["name"]]


def launching(events: RankEvents) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """``(r,)``: which runtime calls put something on a device."""
    named = np.array([any(word in name for word in _LAUNCHES) for name in events.names], dtype=np.bool_)
    return named[events.runtime["name"]]


def _in_order(events: RankEvents) -> Iterator[tuple[int, int, float, float, int]]:
    """Kind, row, start, end and thread of what the host did, in order of time, outer calls first."""
    ops, calls = np.flatnonzero(~weightless(events)), np.flatnonzero(launching(events))
    columns: list[list[Any]] = []
    for kind, marks in ((_ANNOTATION, events.annotations), (_COMMUNICATION, events.comms)):
        about = [[each.start for each in marks], [each.end for each in marks], [each.thread for each in marks]]
        columns.append([np.full(len(marks), kind), np.arange(len(marks)), *map(np.array, about)])
    for kind, rows, table in ((_OP, ops, events.ops), (_LAUNCH, calls, events.runtime)):
        columns.append([np.full(len(rows), kind), rows, table.start[rows], table.end[rows], table["thread"][rows]])
    kinds, rows, start, end, thread = (np.concatenate(each) for each in zip(*columns, strict=True))
    order = np.lexsort((-end, start))
    kind, row, tid = (each[order].astype(np.int64).tolist() for each in (kinds, rows, thread))
    return zip(kind, row, start[order].tolist(), end[order].tolist(), tid, strict=True)


class _Scan:
    """Framework calls that are work, of one rank."""

    def __init__(self, events: RankEvents) -> None:
        self._events = events
        self._names, self._numbers = events.names, events.ops["name"].tolist()
        self._signatures, self._sequence = events.ops["signature"].tolist(), events.ops["sequence"].tolist()
        self._threads = events.ops["thread"].tolist()
        self._known, self._communication = call_table(), c10d_calls()

    def call(self, out: Swept, thread: _Thread, row: int, start: float, end: float) -> None:
        """Add a framework call that lies within no known op."""
        name, sequence = self._names[self._numbers[row]], self._sequence[row]
        if name in self._known:
            self._known_call(out, thread, row, start, end)
        elif name.startswith(_EVALUATE):
            thread.scope = Scope(name[len(_EVALUATE) :], out.forward_dims.get(sequence, ()))
            thread.scope_end = end
        elif name in self._communication:
            args = self._events.arguments(self._signatures[row])
            out.calls.append(_c10d_call(name, args, start, end, self._threads[row]))
            thread.c10d_end = end
        elif start >= thread.maybe_end and _may_be_work(name):
            _commit(out, thread)
            op = classify_unknown(self._events.arguments(self._signatures[row]))
            if op is not None:
                thread.maybe = Work(op, name, start, start, end, end - start, self._threads[row], known=False)
                thread.maybe_end = end

    def _known_call(self, out: Swept, thread: _Thread, row: int, start: float, end: float) -> None:
        name, sequence = self._names[self._numbers[row]], self._sequence[row]
        scope = thread.scope if start < thread.scope_end and sequence < 0 else Scope()
        before = thread.last.work if thread.last is not None else None
        args = self._events.arguments(self._signatures[row])
        op = classify(name, args, scope, before.dtype if isinstance(before, Op) else "fp32")
        if op is None:
            return
        if op.kind == "linear" and sequence >= 0:
            out.forward_dims[sequence] = op.dims
        if start < thread.maybe_end:
            thread.maybe = None
        _commit(out, thread)
        last = thread.last
        if last is not None and op.record.in_parts and last.work == op:
            last.end, last.own, last.recorded = end, last.own + end - start, last.recorded + 1
            thread.node, thread.node_end = last, end
            return
        node = Work(op, name, start, start, end, end - start, self._threads[row])
        out.host.append(node)
        thread.node, thread.node_end, thread.last = node, end, node


def _may_be_work(name: str) -> bool:
    return "::" in name and name not in _WRAPPERS and name not in WEIGHTLESS and not name.startswith(_BOOKKEEPING)


def _commit(out: Swept, thread: _Thread) -> None:
    """Nothing known was found within the call of no known kind: it is work itself."""
    if thread.maybe is not None:
        out.host.append(thread.maybe)
        thread.last, thread.maybe = thread.maybe, None


def _annotation(out: Swept, thread: _Thread, mark: Annotation, start: float, end: float, tid: int) -> None:
    name = mark.name
    if name.startswith(_OURS):
        word = name[len(_OURS) :].split(" ", 1)[0]
        values = parse_annotation(name)
        if word == "op":
            if start < thread.node_end:
                return
            if start < thread.maybe_end:
                thread.maybe = None
            _commit(out, thread)
            node = Work(annotated_op(values), f"{_OURS}{values['kind']}", start, start, end, end - start, tid)
            out.host.append(node)
            thread.node, thread.node_end, thread.last = node, end, node
        elif word == "segment":
            out.segment_thread = tid
            if values["label"] == "step":
                (out.slowed_steps if values.get("et") == "1" else out.steps).append((start, end))
            else:
                numbers = (int(values.get("micro_batch", 0)), int(values.get("stage", 0)))
                out.spans.append(Span(values["label"], start, end, 0, *numbers))
        elif word == "collective":
            call = Call(dict(values), start, end, tid)
            out.calls.append(call)
            thread.comm, thread.comm_end, thread.c10d_end = call, end, end
        elif word == "modelled" and thread.comm is not None and start < thread.comm_end:
            thread.comm.values.update(values)
        elif word == "wait":
            out.waits.append(Call(dict(values), start, end, tid))
    elif name.startswith("gloo:"):
        out.workers.append((name[5:], start, end))
        out.worker_threads.add(tid)
    elif name.startswith("nccl:") and not (start < thread.comm_end and _says_what(thread.comm)):
        args = mark.args
        shapes, types = args.get("Input Dims") or [[]], args.get("Input type") or [""]
        values = {"Collective name": name[5:], "shape": shapes[0], "type": types[0]}
        thread.comm, thread.comm_end = Call(values, start, end, tid), end
    elif name.startswith("ProfilerStep#") and not out.steps:
        out.spans.append(Span("step", start, end))


def _says_what(call: Call | None) -> bool:
    return call is not None and not {"kind", "Collective name"}.isdisjoint(call.values)


def _record_communication(thread: _Thread, record: Annotation) -> None:
    """What NCCL's record says; our own annotation around it says more."""
    if record.start >= thread.comm_end or (thread.comm is not None and "kind" not in thread.comm.values):
        thread.comm, thread.comm_end = Call(record.args, record.start, record.end, record.thread), record.end


def _c10d_call(name: str, args: dict[str, Any], start: float, end: float, tid: Any) -> Call:
    kind, index = c10d_calls()[name]
    dims = args.get("Input Dims") or []
    shape = dims[index] if index < len(dims) else []
    types = args.get("Input type") or []
    dtype = types[index] if index < len(types) else ""
    values = {"kind": kind, "num_bytes": count(shape) * ELEMENT_BYTES.get(dtype, 4), "async": "1"}
    return Call(values, start, end, tid)


def _launch(out: Swept, thread: _Thread | None, runtime: Table, row: int, start: float) -> None:
    owner, comm = None, None
    if thread is not None:
        if start < thread.node_end:
            owner = thread.node
        elif start < thread.maybe_end:
            owner = thread.maybe
        if start < thread.comm_end:
            comm = thread.comm
    for ids, found in (("correlation", out.launches), ("external", out.external)):
        number = int(runtime[ids][row])
        if number >= 0:
            found[number] = (start, owner, comm)


def orphan(name: str) -> Op:
    """A kernel that no recorded call launched: its size is unknown."""
    return intern_op("copy" if "mem" in name.lower()[:6] else "elementwise", (0,), "fp32")
