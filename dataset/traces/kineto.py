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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Dependency, Node, Program
from stepsight.dataset.graph.rank_trace import RankTrace, Span
from stepsight.dataset.kinds.op import MOST_SIZE, Op
from stepsight.dataset.traces.device_kernels import device_work, event_waits, stream_names
from stepsight.dataset.traces.event_columns import RankEvents, read_columns
from stepsight.dataset.traces.host import Wait, host_collectives
from stepsight.dataset.traces.node_times import MICROSECOND, RankCalls, timed
from stepsight.dataset.traces.placement import Placement
from stepsight.dataset.traces.step_bounds import observed_steps
from stepsight.dataset.traces.sweep import Swept, Work, launching, sweep, weightless

MOST_RANKS = 2**20  # of a job that anybody traced


def read_kineto(path: Path, placement: Placement | None = None) -> RankTrace:
    """Read one rank's ``.json`` or ``.json.gz``.

    Raises:
        TraceError: If it is no whole Kineto trace, or holds nothing that could be a node.
    """
    events = read_columns(path)
    try:
        return rank_trace(events, placement or Placement())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path} must hold well-formed events, got {type(error).__name__}: {error}") from None


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
