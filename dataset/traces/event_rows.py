"""Events of one rank's file as rows in order of time, for the pass that sorts them out (``sweep``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.traces.event_columns import Annotation, RankEvents, Table

Event = dict[str, Any]


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


@dataclass(frozen=True)
class Events:
    """Events of one file, without calls that cost nothing.

    Shapes: ``n`` events in order of start, the longer first.

    Attributes:
        rows: ``n`` events: ``cat``, ``name``, ``tid`` (number of the thread) and ``args``, as Kineto names them.
        start_us: ``(n,)``.
        end_us: ``(n,)``.
        dropped_us: Starts of weightless host events that are not among the rows.
        header: Top-level keys beside the events.
        calls: Calls of host threads as columns, weightless ones too (see ``RankEvents.ops``).
        syncs: Arguments of recorded waits of streams.
    """

    rows: list[Event]
    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]
    dropped_us: NDArray[np.float64]
    header: dict[str, Any]
    calls: Table
    syncs: list[dict[str, Any]]


def event_rows(events: RankEvents) -> Events:
    """Rows of the events that may be work, launches, annotations or communication."""
    weightless = np.array([name in WEIGHTLESS for name in events.names], dtype=np.bool_)
    launching = np.array([any(word in name for word in _LAUNCHES) for name in events.names], dtype=np.bool_)
    ops = events.ops.take(~weightless[events.ops["name"]]) if len(events.ops) else events.ops
    runtime = events.runtime.take(launching[events.runtime["name"]]) if len(events.runtime) else events.runtime
    rows = _op_rows(events, ops) + _runtime_rows(events, runtime) + _device_rows(events)
    marks = [*(("cpu_op", each) for each in events.comms), *(("user_annotation", each) for each in events.annotations)]
    rows += [_row(category, each.name, each.thread, each.args) for category, each in marks]
    start = np.concatenate([ops.start, runtime.start, events.device.start, _times(marks, "start")])
    end = np.concatenate([ops.end, runtime.end, events.device.end, _times(marks, "end")])
    order = np.lexsort((start - end, start))
    dropped = events.ops.start[weightless[events.ops["name"]]] if len(events.ops) else events.ops.start
    rows = [rows[place] for place in order.tolist()]
    return Events(rows, start[order], end[order], dropped, events.header, events.ops, events.syncs)


def observed_steps(calls: Table, bounds: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Steps in which an execution-trace observer ran too: they are several times slower.

    The observer numbers the recorded functions; without it they are all 0.

    Args:
        calls: Calls of host threads, in order of start.
        bounds: Begin and end of each step, ``(k, 2)``, microseconds.

    Returns:
        ``(k,)``.
    """
    first, last = np.searchsorted(calls.start, bounds).T if len(bounds) else (np.zeros(0, int), np.zeros(0, int))
    numbered = np.concatenate([[0], np.cumsum(calls["record"] > 0)]) if len(calls) else np.zeros(1, dtype=np.int64)
    return np.asarray(numbered[last] > numbered[first])


def _row(category: str, name: str, thread: int, args: dict[str, Any]) -> Event:
    return {"cat": category, "name": name, "tid": thread, "args": args}


def _times(marks: list[tuple[str, Annotation]], name: str) -> NDArray[np.float64]:
    return np.array([getattr(each, name) for _, each in marks], dtype=np.float64)


def _op_rows(events: RankEvents, ops: Table) -> list[Event]:
    columns = [ops[name].tolist() for name in ("name", "signature", "thread", "sequence")] if len(ops) else [[]] * 4
    return [
        _row("cpu_op", events.names[name], thread, {**events.arguments(size), "Sequence number": sequence})
        for name, size, thread, sequence in zip(*columns, strict=True)
    ]


def _runtime_rows(events: RankEvents, calls: Table) -> list[Event]:
    names = ("name", "thread", "correlation", "external")
    columns = [calls[name].tolist() for name in names] if len(calls) else [[]] * 4
    return [
        _row("cuda_runtime", events.names[name], thread, _ids(correlation, external))
        for name, thread, correlation, external in zip(*columns, strict=True)
    ]


def _ids(correlation: int, external: int) -> dict[str, Any]:
    return {"External id": external} | ({"correlation": correlation} if correlation >= 0 else {})


def _device_rows(events: RankEvents) -> list[Event]:
    device, rows = events.device, []
    names = ("kernel", "stream", "correlation", "external")
    columns = [device[name].tolist() for name in names] if len(device) else [[]] * 4
    times = zip(device.start.tolist(), device.end.tolist(), strict=True)
    for place, (kernel, stream, correlation, external) in enumerate(zip(*columns, strict=True)):
        category, name, _ = events.kernels[kernel]
        on, number = events.streams[stream]
        start, end = next(times)
        args = {**_ids(correlation, external), "device": on, "stream": number, **events.collective_args.get(place, {})}
        rows.append({"cat": category, "name": name, "tid": number, "ts": start, "dur": end - start, "args": args})
    return rows
