"""Columns of nodes and edges of a program and what their numbers mean, and what a host records beside them.

Sets of intervals of time, and how much of other spans they cover.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.kinds.op import Collective, Op

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Intervals = Floats  # (k, 2): disjoint and in order
Graph = Any  # a ``Program``, for modules that its own module imports


class Dependency(enum.Enum):
    """Why one node waits for another (the field's taxonomy)."""

    DATA = "data"  # reads what the other wrote
    STREAM_ORDER = "stream_order"  # issued later on the same stream
    LAUNCH = "launch"  # the host launched it on the device
    SYNCHRONISATION = "synchronisation"  # an event or a wait across streams of one rank
    RENDEZVOUS = "rendezvous"  # the same collective on another rank
    HOST_ORDER = "host_order"  # later on the same host thread


WHY = tuple(Dependency)  # by number
WHY_NUMBER = {why: number for number, why in enumerate(WHY)}

OP, COLLECTIVE, HOST = range(3)
NODE_KINDS = ("op", "collective", "host")
PHASES = ("forward", "backward", "optimizer")
NODE_COLUMNS = (
    "kind", "stream", "step", "phase", "work", "name", "known", "call", "group", "seq", "blocks", "threads",
    "registers", "shared_bytes", "recorded",
)  # fmt: skip
EDGE_COLUMNS = ("source", "target", "why")


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of a rank's host time: one segment of one step."""

    label: str  # forward, backward, optimizer …
    start_s: float  # on the rank's clock
    end_s: float  # likewise
    step: int = 0  # which profiled step, from 0
    micro_batch: int = 0  # which micro-batch, from 0
    stage: int = 0  # which pipeline stage


@dataclass(frozen=True, slots=True)
class HostRecord:
    """What a rank's host recorded beside the nodes of its graph; seconds from the graph's begin."""

    spans: tuple[Span, ...] = ()  # annotated segments in order of time
    # (c,): when recorded calls started, in order: of the thread that computes, or of all that launch
    calls_s: Floats = field(default_factory=lambda: np.zeros(0))
    # (n,): time within each node of the graph that is its own; empty: all of it
    own_s: Floats = field(default_factory=lambda: np.zeros(0))
    # (w, 2): when the thread that computes waited for collectives
    waits_s: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    awaited: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (w,): their nodes in the graph


def chosen_nodes(nodes: Iterable[int], count: int) -> Ints:
    """Numbers of nodes that a user names, in order; raises ``StepsightError`` if they are none of ``count`` nodes."""
    chosen = list(nodes) if isinstance(nodes, Iterable) else [nodes]
    whole = all(isinstance(node, int | np.integer) and not isinstance(node, bool) for node in chosen)
    if not whole or not all(0 <= node < count for node in chosen):
        raise StepsightError(f"nodes must be whole numbers from 0 to {count - 1}, got {chosen!s:.80}")
    return np.array(sorted(set(chosen)), dtype=np.int64)


def check_node(work: object, stream: object) -> None:
    """Check what a user makes a node of; raises ``StepsightError`` if it is something else."""
    if not isinstance(work, Op | Collective | None):
        raise StepsightError(f"work of a node must be an Op or a Collective, got {work!r:.80}")
    if not isinstance(stream, str):
        raise StepsightError(f"stream of a node must be a text, got {stream!r:.80}")


def merge(intervals: Any) -> Intervals:
    """Disjoint intervals in order, shape ``(k, 2)``, that cover the same as ``(n, 2)`` in any order."""
    found = np.asarray(intervals, dtype=np.float64).reshape(-1, 2)
    found = found[found[:, 1] > found[:, 0]]
    found = found[np.argsort(found[:, 0], kind="stable")]
    reached = np.maximum.accumulate(found[:, 1])
    first = np.flatnonzero(np.append(True, found[1:, 0] > reached[:-1])[: len(found)])
    last = np.append(first[1:], len(found))[: len(first)] - 1
    return np.stack([found[first, 0], reached[last]], axis=1)


def overlap(intervals: Intervals, start: Floats, end: Floats) -> Floats:
    """How much of each stretch ``start … end`` the disjoint intervals cover; same shape."""
    if not len(intervals):
        return np.zeros(len(start))
    marks = intervals.ravel()
    spent = np.concatenate([[0.0], np.cumsum(intervals[:, 1] - intervals[:, 0])])
    total = np.repeat(spent, 2)[1:-1]
    return np.asarray(np.interp(end, marks, total) - np.interp(start, marks, total))


def covered(start: Floats, end: Floats, begin: Floats, until: Floats) -> Floats:
    """Seconds of each span ``begin … until``, ``(k,)``, that intervals in any order, ``(n,)``, cover once."""
    return overlap(merge(np.stack([start, end], axis=1)), begin, until)
