"""Longest paths through segments' events, from each clock of a stage to each clock.

Beside every time may run its *outside*, as in ``kernel``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.compiling import compiled
from stepsight.simulator.clock.engine import HOST, NUM_CLOCKS, ON_HOST, RUN, SEND, WAIT, Floats, Ints

Longs = NDArray[np.int64]

# Columns of events, see ``Segment.events``.
KIND, WHAT = 0, 1
FIRST, LAST, TIMES = 2, 3, 4  # column of RUN
CLOCK, FOLLOWS, EARLY = 2, 3, 4  # column of SEND; BLOCK has only the clock
# Columns of ``BlockPassTable.paths``.
COMPUTATION, FROM_HOST, OF_HOST = range(3)
# The walks over the events start from these clocks: the computation with the host, without which no node starts; each
# other stream; and, if there is a host, the computation without the host, and the host alone.
STARTS = np.where(
    np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]], dtype=np.bool_), 0.0, -np.inf
)
_EACH_ALONE = (3, 1, 2, 4)  # the starts from one clock each, in the order of clocks


class BlockPassTable(NamedTuple):
    """Durations of passages; seconds.

    Attributes:
        paths: Longest path of each passage from the computation; the same from the host, ``-inf`` if it launches
            nothing; the host's own time; shape ``(num_passages, 3)``.
        nodes, launches: Of the nodes of all passages, what each takes and what the host takes to launch it (0: it
            needs no launch), shape ``(num_nodes,)``.
        bounds: Nodes of passage ``i`` are ``bounds[i]`` to ``bounds[i + 1]``.
    """

    paths: Floats
    nodes: Floats
    launches: Floats
    bounds: Longs


class SegmentList(NamedTuple):
    """Segments.

    Attributes:
        events: Of all segments, shape ``(num_events, 8)``.
        places: First event of each segment, and the one behind its last; where its part of ``passage`` begins, and
            where its part of ``sent`` does; whether all of its clocks end together; shape ``(num_segments, 5)``.
        passage: Row of each segment's passages in a ``BlockPassTable``, one segment after the other.
        sent, launches: Seconds of the collectives that each segment sends, one segment after the other, and what the
            host takes to launch each (0: it needs no launch).
        compute_share: Part of a sent one that the computation loses, shape ``(num_segments,)``.
    """

    events: Ints
    places: Longs
    passage: Longs
    sent: Floats
    launches: Floats
    compute_share: Floats


class StreamSeconds(NamedTuple):
    """Breakdown of the time of segments; seconds.

    Attributes:
        passages: Of each passage by stream, shape ``(num_passages, num_streams)``.
        node_stream: Stream of each node of all passages.
        totals: Added to: seconds of what is run by stream, and last those that the computation waits for the host if
            nothing else is under way at the start; shape ``(num_streams + 1,)``.
    """

    passages: Floats
    node_stream: NDArray[np.int8]
    totals: Floats


NO_STREAMS = StreamSeconds(np.empty((0, 0)), np.empty(0, dtype=np.int8), np.empty(0))


class OutsideEvents(NamedTuple):
    """The share of every time that is spent in work outside the measured range; seconds.

    Attributes:
        paths, nodes: Of those of ``BlockPassTable``, same shapes.
        sent: Of those of ``SegmentList``, same shape.
        ends: Of those of ``run_events``, same shape; filled.
    """

    paths: Floats
    nodes: Floats
    sent: Floats
    ends: Floats


class _Clocks(NamedTuple):
    """The state of the walk over events.

    Attributes:
        now: The clocks, shape ``(HOST + 1,)``.
        finish: End of each event that was sent.
        now_outside, finish_outside: The parts of these outside of what was measured.
        counts: Whether to add to ``StreamSeconds.totals``.
    """

    now: Floats
    finish: Floats
    now_outside: Floats
    finish_outside: Floats
    counts: bool


@compiled
def run_events(
    segments: SegmentList,
    passages: BlockPassTable,
    streams: StreamSeconds,
    outside: OutsideEvents | None,
    ends: Floats,
) -> None:
    """Find the longest paths through segments' events from each of the starts to each clock.

    Args:
        segments: Which segments.
        passages: What they run.
        streams: Added to; arrays of length 0 if not wanted.
        outside: Filled, if wanted.
        ends: Filled: the clocks at the end of each segment from each of the first starts of ``STARTS``; ``-inf``
            where none leads; shape ``(num_segments, num_starts, HOST + 1)``.
    """
    longest = 0
    for at in range(len(ends)):
        longest = max(longest, segments.places[at, 1] - segments.places[at, 0])
    now, finish, now_outside, finish_outside = (
        np.empty(HOST + 1),
        np.empty(longest),
        np.empty(HOST + 1),
        np.empty(longest),
    )
    counts = len(streams.totals) > 0
    for at in range(len(ends)):
        joined = segments.places[at, 4] != 0
        for start in range(ends.shape[1]):
            for clock in range(HOST + 1):
                now[clock], now_outside[clock] = STARTS[start, clock], 0.0
            clocks = _Clocks(now, finish, now_outside, finish_outside, counts and start == 0)
            _run_from(segments, at, passages, clocks, streams, outside)
            last = 0
            for clock in range(1, NUM_CLOCKS):
                if now[clock] > now[last]:
                    last = clock
            for clock in range(HOST + 1):
                end = last if joined and clock < NUM_CLOCKS else clock
                ends[at, start, clock] = now[end]
                if outside is not None:
                    outside.ends[at, start, clock] = now_outside[end]


def _run_from(
    segments: SegmentList,
    at: int,
    passages: BlockPassTable,
    clocks: _Clocks,
    streams: StreamSeconds,
    outside: OutsideEvents | None,
) -> None:
    """Process all events of one segment, from the given clocks on."""
    events, now, share = segments.events, clocks.now, segments.compute_share[at]
    begin, first_passage, first_sent = segments.places[at, 0], segments.places[at, 2], segments.places[at, 3]
    pending, pending_outside, newest = 0.0, 0.0, -1  # time that the next run loses to messages sent since the last
    for row in range(begin, segments.places[at, 1]):
        event = row - begin
        kind, what = events[row, KIND], events[row, WHAT]
        if kind == RUN:
            now[0] += pending
            if outside is not None:
                clocks.now_outside[0] += pending_outside
            pending, pending_outside, newest = 0.0, 0.0, event
            if now[0] == -np.inf and now[HOST] == -np.inf:  # nothing has reached the computation yet
                continue
            passage = segments.passage[first_passage + what]
            first, last, node = events[row, FIRST], events[row, LAST], passages.bounds[passage]
            if last - first == passages.bounds[passage + 1] - node:
                _run_whole(passage, events[row, TIMES], passages, clocks, streams, outside)
            else:
                _run_nodes(node + first, node + last, passages, clocks, streams, outside)
        elif kind == WAIT:
            if clocks.finish[what] > now[0]:
                now[0] = clocks.finish[what]
                if outside is not None:
                    clocks.now_outside[0] = clocks.finish_outside[what]
            if what > newest and events[begin + what, KIND] == SEND and events[begin + what, EARLY] != ON_HOST:
                work = first_sent + events[begin + what, WHAT]
                pending -= share * segments.sent[work]
                if outside is not None:
                    pending_outside -= share * outside.sent[work]
        else:
            work = first_sent + what
            _send(segments, row, event, work, clocks, outside)
            if kind == SEND and events[row, EARLY] == ON_HOST:
                pass
            elif kind == SEND:
                pending += share * segments.sent[work]
                if outside is not None:
                    pending_outside += share * outside.sent[work]
            else:
                now[0] = clocks.finish[event]
                if outside is not None:
                    clocks.now_outside[0] = clocks.finish_outside[event]


def _run_whole(
    passage: int,
    times: int,
    passages: BlockPassTable,
    clocks: _Clocks,
    streams: StreamSeconds,
    outside: OutsideEvents | None,
) -> None:
    """Run a whole passage a number of times."""
    now, now_outside = clocks.now, clocks.now_outside
    own, of_host = passages.paths[passage, COMPUTATION], passages.paths[passage, OF_HOST]
    end = now[0] + times * own
    launched = now[HOST] + passages.paths[passage, FROM_HOST] + (times - 1) * max(own, of_host)
    by_host = launched > end
    now[0] = launched if by_host else end
    now[HOST] += times * of_host
    if clocks.counts:
        for stream in range(streams.passages.shape[1]):
            streams.totals[stream] += times * streams.passages[passage, stream]
        if by_host:
            streams.totals[-1] += launched - end
    if outside is not None:
        more = outside.paths[passage, COMPUTATION]
        if by_host:
            now_outside[0] = now_outside[HOST] + outside.paths[passage, FROM_HOST]
            if own >= of_host:
                now_outside[0] += (times - 1) * more
        else:
            now_outside[0] += times * more


def _run_nodes(
    begin: int,
    end: int,
    passages: BlockPassTable,
    clocks: _Clocks,
    streams: StreamSeconds,
    outside: OutsideEvents | None,
) -> None:
    """Run some nodes of a passage, one after the other."""
    now, now_outside = clocks.now, clocks.now_outside
    for node in range(begin, end):
        launch, seconds = passages.launches[node], passages.nodes[node]
        waited = 0.0
        if launch > 0.0:
            now[HOST] += launch
            if now[HOST] > now[0]:
                waited = now[HOST] - now[0]
                now[0] = now[HOST]
                if outside is not None:
                    now_outside[0] = now_outside[HOST]
        now[0] += seconds
        if clocks.counts:
            streams.totals[streams.node_stream[node]] += seconds
            streams.totals[-1] += waited
        if outside is not None:
            now_outside[0] += outside.nodes[node]


def _send(
    segments: SegmentList, row: int, event: int, work: int, clocks: _Clocks, outside: OutsideEvents | None
) -> None:
    """Run a collective on its own clock; it starts when the computation reaches it, or earlier if it is marked early.

    Args:
        segments, clocks, outside: As elsewhere.
        row: Of its event in ``SegmentList.events``.
        event: The number of that within its segment.
        work: Its place in ``SegmentList.sent``.
    """
    now, now_outside, finish = clocks.now, clocks.now_outside, clocks.finish
    clock, sends = segments.events[row, CLOCK], segments.events[row, KIND] == SEND
    launch, follows = segments.launches[work], segments.events[row, FOLLOWS]
    now[HOST] += launch
    last = clock
    if not sends or segments.events[row, EARLY] != 1:
        if now[0] > now[last]:
            last = 0
        if launch > 0.0 and now[HOST] > now[last]:
            last = HOST
    begin, part = now[last], now_outside[last]
    if sends and follows >= 0 and finish[follows] > begin:
        begin, part = finish[follows], clocks.finish_outside[follows]
    now[clock] = finish[event] = begin + segments.sent[work]
    if outside is not None:
        now_outside[clock] = clocks.finish_outside[event] = part + outside.sent[work]


def to_from(ends: Floats, *, carried: bool, nothing: float = -np.inf) -> Floats:
    """Longest paths from each clock to each clock.

    Args:
        ends: As filled by ``run_events``, shape ``(..., num_starts, HOST + 1)``.
        carried: Whether the host is a clock of its own, the last; otherwise it starts with the computation.
        nothing: Where no path leads.

    Returns:
        Shape ``(..., NUM_CLOCKS, NUM_CLOCKS)``, ``(..., HOST + 1, HOST + 1)`` if carried.
    """
    if carried and ends.shape[-2] == len(STARTS):
        return ends[..., _EACH_ALONE, :].swapaxes(-1, -2)
    paths = ends[..., :NUM_CLOCKS, :NUM_CLOCKS].swapaxes(-1, -2)
    if not carried:
        return paths
    beside = np.full((*ends.shape[:-2], HOST + 1, HOST + 1), nothing)  # nothing is launched, so the host is idle
    beside[..., :NUM_CLOCKS, :NUM_CLOCKS] = paths
    beside[..., HOST, HOST] = 0.0
    return beside
