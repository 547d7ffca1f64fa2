"""Host threads as chains of calls: launches, waits and marks, with the host's work between them.

A thread that waits for another records nothing.  Where a gap between two calls of a thread encloses calls of another
thread, and the thread itself records nothing meanwhile, the gap is a wait, and the other thread's last call precedes
what follows.  So backward passes, which autograd runs on a thread of its own, hang together with the thread that
starts them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.traces.event_columns import RankEvents

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LEAST_WAIT_US = 15.0  # shorter gaps are the host's own work


@dataclass
class HostCalls:
    """Calls of host threads on which other nodes depend, in order of start; microseconds.

    Shapes: ``n`` calls.

    Attributes:
        start: ``(n,)``.
        end: ``(n,)``.
        thread: ``(n,)``.
        row: ``(n,)``: row of the runtime table, -1 for marks.
        name: ``(n,)``: number of a name.
    """

    start: Floats
    end: Floats
    thread: Ints
    row: Ints
    name: Ints

    def __len__(self) -> int:
        return len(self.start)

    def sorted(self) -> HostCalls:
        """The calls in order; a call that begins within the previous one on its thread begins when that ends."""
        order = np.lexsort((self.end, self.start))
        start, end, thread = self.start[order].copy(), self.end[order].copy(), self.thread[order]
        for each in np.unique(thread):
            own = np.flatnonzero(thread == each)
            latest = np.maximum.accumulate(end[own])
            start[own[1:]] = np.maximum(start[own[1:]], latest[:-1])
            end[own] = np.maximum(end[own], start[own])
        again = np.lexsort((end, start))
        order = order[again]
        return HostCalls(start[again], end[again], self.thread[order], self.row[order], self.name[order])


@dataclass
class HostEdges:
    """Order of host calls: ``(e,)`` each; delays in microseconds."""

    source: Ints
    target: Ints
    delay: Floats


def chain(calls: HostCalls, events: RankEvents) -> HostEdges:
    """Order the calls of each thread, and across threads where one waits for another."""
    found = [_chain_of(calls, int(thread), events) for thread in np.unique(calls.thread)]
    source, target, delay = (
        (np.concatenate([each[column] for each in found]) for column in range(3))
        if found
        else (
            np.zeros(0, dtype=np.int64),
            np.zeros(0, dtype=np.int64),
            np.zeros(0),
        )
    )
    return HostEdges(source, target, delay)


def _chain_of(calls: HostCalls, thread: int, events: RankEvents) -> tuple[Ints, Ints, Floats]:
    """Edges to the calls of one thread, in order: from the previous call, and from calls that it waited for."""
    own = np.flatnonzero(calls.thread == thread)
    busy = np.sort(events.ops.start[events.ops["thread"] == thread])
    since = np.concatenate([[-np.inf], calls.end[own[:-1]]])
    gap = calls.start[own] - since
    low = np.searchsorted(calls.start, since)
    others = (own - low) > np.arange(len(own)) - np.searchsorted(own, low)  # calls of other threads in the gap
    waited = {
        place: other
        for place in np.flatnonzero((gap > _LEAST_WAIT_US) & others).tolist()
        if (other := _awaited(calls, busy, float(since[place]), int(own[place]))) >= 0
    }
    places = np.array([*waited], dtype=np.int64)
    awaited = np.array([*waited.values()], dtype=np.int64)
    gap[places] = 0.0
    source = np.concatenate([awaited, own[:-1]])
    target = np.concatenate([own[places], own[1:]])
    delay = np.concatenate([calls.start[own[places]] - calls.end[awaited], gap[1:]])
    order = np.argsort(target, kind="stable")
    return source[order], target[order], delay[order]


def _awaited(calls: HostCalls, busy: Floats, since: float, node: int) -> int:
    """The call of another thread that a thread waited for before ``node``, -1: none."""
    low, high = int(np.searchsorted(calls.start, since)), node
    while high > low and calls.end[high - 1] > calls.start[node]:
        high -= 1
    own = calls.thread[low:high] == calls.thread[node]
    between = np.flatnonzero(~own) + low
    if not len(between):
        return -1
    last = int(between[np.argmax(calls.end[between])])
    first = int(between[0])
    recorded = np.searchsorted(busy, calls.end[last]) - np.searchsorted(busy, calls.start[first], "right")
    return last if recorded == 0 else -1
