"""Longest paths through events, rule by rule, on events written by hand."""

from dataclasses import dataclass

import numpy as np
import pytest

from stepsight.simulator.clock.engine import BLOCK, DATA, HOST, NUM_CLOCKS, RUN, SECOND, SEND, WAIT, Floats, Ints
from stepsight.simulator.clock.event_run import (
    STARTS,
    BlockPassTable,
    OutsideEvents,
    SegmentList,
    StreamSeconds,
    run_events,
    to_from,
)

INF = np.inf
Row = tuple[int, ...]

# BlockPass 0 has nodes of 1, 2 and 4 s on streams 0, 1, 0; passage 1 one node of 8 s on stream 1.
SECONDS = ([1.0, 2.0, 4.0], [8.0])
STREAM = ([0, 1, 0], [1])
SENT_S = (10.0, 3.0)


@dataclass
class Paths:
    """Longest paths through a segment: with the host and the computation as one clock, and as two; seconds by stream
    and waiting for the host."""

    transition: Floats
    carried: Floats
    by_stream: Floats
    host: float


def walk(
    events: Ints, launches: tuple[float, float], share: float, joined: bool, scale: float
) -> tuple[Floats, Floats, StreamSeconds]:
    """Ends from all starts, with the seconds of all nodes and collectives as their parts outside; and the streams'."""
    launch, sent_launch = launches
    paths, parts = [], []
    for seconds in SECONDS:
        nodes = scale * np.array(seconds)
        launched = launch * np.arange(1, len(seconds) + 1) + nodes[::-1].cumsum()[::-1]
        first = int(launched.argmax())
        paths.append((nodes.sum(), launched[first] if launch else -INF, launch * len(seconds)))
        parts.append((nodes.sum(), nodes[first:].sum(), 0.0))
    nodes, sent = scale * np.concatenate(SECONDS), scale * np.array(SENT_S)
    passages = BlockPassTable(np.array(paths), nodes, np.full(4, launch), np.array([0, 3, 4]))
    places = np.array([[0, len(events), 0, 0, joined]])
    segments = SegmentList(events, places, np.arange(2), sent, np.full(2, sent_launch), np.array([share]))
    of_passages = np.array([np.bincount(s, t, minlength=2) for s, t in zip(STREAM, SECONDS, strict=True)])
    streams = StreamSeconds(of_passages, np.concatenate(STREAM).astype(np.int8), np.zeros(3))
    ends = np.full((1, len(STARTS) if launch > 0 or sent_launch > 0 else NUM_CLOCKS, HOST + 1), np.nan)
    outside = OutsideEvents(np.array(parts), nodes, sent, np.full(ends.shape, np.nan))
    run_events(segments, passages, streams, outside, ends)
    return ends[0], outside.ends[0], streams


def run(*rows: Row, launch: float = 0.0, sent_launch: float = 0.0, share: float = 0.0, joined: bool = False) -> Paths:
    """Every node takes the host ``launch``, every collective ``sent_launch``.

    Checks besides that the part outside is the derivative by the seconds that it comes from, where there is one.
    """
    events = np.array([[*row, *[0] * (8 - len(row))] for row in rows], dtype=np.int32).reshape(-1, 8)
    given = events, (launch, sent_launch), share, joined
    ends, parts, streams = walk(*given, 1.0)
    step = 2.0**-20
    there = np.isfinite(ends)
    more = np.where(there, walk(*given, 1.0 + step)[0] - np.where(there, ends, 0.0), 0.0) / step
    less = np.where(there, np.where(there, ends, 0.0) - walk(*given, 1.0 - step)[0], 0.0) / step
    smooth = there & np.isclose(more, less)
    assert parts[smooth] == pytest.approx(more[smooth], rel=1e-6, abs=1e-6)
    transition, carried = to_from(ends, carried=False), to_from(ends, carried=True)
    return Paths(transition, carried, streams.totals[:-1], float(streams.totals[-1]))


WHOLE, LAST_TWO = (RUN, 0, 0, 3, 1), (RUN, 0, 1, 3, 1)


