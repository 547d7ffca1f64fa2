"""Kineto traces: one rank's program with its times.

On a CPU every classified call of a host thread is a node, and the thread that carries the segments is the ``compute``
stream.  Where the trace holds kernels, a node is what one call launched on one stream, and host calls are not nodes.
Collectives lie on a stream of their own, named by their group.

Dependencies are stream order, which a program implies, and *synchronisation*: a collective starts when the compute
stream has come to it, and what follows its wait needs it.  Data dependencies within a stream are not told apart from
its order.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.intervals import Intervals, merge, overlap, waited
from stepsight.dataset.graph.program import Dependency, Node, Program
from stepsight.dataset.graph.rank_trace import Placement, RankTrace, Span
from stepsight.dataset.kinds.op import MOST_SIZE, Op
from stepsight.dataset.traces.event_columns import RankEvents, read_columns, well_formed
from stepsight.dataset.traces.rank_works import Wait, device_work, event_waits, host_collectives, stream_names
from stepsight.dataset.traces.step_bounds import observed_steps
from stepsight.dataset.traces.sweep import Swept, Work, launching, sweep, weightless

MOST_RANKS = 2**20  # of a job that anybody traced


def read_kineto(path: Path, placement: Placement | None = None) -> RankTrace:
    """Read one rank's ``.json`` or ``.json.gz``.

    Raises:
        TraceError: If it is no whole Kineto trace, or holds nothing that could be a node.
    """
    events = read_columns(path)
    with well_formed(path):
        return rank_trace(events, placement or Placement())


def rank_trace(events: RankEvents, placement: Placement) -> RankTrace:
    """Turn the events of one rank into its trace."""
    swept = sweep(events)
    _set_aside_slowed_steps(swept, events)
    info = events.header.get("distributedInfo") or {}
    rank, world_size = int(info.get("rank", placement.rank or 0)), int(info.get("world_size", 1))
    if not (1 <= world_size <= MOST_RANKS and 0 <= rank < MOST_RANKS):
        raise TraceError(f"rank and world_size of a trace must be below {MOST_RANKS}, got {rank} and {world_size}")
    if placement.rank not in (None, rank):
        raise ValueError(f"the trace of rank {placement.rank} must be its own, got that of rank {rank}")
    main = main_thread(swept)
    waits: list[Wait] = []
    hosted = not len(events.device)
    names = [] if hosted else stream_names(events)
    if not hosted:
        works = device_work(events, swept, names, world_size, placement)
    else:
        works, waits = host_works(swept, info, rank, world_size, placement)
    if not works:
        raise TraceError("a trace must hold at least one op or collective, got none")
    _check_sizes(works)
    spans = _spans(swept, events, works)
    index = {id(work): i for i, work in enumerate(works)}
    edges = _edges(works, waits, index) if hosted else event_waits(events, swept, names, works)
    program = Program(tuple(Node(w.work, w.stream, w.name) for w in works), edges)
    calls = RankCalls(works, spans, waits, _host_starts(events, main if hosted else None), swept.steps, hosted)
    return timed(rank, program, calls)


def host_works(
    swept: Swept, info: dict[str, Any], rank: int, world_size: int, placement: Placement
) -> tuple[list[Work], list[Wait]]:
    """Ops and collectives of a host that computes, in order of issue, and when its main thread waited."""
    main = main_thread(swept)
    replicas = placement.data_parallel_group(rank) or _largest_group(info, rank, world_size)
    collectives, waits = host_collectives(swept, main, replicas, placement)
    works = _name_threads(swept, main) + collectives
    works.sort(key=lambda work: work.issue)
    return works, waits


def _check_sizes(works: list[Work]) -> None:
    """Sizes are whole numbers that anybody could have run: JSON also holds NaN, fractions and made-up ones."""
    for work in {work.work for work in works}:
        sizes = work.dims if isinstance(work, Op) else (work.num_bytes, work.group_size, work.ranks_per_node)
        if not all(isinstance(size, int) and 0 <= size <= MOST_SIZE for size in sizes):
            raise TraceError(f"sizes of a trace must be whole numbers from 0 to {MOST_SIZE}, got {work!s:.120}")


def main_thread(swept: Swept) -> Any:
    """The thread of the segments, or that with the most calls."""
    if swept.segment_thread is not None:
        return swept.segment_thread
    return max(swept.threads, key=lambda tid: len(swept.threads[tid]), default=None)


def _largest_group(info: dict[str, Any], rank: int, world_size: int) -> tuple[int, ...]:
    largest = range(world_size)
    groups = [g.get("ranks") or [] for g in info.get("pg_config") or [] if isinstance(g, dict)]
    sizes = [(len(ranks), tuple(ranks)) for ranks in [list(largest), *groups] if rank in ranks]
    return max(sizes, default=(0, ()))[1]


def _name_threads(swept: Swept, main: Any) -> list[Work]:
    """Compute of the host threads; what gloo's workers copy is part of their collectives."""
    names = {main: "compute"}
    host = [work for work in swept.host if work.stream == main or work.stream not in swept.worker_threads]
    for work in host:
        work.stream = names.setdefault(work.stream, f"host{len(names)}")
    return host


