"""One pass over the events in order of time: what is work, what is scope, what is an annotation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepsight.dataset.graph.rank_trace import Rendezvous, Span
from stepsight.dataset.kinds.call_dims import count
from stepsight.dataset.kinds.collective_names import c10d_calls
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
from stepsight.dataset.traces.event_rows import WEIGHTLESS, Event, Events, aten_names

_EVALUATE = "autograd::engine::evaluate_function: "
_OURS = "stepsight::"
# Wrappers that are no work of their own even where nothing within them is.
_WRAPPERS = aten_names(
    "to linear matmul layer_norm scaled_dot_product_attention zeros ones full zeros_like ones_like full_like "
    "new_zeros new_full type_as dropout lift requires_grad_ _fused_sdp_choice is_same_size pin_memory "
    "_pin_memory _nested_tensor_size conj conj_physical"
)
_BOOKKEEPING = ("autograd::", "torch::", "c10d::", "profiler::", "gloo:", "nccl:", "torch.distributed", "record_param")
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "runtime", "driver"})
_HOST = frozenset({"cpu_op", "user_annotation", "python_function"})
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


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
        device: Kernels and copies.
        syncs: Arguments of recorded waits of streams.
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
    device: list[Event] = field(default_factory=list)
    syncs: list[dict[str, Any]] = field(default_factory=list)
    launches: dict[int, tuple[float, Work | None, Call | None]] = field(default_factory=dict)
    external: dict[int, tuple[float, Work | None, Call | None]] = field(default_factory=dict)
    threads: dict[Any, list[tuple[float, float]]] = field(default_factory=dict)
    segment_thread: Any = None
    forward_dims: dict[int, tuple[int, ...]] = field(default_factory=dict)


def parse_annotation(name: str) -> dict[str, str]:
    """``stepsight::op kind=add dims=8`` to its keys and values."""
    return dict(part.split("=", 1) for part in name.split(" ")[1:] if "=" in part)


def sweep(events: Events) -> Swept:
    """Sort out the events of one rank.

    Raises:
        ValueError: If one of our own annotations is malformed.
    """
    out = Swept(syncs=events.syncs)
    threads: dict[Any, _Thread] = {}
    ends = events.end_us.tolist()
    known_calls, communication = call_table(), c10d_calls()
    for row, start, end in zip(events.rows, events.start_us.tolist(), ends, strict=True):
        category = row.get("cat")
        if category == "cpu_op":
            tid = row["tid"]
            thread = threads.get(tid)
            if thread is None:
                thread = threads[tid] = _Thread()
            if start >= thread.top_end:
                thread.top.append((start, end))
                thread.top_end = end
            if start < thread.node_end or start < thread.c10d_end:
                if row["name"] == "record_param_comms":
                    _record_communication(thread, row, start, end)
                if thread.node is not None and start < thread.node_end:
                    thread.node.recorded += 1
                continue  # within an op, or within a communication call, whose copies are its own
            name = row["name"]
            if name in known_calls:
                _known_call(out, thread, row, start, end)
            elif name.startswith(_EVALUATE):
                sequence = row.get("args", {}).get("Sequence number", -1)
                thread.scope = Scope(name[len(_EVALUATE) :], out.forward_dims.get(sequence, ()))
                thread.scope_end = end
            elif name == "record_param_comms":
                _record_communication(thread, row, start, end)
            elif name in communication:
                out.calls.append(_c10d_call(name, row.get("args", {}), start, end, tid))
                thread.c10d_end = end
            elif start >= thread.maybe_end and _may_be_work(name):
                _unknown_call(out, thread, row, name, start, end)
        elif category == "user_annotation":
            tid = row["tid"]
            _annotation(out, threads.setdefault(tid, _Thread()), row, start, end, tid)
        elif category in _RUNTIME:
            _launch(out, threads.get(row["tid"]), row.get("args", {}), start)
        elif category in _DEVICE:
            out.device.append(row)
    for tid, thread in threads.items():
        _commit(out, thread)
        if thread.top:
            out.threads[tid] = thread.top
    out.host.sort(key=lambda node: node.start)
    return out


def on_host(row: Event) -> bool:
    """Whether an event is a call that the host made."""
    return row.get("cat") in _HOST or row.get("cat") in _RUNTIME


def _may_be_work(name: str) -> bool:
    return "::" in name and name not in _WRAPPERS and name not in WEIGHTLESS and not name.startswith(_BOOKKEEPING)


def _commit(out: Swept, thread: _Thread) -> None:
    """Nothing known was found within the call of no known kind: it is work itself."""
    if thread.maybe is not None:
        out.host.append(thread.maybe)
        thread.last, thread.maybe = thread.maybe, None


def _known_call(out: Swept, thread: _Thread, row: Event, start: float, end: float) -> None:
    name, args = row["name"], row.get("args", {})
    sequence = args.get("Sequence number", -1)
    scope = thread.scope if start < thread.scope_end and sequence < 0 else Scope()
    before = thread.last.work if thread.last is not None else None
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
    node = Work(op, name, start, start, end, end - start, row["tid"])
    out.host.append(node)
    thread.node, thread.node_end, thread.last = node, end, node


def _unknown_call(out: Swept, thread: _Thread, row: Event, name: str, start: float, end: float) -> None:
    _commit(out, thread)
    op = classify_unknown(row.get("args", {}))
    if op is not None:
        thread.maybe = Work(op, name, start, start, end, end - start, row["tid"], known=False)
        thread.maybe_end = end


def _annotation(out: Swept, thread: _Thread, row: Event, start: float, end: float, tid: Any) -> None:
    name: str = row["name"]
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
        args = row.get("args", {})
        shapes, types = args.get("Input Dims") or [[]], args.get("Input type") or [""]
        values = {"Collective name": name[5:], "shape": shapes[0], "type": types[0]}
        thread.comm, thread.comm_end = Call(values, start, end, tid), end
    elif name.startswith("ProfilerStep#") and not out.steps:
        out.spans.append(Span("step", start, end))


def _says_what(call: Call | None) -> bool:
    return call is not None and not {"kind", "Collective name"}.isdisjoint(call.values)


def _record_communication(thread: _Thread, row: Event, start: float, end: float) -> None:
    """What NCCL's record says; our own annotation around it says more."""
    if start >= thread.comm_end or (thread.comm is not None and "kind" not in thread.comm.values):
        thread.comm, thread.comm_end = Call(row.get("args", {}), start, end, row["tid"]), end


def _c10d_call(name: str, args: dict[str, Any], start: float, end: float, tid: Any) -> Call:
    kind, index = c10d_calls()[name]
    dims = args.get("Input Dims") or []
    shape = dims[index] if index < len(dims) else []
    types = args.get("Input type") or []
    dtype = types[index] if index < len(types) else ""
    values = {"kind": kind, "num_bytes": count(shape) * ELEMENT_BYTES.get(dtype, 4), "async": "1"}
    return Call(values, start, end, tid)


def _launch(out: Swept, thread: _Thread | None, args: dict[str, Any], start: float) -> None:
    correlation = args.get("correlation")
    if correlation is None:
        return
    owner, comm = None, None
    if thread is not None:
        if start < thread.node_end:
            owner = thread.node
        elif start < thread.maybe_end:
            owner = thread.maybe
        if start < thread.comm_end:
            comm = thread.comm
    out.launches[correlation] = (start, owner, comm)
    external = args.get("External id")
    if external is not None:
        out.external[external] = out.launches[correlation]


def orphan(name: str) -> Op:
    """A kernel that no recorded call launched: its size is unknown."""
    return intern_op("copy" if "mem" in name.lower()[:6] else "elementwise", (0,), "fp32")
