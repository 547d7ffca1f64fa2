"""Longest paths through a segment's events, from each clock of its stage to each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.simulator.clock.codes import RUN, SEND, WAIT
from stepsight.simulator.clock.engine import Floats, Ints
from stepsight.simulator.compiling import compiled

# Columns of events, see ``Segment.events``.
KIND, WHAT = 0, 1
FIRST, LAST, TIMES = 2, 3, 4  # of RUN
CLOCK, FOLLOWS, EARLY = 2, 3, 4  # of SEND; BLOCK has the clock alone
# Columns of ``PassageTable.paths``.
COMPUTATION, FROM_HOST, OF_HOST = range(3)
# Elements of ``EventPaths.lost``.
TO_HOST, TO_SENT = range(2)


class PassageTable(NamedTuple):
    """The passages of a segment, timed; seconds.

    Attributes:
        paths: Longest path of each passage from the computation, the same from the host, and the host's own time;
            shape ``(num_passages, 3)``.
        by_stream: Seconds of each passage by stream, shape ``(num_passages, num_streams)``.
        nodes, launches: Of the nodes of all passages, what each takes and what the host takes to launch it (0: it
            needs no launch), shape ``(num_nodes,)``.
        streams: Stream of each node, same shape.
        bounds: Nodes of passage ``i`` are ``bounds[i]`` to ``bounds[i + 1]``.
    """

    paths: Floats
    by_stream: Floats
    nodes: Floats
    launches: Floats
    streams: NDArray[np.int8]
    bounds: NDArray[np.int64]


class SentTable(NamedTuple):
    """The collectives that a segment sends, timed; seconds.

    Attributes:
        seconds, launches: Of each, what it takes and what the host takes to launch it (0: it needs no launch).
        compute_share: Part of a sent one that the computation loses.
        has_host: Whether anything at all is launched.
        joined: Whether all clocks end together.
    """

    seconds: Floats
    launches: Floats
    compute_share: float
    has_host: bool
    joined: bool


class EventPaths(NamedTuple):
    """Longest paths through a segment; seconds; all arrays are filled.

    Attributes:
        transition: To clock, from clock; ``-inf`` where none leads; the host starts with the computation; shape
            ``(num_clocks, num_clocks)``.
        carried: The same where the host is a clock of its own, the last; shape ``(num_clocks + 1, num_clocks + 1)``.
        by_stream: Added to: seconds of what is run by stream, shape ``(num_streams,)``.
        lost: Added to: seconds that the computation waits for the host (``TO_HOST``) and for sent collectives
            (``TO_SENT``), when nothing else is under way at the start.
    """

    transition: Floats
    carried: Floats
    by_stream: Floats
    lost: Floats


class _Clocks(NamedTuple):
    """Where the walk over events is.

    Attributes:
        now: The clocks, the host's the last.
        finish: End of each event that was sent.
        counts: Whether to add to ``EventPaths.by_stream`` and ``lost``.
    """

    now: Floats
    finish: Floats
    counts: bool


@compiled
def run_events(events: Ints, passages: PassageTable, sent: SentTable, paths: EventPaths) -> None:
    """Find the longest paths through a segment's events from each clock to each.

    The walk over the events starts once from every clock alone.  Where there is a host, without which no node starts,
    there are two further starts: from the computation without the host, and from the host without the computation.
    """
    num_clocks = len(paths.transition)
    now, finish = np.empty(num_clocks + 1), np.empty(len(events))
    alone, by_host = num_clocks, num_clocks + 1
    paths.carried[:] = -np.inf
    for start in range(num_clocks + 2 if sent.has_host else num_clocks):
        now[:] = -np.inf
        if start < by_host:
            now[start if start < alone else 0] = 0.0
        if start == 0 or start == by_host:
            now[num_clocks] = 0.0
        _run_from(events, passages, sent, paths, _Clocks(now, finish, start == 0))
        latest = -np.inf
        for to in range(num_clocks):
            latest = max(latest, now[to])
        for to in range(num_clocks):
            end = latest if sent.joined else now[to]
            if start < alone:
                paths.transition[to, start] = end
            if start > 0 or not sent.has_host:
                paths.carried[to, start if start < alone else (start - alone) * num_clocks] = end
        if start == by_host:
            paths.carried[num_clocks, num_clocks] = now[num_clocks]
    if not sent.has_host:
        paths.carried[num_clocks, num_clocks] = 0.0


def _run_from(events: Ints, passages: PassageTable, sent: SentTable, paths: EventPaths, clocks: _Clocks) -> None:
    """Let all events happen, from where the clocks are."""
    now, finish, counts = clocks
    pending, newest = 0.0, -1  # seconds that the next run loses to what was sent since the last, and that run
    for at in range(len(events)):
        kind, what = events[at, KIND], events[at, WHAT]
        finish[at] = -np.inf
        if kind == RUN:
            now[0] += pending
            if counts:
                paths.lost[TO_SENT] += pending
            pending, newest = 0.0, at
            first, last = events[at, FIRST], events[at, LAST]
            begin = passages.bounds[what]
            if last - first == passages.bounds[what + 1] - begin:
                _run_whole(what, events[at, TIMES], passages, sent.has_host, paths, clocks)
            else:
                _run_nodes(begin + first, begin + last, passages, paths, clocks)
        elif kind == WAIT:
            if finish[what] > now[0]:
                if counts:
                    paths.lost[TO_SENT] += finish[what] - now[0]
                now[0] = finish[what]
            if what > newest and events[what, KIND] == SEND:
                pending -= sent.compute_share * sent.seconds[events[what, WHAT]]
        else:
            _send(events, at, sent, clocks)
            if kind == SEND:
                pending += sent.compute_share * sent.seconds[what]
            else:
                if counts:
                    paths.lost[TO_SENT] += finish[at] - now[0]
                now[0] = finish[at]


def _run_whole(
    what: int, times: int, passages: PassageTable, has_host: bool, paths: EventPaths, clocks: _Clocks
) -> None:
    """Run a whole passage some times."""
    now, host = clocks.now, len(clocks.now) - 1
    own, of_host = passages.paths[what, COMPUTATION], passages.paths[what, OF_HOST]
    end = now[0] + times * own
    if has_host:
        end = max(end, now[host] + passages.paths[what, FROM_HOST] + (times - 1) * max(own, of_host))
        now[host] += times * of_host
    if clocks.counts:
        if has_host:
            paths.lost[TO_HOST] += end - now[0] - times * own
        for stream in range(len(paths.by_stream)):
            paths.by_stream[stream] += times * passages.by_stream[what, stream]
    now[0] = end


def _run_nodes(begin: int, end: int, passages: PassageTable, paths: EventPaths, clocks: _Clocks) -> None:
    """Run some nodes of a passage one after the other."""
    now, host = clocks.now, len(clocks.now) - 1
    for node in range(begin, end):
        launch, seconds = passages.launches[node], passages.nodes[node]
        if launch > 0.0:
            now[host] += launch
            if clocks.counts:
                paths.lost[TO_HOST] += max(now[host] - now[0], 0.0)
            now[0] = max(now[0], now[host])
        now[0] += seconds
        if clocks.counts:
            paths.by_stream[passages.streams[node]] += seconds


def _send(events: Ints, at: int, sent: SentTable, clocks: _Clocks) -> None:
    """Run a collective on its own clock, from when the computation has reached it, unless it is early."""
    now, host = clocks.now, len(clocks.now) - 1
    what, clock, sends = events[at, WHAT], events[at, CLOCK], events[at, KIND] == SEND
    begin, launch = now[clock], sent.launches[what]
    now[host] += launch
    if not sends or events[at, EARLY] == 0:
        begin = max(begin, now[0])
        if launch > 0.0:
            begin = max(begin, now[host])
    if sends and events[at, FOLLOWS] >= 0:
        begin = max(begin, clocks.finish[events[at, FOLLOWS]])
    now[clock] = clocks.finish[at] = begin + sent.seconds[what]