def test_nothing_takes_no_time_from_any_clock_to_itself() -> None:
    paths = run()
    assert paths.transition.tolist() == [[0.0, -INF, -INF], [-INF, 0.0, -INF], [-INF, -INF, 0.0]]
    assert np.diag(paths.carried).tolist() == [0.0, 0.0, 0.0, 0.0]
    assert np.isneginf(paths.carried[~np.eye(4, dtype=bool)]).all()


def test_passages_run_whole_in_part_and_several_times() -> None:
    assert run(WHOLE).transition[0, 0] == 7.0
    assert run((RUN, 0, 0, 3, 5)).transition[0, 0] == 35.0
    assert run(LAST_TWO).transition[0, 0] == 6.0
    assert run((RUN, 0, 1, 2, 1)).transition[0, 0] == 2.0
    assert run((RUN, 0, 0, 1, 1), (RUN, 1, 0, 1, 1)).transition[0, 0] == 9.0
    assert run((RUN, 0, 0, 3, 5)).by_stream.tolist() == [25.0, 10.0]
    assert run(LAST_TWO, (RUN, 1, 0, 1, 1)).by_stream.tolist() == [4.0, 10.0]


def test_a_sent_collective_starts_when_the_computation_reaches_it() -> None:
    paths = run(WHOLE, (SEND, 0, DATA, -1, 0), (RUN, 1, 0, 1, 1))
    assert paths.transition[:2, 0].tolist() == [15.0, 17.0]
    assert paths.transition[:2, 1].tolist() == [-INF, 10.0]  # its stream alone


def test_an_early_collective_waits_for_its_stream_alone() -> None:
    assert run(WHOLE, (SEND, 0, DATA, -1, 1)).transition[:2, 0].tolist() == [7.0, -INF]


def test_a_collective_follows_another() -> None:
    """On another clock, from the end of the first."""
    paths = run((SEND, 0, DATA, -1, 0), (SEND, 1, SECOND, 0, 0))
    assert paths.transition[:, 0].tolist() == [0.0, 10.0, 13.0]
    assert run((SEND, 0, DATA, -1, 0), (SEND, 1, SECOND, -1, 0)).transition[:, 0].tolist() == [0.0, 10.0, 3.0]


def test_what_is_sent_on_one_clock_takes_turns() -> None:
    assert run((SEND, 0, DATA, -1, 0), (SEND, 1, DATA, -1, 0)).transition[1, 0] == 13.0


def test_a_wait_is_for_the_event_that_it_names() -> None:
    sends = ((SEND, 0, DATA, -1, 0), (SEND, 1, SECOND, -1, 0))
    long, short = run(*sends, (WAIT, 0), WHOLE), run(*sends, (WAIT, 1), WHOLE)
    assert (long.transition[0, 0], short.transition[0, 0]) == (17.0, 10.0)
    assert run(*sends, (RUN, 1, 0, 1, 1), (WAIT, 1)).transition[0, 0] == 8.0  # it had passed


def test_a_blocking_collective_holds_the_computation() -> None:
    paths = run((RUN, 0, 0, 1, 1), (BLOCK, 0, DATA), WHOLE)
    assert paths.transition[:2, 0].tolist() == [18.0, 11.0]
    assert paths.transition[:2, 1].tolist() == [17.0, 10.0]  # behind what its stream was at
    assert run((BLOCK, 0, DATA), share=0.5).transition[0, 0] == 10.0  # it takes nothing besides
    assert run((SEND, 0, DATA, -1, 0), (BLOCK, 1, SECOND, 0, 1)).transition[2, 0] == 3.0  # neither early nor behind


def test_what_is_sent_takes_its_share_of_the_next_run() -> None:
    """Of both that were sent before it, once; and not of what was waited for."""
    sends = ((SEND, 0, DATA, -1, 0), (SEND, 1, SECOND, -1, 0))
    paths = run(*sends, WHOLE, WHOLE, share=0.5)
    assert paths.transition[0, 0] == 14.0 + 6.5
    assert run(*sends, (WAIT, 1), WHOLE, share=0.5).transition[0, 0] == 3.0 + 5.0 + 7.0
    assert run(*sends, (WAIT, 0), WHOLE, share=0.5).transition[0, 0] == 10.0 + 1.5 + 7.0
    assert run(*sends, WHOLE, (WAIT, 0), WHOLE, share=0.5).transition[0, 0] == 13.5 + 7.0
    assert run(WHOLE, *sends, share=0.5).transition[0, 0] == 7.0  # nothing runs beside it
    assert run((BLOCK, 0, DATA), (WAIT, 0), WHOLE, share=0.5).transition[0, 0] == 17.0


