"""Longest paths through static graphs in issue order, and through segments' events from each clock of a stage to each.

Ties are broken towards the dependency that is listed first, so results never depend on chance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import compiled

RUN, SEND, BLOCK, WAIT = range(4)  # events of a segment: see ``Segment.events``
# Clocks of a stage: its computation; replicas' traffic; the traffic of a second group (hybrid shards, experts).
COMPUTE, DATA, SECOND = range(3)
NUM_CLOCKS = 3
HOST = NUM_CLOCKS  # the clock of the host, which launches, if it has its own
ON_HOST = 2  # replaces the flag "early" of an event that sends: work of the host itself

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@compiled
def longest_paths(seconds: Floats, pointer: Ints, before: Ints, ready: Floats, finish: Floats, critical: Ints) -> None:
    """Finish times of all nodes of a graph, and for each node the dependency that decided its start.

    Args:
        seconds: Duration of each node, shape ``(n,)``; a node only depends on earlier ones.
        pointer, before: Dependencies in CSR: those of node ``i`` are ``before[pointer[i]:pointer[i + 1]]``.
        ready: Earliest start of each node by itself, ``-inf`` where its dependencies alone decide.
        finish: Filled, shape ``(n,)``; ``-inf`` for nodes that nothing ready leads to.
        critical: Filled, shape ``(n,)``: the dependency that decided the start, -1 if ``ready`` did.
    """
    for node in range(len(seconds)):
        start = ready[node]
        cause = -1
        for at in range(pointer[node], pointer[node + 1]):
            if finish[before[at]] > start:
                start = finish[before[at]]
                cause = before[at]
        finish[node] = start + seconds[node]
        critical[node] = cause


class DelayedGraph(NamedTuple):
    """A graph whose dependencies have durations."""

    order: Ints  # the nodes such that each comes after those that it depends on
    # pointer, edges: edges into node i are edges[pointer[i]:pointer[i + 1]]
    pointer: Ints
    edges: Ints
    # source, delay: of each edge: the node it comes from, and the time from that node's end
    source: Ints
    delay: Floats


@compiled
def delayed_paths(graph: DelayedGraph, seconds: Floats, ready: Floats, ends: Floats, cause: Ints) -> None:
    """End times of all nodes of such a graph, and the edge that decided each start, -1 if ``ready`` did.

    ``seconds``, ``ready``: duration of each node, and its earliest start by itself, ``-inf`` where its dependencies
    alone decide; ``ends``, ``cause``: filled; all of shape ``(n,)``.
    """
    for at in range(len(graph.order)):
        node = graph.order[at]
        start = ready[node]
        cause[node] = -1
        for place in range(graph.pointer[node], graph.pointer[node + 1]):
            edge = graph.edges[place]
            if ends[graph.source[edge]] + graph.delay[edge] > start:
                start = ends[graph.source[edge]] + graph.delay[edge]
                cause[node] = edge
        ends[node] = start + seconds[node]


@compiled
def add_path(critical: Ints, node: int, work: Ints, amount: Floats, weight: float, counts: Floats) -> None:
    """Walk back from a node and add ``weight * amount`` of every node on its critical path to ``counts[work]``."""
    while node >= 0:
        counts[work[node]] += weight * amount[node]
        node = critical[node]


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
    """Durations of passages; seconds."""

    # longest path of each passage from the computation; the same from the host, -inf if it launches nothing; the host's
    # own time; shape (num_passages, 3)
    paths: Floats
    # nodes, launches: what each node of all passages takes, and what the host takes to launch it (0: no launch)
    nodes: Floats
    launches: Floats
    bounds: Longs  # nodes of passage i are bounds[i] to bounds[i + 1]


class SegmentList(NamedTuple):
    """Segments."""

    events: Ints  # of all segments, shape (num_events, 8)
    # first event of each segment, and the one behind its last; where its part of passage begins, and where its part of
    # sent does; whether all of its clocks end together; shape (num_segments, 5)
    places: Longs
    passage: Longs  # row of each segment's passages in a BlockPassTable, one segment after the other
    # sent, launches: seconds of the collectives that each segment sends, one segment after the other, and what the host
    # takes to launch each (0: it needs no launch)
    sent: Floats
    launches: Floats
    compute_share: Floats  # part of a sent one that the computation loses, shape (num_segments,)


class StreamSeconds(NamedTuple):
    """Breakdown of the time of segments; seconds."""

    passages: Floats  # of each passage by stream, shape (num_passages, num_streams)
    node_stream: NDArray[np.int8]  # stream of each node of all passages
    # added to: seconds of what is run by stream, and last those that the computation waits for the host if nothing else
    # is under way at the start; shape (num_streams + 1,), or (0,) if it is not wanted
    totals: Floats


@compiled
def run_events(segments: SegmentList, passages: BlockPassTable, streams: StreamSeconds, ends: Floats) -> None:
    """Find the longest paths through segments' events from each of the starts to each clock.

    Args:
        segments: Which segments.
        passages: What they run.
        streams: Added to.
        ends: Filled: the clocks at the end of each segment from each of the first starts of ``STARTS``; ``-inf``
            where none leads; shape ``(num_segments, num_starts, HOST + 1)``.
    """
    longest, starts = 0, ends.shape[1]
    for at in range(len(ends)):
        longest = max(longest, segments.places[at, 1] - segments.places[at, 0])
    finish = np.empty((longest, starts))  # of each sent event
    for at in range(len(ends)):
        now = ends[at]
        for start in range(starts):
            for clock in range(HOST + 1):
                now[start, clock] = STARTS[start, clock]
        _run_segment(segments, at, passages, streams, now, finish)
        if segments.places[at, 4] != 0:  # all streams' clocks end together, with the last of them
            for start in range(starts):
                last = max(now[start, 0], now[start, 1], now[start, 2])
                now[start, 0], now[start, 1], now[start, 2] = last, last, last


def _run_segment(
    segments: SegmentList, at: int, passages: BlockPassTable, streams: StreamSeconds, now: Floats, finish: Floats
) -> None:
    """Run the events of a segment from all starts at once.

    ``now``: the clocks, shape ``(num_starts, HOST + 1)``; ``finish``: the end of each sent event, shape ``(num_events,
    num_starts)``.
    """
    events, sent, share = segments.events, segments.sent, segments.compute_share[at]
    begin, first_passage, first_sent = segments.places[at, 0], segments.places[at, 2], segments.places[at, 3]
    pending, newest = 0.0, -1  # time that the next run loses to messages sent since the last
    for row in range(begin, segments.places[at, 1]):
        event = row - begin
        kind, what = events[row, KIND], events[row, WHAT]
        if kind == RUN:
            for start in range(len(now)):
                now[start, 0] += pending
            pending, newest = 0.0, event
            passage = segments.passage[first_passage + what]
            first, last, node = events[row, FIRST], events[row, LAST], passages.bounds[passage]
            if last - first == passages.bounds[passage + 1] - node:
                _run_whole(passage, events[row, TIMES], passages.paths, now, streams)
            else:
                _run_nodes((node + first, node + last), passages, now, streams)
        elif kind == WAIT:
            for start in range(len(now)):
                now[start, 0] = max(now[start, 0], finish[what, start])
            if what > newest and events[begin + what, KIND] == SEND and events[begin + what, EARLY] != ON_HOST:
                pending -= share * sent[first_sent + events[begin + what, WHAT]]
        else:
            work = first_sent + what
            _send(events[row], event, (segments.launches[work], sent[work]), now, finish)
            if kind == SEND and events[row, EARLY] != ON_HOST:
                pending += share * sent[work]
            elif kind != SEND:
                for start in range(len(now)):
                    now[start, 0] = finish[event, start]


def _run_whole(passage: int, times: int, paths: Floats, now: Floats, streams: StreamSeconds) -> None:
    """Run a whole passage a number of times."""
    own, from_host, of_host = paths[passage, COMPUTATION], paths[passage, FROM_HOST], paths[passage, OF_HOST]
    for start in range(len(now)):
        if now[start, 0] == -np.inf and now[start, HOST] == -np.inf:  # nothing has reached the computation yet
            continue
        end = now[start, 0] + times * own
        launched = now[start, HOST] + from_host + (times - 1) * max(own, of_host)
        now[start, 0] = max(end, launched)
        now[start, HOST] += times * of_host
        if start == 0 and len(streams.totals) > 0:
            for stream in range(streams.passages.shape[1]):
                streams.totals[stream] += times * streams.passages[passage, stream]
            if launched > end:
                streams.totals[-1] += launched - end


def _run_nodes(span: tuple[int, int], passages: BlockPassTable, now: Floats, streams: StreamSeconds) -> None:
    """Run some nodes of a passage, one after the other."""
    nodes, launches = passages.nodes, passages.launches
    for start in range(len(now)):
        clock, host = now[start, 0], now[start, HOST]
        if clock == -np.inf and host == -np.inf:  # nothing has reached the computation yet
            continue
        counts = start == 0 and len(streams.totals) > 0
        for node in range(span[0], span[1]):
            if launches[node] > 0.0:
                host += launches[node]
                if host > clock:
                    if counts:
                        streams.totals[-1] += host - clock
                    clock = host
            clock += nodes[node]
            if counts:
                streams.totals[streams.node_stream[node]] += nodes[node]
        now[start, 0], now[start, HOST] = clock, host


def _send(event: Ints, number: int, seconds: tuple[float, float], now: Floats, finish: Floats) -> None:
    """Run a collective on its own clock; it starts when the computation reaches it, or earlier if it is marked early.

    ``seconds``: what the host takes to launch it, and what it takes.
    """
    launch, length = seconds
    clock, sends, follows = event[CLOCK], event[KIND] == SEND, event[FOLLOWS]
    for start in range(len(now)):
        now[start, HOST] += launch
        begin = now[start, clock]
        if not sends or event[EARLY] != 1:
            begin = max(begin, now[start, 0])
            if launch > 0.0:
                begin = max(begin, now[start, HOST])
        if sends and follows >= 0:
            begin = max(begin, finish[follows, start])
        now[start, clock] = finish[number, start] = begin + length


def to_from(ends: Floats, *, carried: bool) -> Floats:
    """Longest paths from each clock to each, shape ``(..., K, K)``, from the ends that ``run_events`` filled in.

    ``carried``: whether the host is a clock of its own, the last; otherwise it starts with the computation.
    """
    if carried and ends.shape[-2] == len(STARTS):
        return ends[..., _EACH_ALONE, :].swapaxes(-1, -2)
    paths = ends[..., :NUM_CLOCKS, :NUM_CLOCKS].swapaxes(-1, -2)
    if not carried:
        return paths
    beside = np.full((*ends.shape[:-2], HOST + 1, HOST + 1), -np.inf)  # nothing is launched, so the host is idle
    beside[..., :NUM_CLOCKS, :NUM_CLOCKS] = paths
    beside[..., HOST, HOST] = 0.0
    return beside
