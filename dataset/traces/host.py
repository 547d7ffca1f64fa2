"""Collectives and waits as the host sees them: annotations, c10d calls and the spans of gloo's worker threads."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.rank_trace import Rendezvous
from stepsight.dataset.kinds import gloo_spans
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.traces.placement import Placement
from stepsight.dataset.traces.sweep import Call, Swept, Work

Intervals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch of the main thread that is spent waiting; microseconds."""

    work: Work
    start: float
    end: float


def host_collectives(
    swept: Swept, main: Any, replicas: tuple[int, ...], placement: Placement
) -> tuple[list[Work], list[Wait]]:
    """Collectives of one rank in order of issue, and when the main thread waited for them.

    Args:
        swept: What was found.
        main: The thread that computes.
        replicas: Ranks of the collectives that do not name any: DDP's.
        placement: Where ranks lie.
    """
    works: list[Work] = []
    waits: list[Wait] = []
    by_key: dict[tuple[str, str], Work] = {}
    implicit: list[Work] = []
    carriers = _Carriers(swept.workers)
    messages: dict[tuple[str, ...], int] = {}
    free: dict[tuple[str, ...], float] = {}  # when a stand-in's links are
    for call in sorted(swept.calls, key=lambda call: call.start):
        values = call.values
        ranks = replicas
        if "ranks" in values:
            ranks = tuple(int(part) for part in values["ranks"].split(","))
        group = placement.axis(ranks) or values.get("group", "dp")
        direction = values.get("direction", "")
        blocks = values.get("async", "0") == "0"
        carrier = carriers.take(direction or values["kind"], call)
        if len(ranks) < 2:
            continue
        start, end = (call.start, call.end) if blocks else carrier or (call.start, call.end)
        if "seconds" in values and not blocks:  # nobody but its annotation tells when it was over
            link = (group, direction and values["ranks"], direction)
            start = max(call.start, free.get(link, 0.0))
            end = free[link] = start + 1e6 * float(values["seconds"])
        per_node = placement.ranks_per_node(ranks, len(ranks))
        collective = Collective(values["kind"], int(values["num_bytes"]), len(ranks), per_node)
        # A message is met by its number between two ranks, everything else by its number in the group.
        key = (group, direction and values.get("ranks", ""), values["kind"] if "seq" not in values else "")
        number = messages[key] = messages.get(key, -1) + 1
        meets = Rendezvous(f"{group}:{values['ranks']}" if direction else group, number, ranks)
        name = f"{values['kind']}.{direction}" if direction else values["kind"]
        work = Work(collective, name, call.start, start, end, end - start, group, meets=meets, blocks=blocks)
        works.append(work)
        if blocks:
            waits.append(Wait(work, call.start, call.end))
        elif "seq" in values:
            by_key[values["group"], values["seq"]] = work
        else:
            implicit.append(work)
    for wait in sorted(swept.waits, key=lambda wait: wait.start):
        awaited = by_key.get((wait.values.get("group", ""), wait.values.get("seq", "")))
        if awaited is not None:
            waits.append(Wait(awaited, wait.start, wait.end))
            if awaited.end > wait.end or awaited.end == awaited.start:
                awaited.end, awaited.own = wait.end, max(wait.end - awaited.start, 0.0)
    known = {id(wait.work) for wait in waits}  # a communication hook of DDP is waited for where nothing records it
    implicit += [work for work in by_key.values() if id(work) not in known and not work.is_message]
    _end_with_segments(implicit, swept)
    waits.extend(_invisible_waits(implicit, swept.threads.get(main, [])))
    return works, waits


def _end_with_segments(works: list[Work], swept: Swept) -> None:
    """End collectives of DDP with their segment: it hands back gradients that are reduced."""
    for work in works:
        limit = min((span.end_s for span in swept.spans if span.start_s <= work.issue < span.end_s), default=work.end)
        work.end = max(min(work.end, limit), work.start)
        work.own = work.end - work.start


class _Carriers:
    """Worker spans, each taken once, first come first served within a kind."""

    def __init__(self, workers: list[tuple[str, float, float]]) -> None:
        self._queues: dict[str, list[tuple[float, float]]] = {}
        for kind, start, end in sorted(workers, key=lambda worker: -worker[1]):
            self._queues.setdefault(kind, []).append((start, end))

    def take(self, kind: str, call: Call) -> tuple[float, float] | None:
        best: list[tuple[float, float]] | None = None
        for name in gloo_spans(kind):
            queue = self._queues.get(name, [])
            while queue and queue[-1][0] < call.start:  # older than the call: it belongs to none
                queue.pop()
            if queue and (best is None or queue[-1] < best[-1]):
                best = queue
        return best.pop() if best else None


def _invisible_waits(works: list[Work], calls: list[tuple[float, float]]) -> list[Wait]:
    """Waits that nothing records: an end of a collective that falls between two calls of the main thread.

    All of a step are awaited at the same place (the end of DDP's backward), so each synchronises there: where the next
    wait that can be seen ends.
    """
    if not works or not calls:
        return []
    starts, ends = np.array(calls).T
    out: list[Wait] = []
    for work in works:
        at = int(np.searchsorted(starts, work.end, "right")) - 1
        if at >= 0 and ends[at] < work.end:
            begin = max(float(ends[at]), work.issue)
            out.append(Wait(work, begin, max(begin, work.end)))
    until = sorted(wait.end for wait in out)
    seen = {id(wait.work) for wait in out}
    for work in works:
        place = bisect_left(until, work.end)
        if id(work) not in seen and place < len(until):
            out.append(Wait(work, until[place], until[place]))
    return out


def merge(intervals: list[tuple[float, float]]) -> Intervals:
    """Disjoint intervals in order, shape ``(k, 2)``, that cover the same."""
    out: list[list[float]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        elif end > start:
            out.append([start, end])
    return np.array(out).reshape(-1, 2)


def overlap(intervals: Intervals, start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of each stretch ``start … end`` the disjoint intervals cover; same shape."""
    if not len(intervals):
        return np.zeros(len(start))
    length = intervals[:, 1] - intervals[:, 0]
    marks = intervals.ravel()
    covered = np.concatenate([[0.0], np.cumsum(length)])
    total = np.empty(marks.size)
    total[0::2], total[1::2] = covered[:-1], covered[1:]
    return np.asarray(np.interp(end, marks, total) - np.interp(start, marks, total))


def waited(intervals: Intervals, start: float, end: float) -> float:
    """``overlap`` of a single stretch."""
    return float(overlap(intervals, np.array([start]), np.array([end]))[0])