def test_all_clocks_end_together_where_they_are_joined() -> None:
    rows = (WHOLE, (SEND, 0, DATA, -1, 0))
    assert run(*rows).transition[:, 0].tolist() == [7.0, 17.0, -INF]
    assert run(*rows, joined=True).transition[:, 0].tolist() == [17.0, 17.0, 17.0]
    assert run(*rows, joined=True).carried[:3, 2].tolist() == [0.0, 0.0, 0.0]
    assert run(WHOLE, joined=True, launch=1.0).carried[HOST].tolist() == [-INF, -INF, -INF, 3.0]


def test_the_host_launches_nodes_one_after_the_other() -> None:
    """Launched at 3, 6 and 9 s, the last node of 4 s ends at 13."""
    whole, parts = run(WHOLE, launch=3.0), run((RUN, 0, 0, 1, 1), LAST_TWO, launch=3.0)
    for paths in (whole, parts):
        assert paths.transition[0, 0] == 13.0
        assert paths.carried[[0, HOST], HOST].tolist() == [13.0, 9.0]
        assert paths.carried[[0, HOST], 0].tolist() == [7.0, -INF]
        assert paths.host == 6.0
        assert np.isneginf(paths.carried[DATA : SECOND + 1, [0, HOST]]).all()
    assert run(launch=1.0).carried[:, HOST].tolist() == [-INF, -INF, -INF, 0.0]
    assert run((RUN, 0, 0, 3, 4), launch=0.5).transition[0, 0] == 4 * 7.0 + 0.5
    assert run((RUN, 0, 0, 3, 4), launch=3.0).transition[0, 0] == 3 * 9.0 + 13.0  # the host decides
    assert run((RUN, 0, 0, 3, 4), launch=1.0).transition[0, 0] == 4 * 7.0 + 1.0  # the computation does
    assert run((RUN, 0, 0, 3, 4), launch=1.0).host == 1.0
    assert run((RUN, 0, 0, 3, 4), launch=1.0).carried[HOST, HOST] == 12.0


def test_the_host_launches_collectives_too() -> None:
    paths = run((SEND, 0, DATA, -1, 0), WHOLE, launch=1.0, sent_launch=5.0)
    assert paths.transition[:2, 0].tolist() == [5.0 + 1.0 + 7.0, 15.0]
    assert paths.carried[[0, 1, HOST], HOST].tolist() == [13.0, 15.0, 8.0]
    early = run((SEND, 0, DATA, -1, 1), WHOLE, launch=1.0, sent_launch=5.0)
    assert early.transition[:2, 1].tolist() == [-INF, 10.0]
    assert early.carried[:2, HOST].tolist() == [13.0, -INF]
    block = run((BLOCK, 0, DATA), sent_launch=5.0)
    assert block.transition[:2, 0].tolist() == [15.0, 15.0]
    assert block.carried[[0, 1, HOST], HOST].tolist() == [15.0, 15.0, 5.0]
    assert block.carried[[0, 1, HOST], 0].tolist() == [10.0, 10.0, -INF]


def test_other_clocks_are_the_same_with_and_without_a_host() -> None:
    rows = (WHOLE, (SEND, 0, DATA, -1, 0), (WAIT, 1), WHOLE)
    for launch in (0.0, 1.0):
        paths = run(*rows, launch=launch)
        assert paths.carried[:3, 1:3] == pytest.approx(paths.transition[:, 1:])
    free = run(*rows)
    assert free.carried[:3, :3].tolist() == free.transition.tolist()
    assert free.carried[HOST].tolist() == [-INF, -INF, -INF, 0.0]
    assert free.carried[:, HOST].tolist() == [-INF, -INF, -INF, 0.0]
