"""Longest paths through many segments at once; the rules of ``event_run``, without the parts that explain a time.

Beside every time runs its *outside*: the part of it that comes from work outside of what was measured (see ``lanes``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.simulator.clock.codes import RUN, SEND, WAIT
from stepsight.simulator.clock.engine import Floats, Ints
from stepsight.simulator.clock.event_run import (
    CLOCK,
    COMPUTATION,
    EARLY,
    FIRST,
    FOLLOWS,
    FROM_HOST,
    KIND,
    LAST,
    OF_HOST,
    TIMES,
    WHAT,
)
from stepsight.simulator.compiling import compiled

Longs = NDArray[np.int64]


class PassageStore(NamedTuple):
    """Passages, timed; seconds.

    Attributes:
        paths: As in ``PassageTable``, shape ``(num_passages, 3)``.
        nodes, launches, bounds: As in ``PassageTable``.
        outside: The part of ``paths`` outside of what was measured, same shape.
        nodes_outside: The same of ``nodes``.
    """

    paths: Floats
    nodes: Floats
    launches: Floats
    bounds: Longs
    outside: Floats
    nodes_outside: Floats


class SegmentList(NamedTuple):
    """Segments; arrays of shape ``(num_segments,)`` unless stated.

    Attributes:
        events: Of all distinct plans, one after the other, shape ``(num_events, 8)``.
        begin, end: Where the events of each segment are.
        passage: Index into the store of each segment's passages, one segment after the other.
        first_passage: Where those of each segment begin.
        sent, launches, sent_outside: Seconds of the collectives that each segment sends, one segment after the other;
            what the host takes to launch each; the part outside of what was measured.
        first_sent: Where those of each segment begin.
        compute_share, joined: As in ``Segment``.
    """

    events: Ints
    begin: Longs
    end: Longs
    passage: Longs
    first_passage: Longs
    sent: Floats
    launches: Floats
    sent_outside: Floats
    first_sent: Longs
    compute_share: Floats
    joined: NDArray[np.bool_]


class _Walk(NamedTuple):
    """Where the walk over a segment's events is, for every start.

    Attributes:
        now: The clocks, the host's the last, shape ``(num_clocks + 1, num_starts)``.
        outside: Of these, same shape.
        finish, finish_outside: Of each event that was sent, shape ``(num_events, num_starts)``.
    """

    now: Floats
    outside: Floats
    finish: Floats
    finish_outside: Floats


@compiled
def run_many_events(segments: SegmentList, store: PassageStore, has_host: bool, paths: Floats, outside: Floats) -> None:
    """Find the longest paths through segments from each clock to each.

    Args:
        segments: Which segments.
        store: Their passages.
        has_host: Whether anything at all is launched.
        paths: Filled: to clock, from clock, ``-inf`` where none leads; shape ``(num_segments, K, K)``.  With three
            clocks the host starts with the computation, the fourth is the host's own.
        outside: Filled: the part outside of what was measured, same shape.
    """
    num_clocks = 3
    carried = paths.shape[1] > num_clocks
    starts = paths.shape[1] if has_host or not carried else num_clocks
    longest = 1
    for at in range(len(segments.begin)):
        longest = max(longest, segments.end[at] - segments.begin[at])
    walk = _Walk(
        np.empty((num_clocks + 1, starts)),
        np.empty((num_clocks + 1, starts)),
        np.empty((longest, starts)),
        np.empty((longest, starts)),
    )
    paths[:] = -np.inf
    outside[:] = 0.0
    for at in range(len(segments.begin)):
        walk.now[:] = -np.inf
        walk.outside[:] = 0.0
        for start in range(starts):
            walk.now[start, start] = 0.0
        if not carried or not has_host:
            walk.now[num_clocks, 0] = 0.0  # the host starts with the computation
        _walk_events(segments, at, store, has_host, walk)
        for start in range(starts):
            latest, of_latest = -np.inf, 0.0
            for to in range(num_clocks):
                if walk.now[to, start] > latest:
                    latest, of_latest = walk.now[to, start], walk.outside[to, start]
            for to in range(num_clocks):
                paths[at, to, start] = latest if segments.joined[at] else walk.now[to, start]
                outside[at, to, start] = of_latest if segments.joined[at] else walk.outside[to, start]
        if carried:
            paths[at, num_clocks, num_clocks] = walk.now[num_clocks, num_clocks] if has_host else 0.0


def _walk_events(segments: SegmentList, at: int, store: PassageStore, has_host: bool, walk: _Walk) -> None:
    """Let all events of one segment happen, from every start."""
    events, first_passage, first_sent = segments.events, segments.first_passage[at], segments.first_sent[at]
    now, finish, begin, starts = walk.now, walk.finish, segments.begin[at], walk.now.shape[1]
    share = segments.compute_share[at]
    pending, pending_outside, newest = 0.0, 0.0, -1  # that the next run loses to what was sent since the last one
    for row in range(begin, segments.end[at]):
        event = row - begin
        kind, what = events[row, KIND], events[row, WHAT]
        if kind == RUN:
            for start in range(starts):
                now[0, start] += pending
                walk.outside[0, start] += pending_outside
            pending, pending_outside, newest = 0.0, 0.0, event
            passage = segments.passage[first_passage + what]
            first, last = events[row, FIRST], events[row, LAST]
            base = store.bounds[passage]
            if last - first == store.bounds[passage + 1] - base:
                _run_passage(passage, events[row, TIMES], store, has_host, walk)
            else:
                _run_cut(base + first, base + last, store, walk)
        elif kind == WAIT:
            for start in range(starts):
                if finish[what, start] > now[0, start]:
                    now[0, start] = finish[what, start]
                    walk.outside[0, start] = walk.finish_outside[what, start]
            if what > newest and events[begin + what, KIND] == SEND:
                work = first_sent + events[begin + what, WHAT]
                pending -= share * segments.sent[work]
                pending_outside -= share * segments.sent_outside[work]
        else:
            work = first_sent + what
            _send_one(
                events, row, event, (segments.sent[work], segments.launches[work], segments.sent_outside[work]), walk
            )
            if kind == SEND:
                pending += share * segments.sent[work]
                pending_outside += share * segments.sent_outside[work]
            else:
                for start in range(starts):
                    now[0, start] = finish[event, start]
                    walk.outside[0, start] = walk.finish_outside[event, start]


def _run_passage(passage: int, times: int, store: PassageStore, has_host: bool, walk: _Walk) -> None:
    """Run a whole passage some times."""
    now, host = walk.now, len(walk.now) - 1
    own, by_host, of_host = (
        store.paths[passage, COMPUTATION],
        store.paths[passage, FROM_HOST],
        store.paths[passage, OF_HOST],
    )
    more, again = store.outside[passage, COMPUTATION], max(own, of_host)
    for start in range(now.shape[1]):
        end, part = now[0, start] + times * own, walk.outside[0, start] + times * more
        if has_host:
            launched = now[host, start] + by_host + (times - 1) * again
            if launched > end:
                end = launched
                part = walk.outside[host, start] + store.outside[passage, FROM_HOST]
                if own >= of_host:
                    part += (times - 1) * more
            now[host, start] += times * of_host
        now[0, start] = end
        walk.outside[0, start] = part


def _run_cut(begin: int, end: int, store: PassageStore, walk: _Walk) -> None:
    """Run some nodes of a passage one after the other."""
    now, host = walk.now, len(walk.now) - 1
    for node in range(begin, end):
        launch, seconds, part = store.launches[node], store.nodes[node], store.nodes_outside[node]
        for start in range(now.shape[1]):
            if launch > 0.0:
                now[host, start] += launch
                if now[host, start] > now[0, start]:
                    now[0, start] = now[host, start]
                    walk.outside[0, start] = walk.outside[host, start]
            now[0, start] += seconds
            walk.outside[0, start] += part


def _send_one(events: Ints, row: int, event: int, work: tuple[float, float, float], walk: _Walk) -> None:
    """Run a collective on its own clock; ``work``: its seconds, its launch, its outside."""
    now, host = walk.now, len(walk.now) - 1
    seconds, launch, part = work
    clock, sends = events[row, CLOCK], events[row, KIND] == SEND
    for start in range(now.shape[1]):
        begin, came = now[clock, start], walk.outside[clock, start]
        now[host, start] += launch
        if not sends or events[row, EARLY] == 0:
            if now[0, start] > begin:
                begin, came = now[0, start], walk.outside[0, start]
            if launch > 0.0 and now[host, start] > begin:
                begin, came = now[host, start], walk.outside[host, start]
        if sends and events[row, FOLLOWS] >= 0 and walk.finish[events[row, FOLLOWS], start] > begin:
            begin = walk.finish[events[row, FOLLOWS], start]
            came = walk.finish_outside[events[row, FOLLOWS], start]
        now[clock, start] = walk.finish[event, start] = begin + seconds
        walk.outside[clock, start] = walk.finish_outside[event, start] = came + part
