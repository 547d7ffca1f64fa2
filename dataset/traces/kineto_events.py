"""Kineto files to event dictionaries, fast.

A trace is mostly events that cost nothing (views, flow arrows, Python frames).  Where the file has the profiler's own
layout they are dropped before JSON is parsed, which halves the time; any other layout is parsed whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.bounded import read_unpacked
from stepsight.dataset.base.caching import without_collection
from stepsight.dataset.base.errors import TraceError

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
_MOST_US = 2.0**53  # clocks count microseconds since 1970 at most; beyond, a float skips some
_SEPARATOR = "\n  },\n  {"


@dataclass(frozen=True)
class Events:
    """Complete ("X") events of one file.

    Shapes: ``n`` events in order of start, the longer first.

    Attributes:
        rows: ``n`` event dictionaries as in the file.
        start_us: ``(n,)``.
        end_us: ``(n,)``.
        dropped_us: Starts of weightless host events that are not among the rows.
        header: Top-level keys beside the events.
        num_bytes: Size of the JSON text.
    """

    rows: list[Event]
    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]
    dropped_us: NDArray[np.float64]
    header: dict[str, Any]
    num_bytes: int


def read_text(path: Path) -> str:
    """Text of a file, unpacked if it is gzip.

    Raises:
        TraceError: If it is missing, empty, truncated or corrupt.
    """
    try:
        raw = read_unpacked(path)
    except OSError as error:
        raise TraceError(f"a trace must be a readable file, got {path} ({error.strerror})") from None
    if not raw.strip():
        raise TraceError(f"a trace must hold JSON, got an empty file {path}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} must be UTF-8 text, got {error}") from None


def read_events(path: Path) -> Events:
    """Read a Kineto trace.

    Raises:
        TraceError: If it is no whole Kineto trace.
    """
    text = read_text(path)
    kept, dropped = _drop_weightless(text)
    with without_collection():  # a million young dictionaries
        tree = _parse(kept, path)
    if isinstance(tree, list):
        tree = {"traceEvents": tree}
    if not isinstance(tree, dict) or not isinstance(tree.get("traceEvents"), list):
        raise TraceError(f"a Kineto trace must hold a list traceEvents, got {_shape(tree)} in {path}")
    try:
        rows = [row for row in tree.pop("traceEvents") if row["ph"] == "X" and "dur" in row]
        start = np.array([row["ts"] for row in rows], dtype=np.float64)
        length = np.array([row["dur"] for row in rows], dtype=np.float64)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(
            f"every event must have ph, and a complete one ts and dur in numbers, got {error!r:.200} in {path}"
        ) from None
    if not rows:
        raise TraceError(f"a Kineto trace must hold complete events, got none in {path}")
    _check_values(rows, start, length, path)
    order = np.lexsort((-length, start))
    start = start[order]
    return Events([rows[i] for i in order.tolist()], start, start + length[order], dropped, tree, len(text))


def _check_values(rows: list[Event], start: NDArray[np.float64], length: NDArray[np.float64], path: Path) -> None:
    for name, values in (("ts", start), ("dur", length)):
        wrong = np.flatnonzero(~((values >= 0) & (values <= _MOST_US)))
        if len(wrong):
            value = values[wrong[0]]
            raise TraceError(f"{name} must lie within 0 and {_MOST_US:.0e} microseconds, got {value:g} in {path}")
    kinds = {type(row["args"]) for row in rows if "args" in row} - {dict}
    if kinds:
        raise TraceError(f"args of an event must be a table, got {kinds.pop().__name__} in {path}")


def _parse(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise TraceError(f"{path} must be events, got tables nested thousands deep") from None
    except ValueError as error:
        raise TraceError(f"{path} must be whole JSON, got {error}") from None


def _shape(tree: object) -> str:
    return f"keys {', '.join(sorted(map(str, tree))[:8])}" if isinstance(tree, dict) else type(tree).__name__


def _drop_weightless(text: str) -> tuple[str, NDArray[np.float64]]:
    """The text without weightless events, and when the host calls among those started (microseconds)."""
    chunks = text.split(_SEPARATOR)
    calls, runtime = (_prefix(text, category) for category in ("cpu_op", "cuda_runtime"))
    if len(chunks) < 3 or not calls:
        return text, np.zeros(0)
    complete = calls[: calls.index('"X"') + 3]
    at, runtime_at = len(calls), len(runtime)
    kept, dropped = [chunks[0]], []
    for chunk in chunks[1:-1]:
        if chunk.startswith(calls):
            if chunk[at : chunk.find('"', at)] in WEIGHTLESS:
                dropped.append(chunk)
            else:
                kept.append(chunk)
        elif runtime and chunk.startswith(runtime):
            name = chunk[runtime_at : chunk.find('"', runtime_at)]
            if any(word in name for word in _LAUNCHES):
                kept.append(chunk)
        elif chunk.startswith(complete) and chunk.find('"cat": "python_function"', 0, 70) < 0:
            kept.append(chunk)
    kept.append(chunks[-1])
    try:
        return _SEPARATOR.join(kept), np.array([_start(chunk) for chunk in dropped], dtype=np.float64)
    except ValueError:  # a layout that only looks like the profiler's
        return text, np.zeros(0)


def _prefix(text: str, category: str) -> str:
    """How events of a category begin in this file, up to their name; "" where there are none or it is no such file."""
    found = text.find(f'"cat": "{category}"')
    begin = text.rfind("{", 0, found) + 1
    end = text.find('"name": "', found, found + 60) + 9
    prefix = text[begin:end] if 0 < begin < found < end else ""
    return prefix if '"ph": "X"' in prefix and text[begin - 4 : begin] == _SEPARATOR[-4:] else ""


def _start(chunk: str) -> str:
    at = chunk.index('"ts": ') + 6
    return chunk[at : chunk.index(",", at)]