def _set_aside_slowed_steps(swept: Swept, events: RankEvents) -> None:
    """Steps in which an execution-trace observer ran too are several times slower; use the others, if there are any.

    The observer numbers the recorded functions; without it they are all 0.
    """
    numbered = observed_steps(events.ops, np.array(swept.steps)).tolist()
    if not all(numbered):
        swept.slowed_steps += [bounds for bounds, slow in zip(swept.steps, numbered, strict=True) if slow]
        swept.steps = [bounds for bounds, slow in zip(swept.steps, numbered, strict=True) if not slow]


def _spans(swept: Swept, events: RankEvents, works: list[Work]) -> tuple[Span, ...]:
    """Segments in order of time with their step; whole steps, or the whole trace, where there are none."""
    steps = np.array([start for start, _ in sorted(swept.steps)])
    found = sorted(swept.spans, key=lambda span: span.start_s)
    if steps.size and any(span.label != "step" for span in found):
        found = [span for span in found if span.label != "step" and not _within(span, swept.slowed_steps)]
    elif steps.size:
        found = [Span("step", *bounds) for bounds in sorted(swept.steps)]
    if not found:
        tables = [table for table in (events.ops, events.runtime, events.device) if len(table)]
        found = [Span("step", min(float(t.start.min()) for t in tables), max(float(t.end.max()) for t in tables))]
    found = _with_loss(found, works)
    out = []
    for position, span in enumerate(found):
        step = position if span.label == "step" else 0
        if steps.size:
            step = int(np.searchsorted(steps, span.start_s, "right")) - 1
        begin_s, end_s = span.start_s * MICROSECOND, span.end_s * MICROSECOND
        out.append(Span(span.label, begin_s, end_s, max(step, 0), span.micro_batch, span.stage))
    return tuple(out)


def _with_loss(spans: list[Span], works: list[Work]) -> list[Span]:
    """Pipelining computes the loss between two segments: it is part of the forward one before it."""
    issued = [work.issue for work in works]
    out = []
    for span, after in zip(spans, [*spans[1:], None], strict=True):
        if span.label == "forward":
            first, last = bisect_left(issued, span.end_s), bisect_left(issued, after.start_s if after else math.inf)
            between = works[first:last]
            losses = [i for i, work in enumerate(between) if work.work.kind == "cross_entropy"]
            if losses:
                joined = [work for work in between[losses[0] :] if not work.is_message]
                limit = after.start_s if after else math.inf
                span = replace(span, end_s=max(span.end_s, min(limit, max(work.end for work in joined))))
        out.append(span)
    return out


def _within(span: Span, bounds: list[tuple[float, float]]) -> bool:
    return any(start <= span.start_s < end for start, end in bounds)


def _edges(works: list[Work], waits: list[Wait], index: dict[int, int]) -> tuple[tuple[int, int, Dependency], ...]:
    """Synchronisation as the host thread issues it: the newest awaited work precedes what comes next."""
    ends: dict[int, float] = {}
    for wait in waits:
        ends[index[id(wait.work)]] = max(wait.end, ends.get(index[id(wait.work)], 0.0))
    pending = sorted((end, i) for i, end in ends.items())
    edges: list[tuple[int, int, Dependency]] = []
    last, awaited, at = -1, [], 0
    for i, work in enumerate(works):
        while at < len(pending) and pending[at][0] <= work.issue:
            awaited.append(pending[at][1])
            at += 1
        is_compute = isinstance(work.work, Op)
        if is_compute and work.stream != "compute":
            continue
        before = set(awaited) if is_compute else {*awaited, *([last] if last >= 0 else [])}
        edges.extend((b, i, Dependency.SYNCHRONISATION) for b in sorted(before) if b < i)
        if is_compute or work.blocks:
            last, awaited = i, []
    return tuple(edges)


def _host_starts(events: RankEvents, main: Any) -> NDArray[np.float64]:
    """When recorded calls of the main thread started (None: of all), weightless ones of any included, in order."""
    ops, runtime, marks = events.ops, events.runtime, [*events.annotations, *events.comms]
    own = np.ones(len(ops), dtype=np.bool_) if main is None else (ops["thread"] == main) | weightless(events)
    called = launching(events) if main is None else launching(events) & (runtime["thread"] == main)
    marked = np.array([each.start for each in marks if main is None or each.thread == main], dtype=np.float64)
    return np.sort(np.concatenate([ops.start[own], runtime.start[called], marked]))


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
