"""Times of one rank's nodes: in-context slots, waits, launches and what the profiler recorded in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Program
from stepsight.dataset.graph.rank_trace import RankTrace, Span
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.traces.host import Intervals, Wait, merge, overlap, waited
from stepsight.dataset.traces.sweep import Work

MICROSECOND = 1e-6  # in seconds

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class RankCalls:
    """What one rank did, in microseconds; spans are in seconds.

    Shapes: ``n`` nodes.

    Attributes:
        works: The nodes, in order of issue.
        spans: Segments in order of time.
        waits: When the main thread waited for collectives.
        host_starts: When recorded calls of the host started, in order.
        steps: Bounds of whole steps.
        hosted: Whether the host computes; else a device runs what it launches.
    """

    works: list[Work]
    spans: tuple[Span, ...]
    waits: list[Wait]
    host_starts: Numbers
    steps: list[tuple[float, float]]
    hosted: bool

    @cached_property
    def start(self) -> Numbers:
        """``(n,)``."""
        return np.array([work.start for work in self.works])

    @cached_property
    def end(self) -> Numbers:
        """``(n,)``."""
        return np.array([work.end for work in self.works])

    @cached_property
    def own(self) -> Numbers:
        """``(n,)``: duration of each node on its own."""
        return np.array([work.own for work in self.works])

    @cached_property
    def bounds(self) -> tuple[Numbers, Numbers]:
        """Begins and ends of the spans, each ``(len(spans),)``."""
        begins, ends = ([getattr(span, name) for span in self.spans] for name in ("start_s", "end_s"))
        return np.array(begins) / MICROSECOND, np.array(ends) / MICROSECOND

    @cached_property
    def span(self) -> NDArray[np.int64]:
        """``(n,)``: index of the span in which a node was issued, -1 outside of all."""
        begins, ends = self.bounds
        issue = np.array([work.issue for work in self.works])
        span = np.searchsorted(begins, issue, "right") - 1
        span[(span >= 0) & (issue >= ends[span])] = -1
        return span.astype(np.int64)

    def recorded(self, since: Any, upto: Any) -> Any:
        """Return how many recorded calls started in each ``since <= time < upto``."""
        return np.searchsorted(self.host_starts, upto) - np.searchsorted(self.host_starts, since)


@dataclass(frozen=True)
class _Slots:
    """In-context times of the nodes; shapes as in ``RankTrace``."""

    slot: Numbers
    wait: Numbers
    tail: Numbers
    num_events: Numbers


def timed(rank: int, program: Program, calls: RankCalls) -> RankTrace:
    """Return the trace of a rank: its program with the times of its nodes."""
    slots = _host_slots(calls) if calls.hosted else _device_slots(calls)
    launch, launch_events = _launches(calls)
    return RankTrace(
        rank=rank,
        program=program,
        start_s=calls.start * MICROSECOND,
        duration_s=calls.own * MICROSECOND,
        slot_s=slots.slot * MICROSECOND,
        wait_s=slots.wait * MICROSECOND,
        span=calls.span,
        spans=calls.spans,
        tail_s=slots.tail * MICROSECOND,
        meets={i: work.meets for i, work in enumerate(calls.works) if work.meets is not None},
        num_events=slots.num_events,
        launch_s=launch * MICROSECOND,
        launch_events=launch_events,
        step_s=tuple((end - start) * MICROSECOND for start, end in calls.steps),
        events_per_step=_events_on_the_way(calls),
        waited_share=_waited_share(calls),
        unclassified_s=sum(work.own for work in calls.works if not work.known) * MICROSECOND,
    )


def _device_slots(calls: RankCalls) -> _Slots:
    count = len(calls.works)
    return _Slots(calls.own.copy(), np.zeros(count), np.zeros(len(calls.spans)), np.zeros(count))


def _host_slots(calls: RankCalls) -> _Slots:
    """A slot begins where the one before on the compute stream ended; waits for collectives are no part of it."""
    found = _device_slots(calls)
    idle = _idle(calls.waits)
    compute = np.array([isinstance(work.work, Op) and work.stream == "compute" for work in calls.works])
    inner = np.flatnonzero(compute)
    found.slot[inner] -= overlap(idle, calls.start[inner], calls.end[inner])
    for index, (begin, end) in enumerate(zip(*calls.bounds, strict=True)):
        nodes = inner[calls.span[inner] == index]
        if not len(nodes):
            continue
        upto = calls.end[nodes]
        upto[-1] = max(upto[-1], end)  # what follows the last node is its own
        since = np.concatenate([[begin], upto[:-1]])
        found.wait[nodes] = overlap(idle, since, upto)
        found.slot[nodes] = np.maximum(upto - since - found.wait[nodes], 0.0)
        found.tail[index] = waited(idle, calls.end[nodes[-1]], end)
        found.wait[nodes[-1]] -= found.tail[index]
        found.num_events[nodes] = calls.recorded(since, upto)
    blocking = np.array([work.blocks for work in calls.works])
    found.num_events[blocking] = calls.recorded(calls.start[blocking], calls.end[blocking])
    return found


def _launches(calls: RankCalls) -> tuple[Numbers, Numbers]:
    """Return the host time of each launch of a device's node, and the calls recorded in it; zeros on a host."""
    launch, launch_events = np.zeros(len(calls.works)), np.zeros(len(calls.works))
    if calls.hosted:
        return launch, launch_events
    issued = np.array([work.issued for work in calls.works])
    for begin, end in calls.steps:
        nodes = np.flatnonzero((issued >= begin) & (issued < end) & (calls.span >= 0))
        if not len(nodes):
            continue
        nodes = nodes[np.argsort(issued[nodes], kind="stable")]
        bounds = np.concatenate([[begin], issued[nodes][:-1], [end]])  # what follows the last is its own
        launch[nodes] = np.diff(bounds)
        launch_events[nodes] = calls.recorded(bounds[:-1], bounds[1:])
    return launch, launch_events


def _idle(waits: list[Wait]) -> Intervals:
    return merge([(wait.start, wait.end) for wait in waits])


def _events_on_the_way(calls: RankCalls) -> float:
    """Recorded calls that a step's time passes through: the rank's own; while it waits for a message, the peer's."""
    messages = _idle([wait for wait in calls.waits if wait.work.is_message])
    counts = [0.0]
    for start, end in calls.steps:
        if not end > start:
            continue  # nothing can have happened in it
        own_share = 1.0 - waited(messages, start, end) / (end - start)
        counts.append(float(calls.recorded(start, end)) / max(own_share, 0.1))
    return sum(counts) / max(len(calls.steps), 1)


def _waited_share(calls: RankCalls) -> float:
    idle = _idle(calls.waits)
    total = sum(end - start for start, end in calls.steps)
    return sum(waited(idle, start, end) for start, end in calls.steps) / total if total else 0.0
