from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.simulator.clock.engine import (
    BLOCK,
    DATA,
    HOST,
    NUM_CLOCKS,
    RUN,
    SECOND,
    SEND,
    STARTS,
    WAIT,
    BlockPassTable,
    DelayedGraph,
    Floats,
    SegmentList,
    StreamSeconds,
    add_path,
    delayed_paths,
    longest_paths,
    run_events,
    to_from,
)

NATIVE = longest_paths.compile()


def run(
    seconds: list[float], edges: list[list[int]], ready: list[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    pointer = np.cumsum([0, *map(len, edges)]).astype(np.int32)
    before = np.array([need for needs in edges for need in needs], dtype=np.int32)
    finish, critical = np.empty(len(seconds)), np.empty(len(seconds), dtype=np.int32)
    starts = np.zeros(len(seconds)) if ready is None else np.array(ready)
    longest_paths(np.array(seconds), pointer, before, starts, finish, critical)
    return finish, critical


def test_a_node_waits_for_the_latest_of_its_dependencies() -> None:
    finish, critical = run([1.0, 3.0, 2.0, 1.0], [[], [], [0], [1, 2]])
    assert finish.tolist() == [1.0, 3.0, 3.0, 4.0]
    assert critical.tolist() == [-1, -1, 0, 1]  # a tie goes to the first that is listed


def test_nodes_that_nothing_ready_leads_to_never_finish() -> None:
    finish, _ = run([1.0, 1.0, 1.0], [[], [], [1]], [-np.inf, 0.0, -np.inf])
    assert finish.tolist() == [-np.inf, 1.0, 2.0]


def test_paths_add_up() -> None:
    seconds = [1.0, 3.0, 2.0, 1.0]
    finish, critical = run(seconds, [[], [], [0], [1, 2]])
    counts = np.zeros(2)
    add_path(critical, 3, np.array([0, 1, 0, 1], dtype=np.int32), np.ones(4), 2.0, counts)
    assert counts.tolist() == [0.0, 4.0]
    assert finish[3] == 4.0


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[float], list[list[int]]]:
    seconds = draw(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=30))
    edges = [draw(st.lists(st.integers(0, node - 1), max_size=3)) if node else [] for node in range(len(seconds))]
    return seconds, edges


@given(graphs())
def test_every_dependency_holds_and_something_is_critical(graph: tuple[list[float], list[list[int]]]) -> None:
    seconds, edges = graph
    finish, critical = run(seconds, edges)
    for node, needs in enumerate(edges):
        start = finish[node] - seconds[node]
        assert all(finish[need] <= start + 1e-9 for need in needs)
        assert critical[node] in (*needs, -1)
        assert abs(start - (finish[critical[node]] if critical[node] >= 0 else 0.0)) < 1e-9


@given(graphs(), st.data())
def test_a_longer_node_never_ends_earlier(graph: tuple[list[float], list[list[int]]], data: st.DataObject) -> None:
    seconds, edges = graph
    slower = list(seconds)
    slower[data.draw(st.integers(0, len(seconds) - 1))] += 1.0
    assert (run(slower, edges)[0] >= run(seconds, edges)[0] - 1e-12).all()


@given(graphs())
def test_compiled_and_interpreted_agree(graph: tuple[list[float], list[list[int]]]) -> None:
    seconds, edges = graph
    results = []
    for kernel in (longest_paths.function, NATIVE):
        pointer = np.cumsum([0, *map(len, edges)]).astype(np.int32)
        before = np.array([need for needs in edges for need in needs], dtype=np.int32)
        finish, critical = np.empty(len(seconds)), np.empty(len(seconds), dtype=np.int32)
        kernel(np.array(seconds), pointer, before, np.zeros(len(seconds)), finish, critical)
        results.append((finish.tolist(), critical.tolist()))
    assert results[0] == results[1]


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


def run_rows(
    *rows: Row, launch: float = 0.0, sent_launch: float = 0.0, share: float = 0.0, joined: bool = False
) -> Paths:
    """Every node takes the host ``launch``, every collective ``sent_launch``."""
    events = np.array([[*row, *[0] * (8 - len(row))] for row in rows], dtype=np.int32).reshape(-1, 8)
    paths = []
    for seconds in SECONDS:
        launched = launch * np.arange(1, len(seconds) + 1) + np.array(seconds)[::-1].cumsum()[::-1]
        paths.append((sum(seconds), launched.max() if launch else -INF, launch * len(seconds)))
    passages = BlockPassTable(np.array(paths), np.concatenate(SECONDS), np.full(4, launch), np.array([0, 3, 4]))
    places = np.array([[0, len(events), 0, 0, joined]])
    sent = np.array(SENT_S), np.full(2, sent_launch)
    segments = SegmentList(events, places, np.arange(2), *sent, np.array([share]))
    of_passages = np.array([np.bincount(s, t, minlength=2) for s, t in zip(STREAM, SECONDS, strict=True)])
    streams = StreamSeconds(of_passages, np.concatenate(STREAM).astype(np.int8), np.zeros(3))
    ends = np.full((1, len(STARTS) if launch > 0 or sent_launch > 0 else NUM_CLOCKS, HOST + 1), np.nan)
    run_events(segments, passages, streams, ends)
    transition, carried = to_from(ends[0], carried=False), to_from(ends[0], carried=True)
    return Paths(transition, carried, streams.totals[:-1], float(streams.totals[-1]))


WHOLE, LAST_TWO = (RUN, 0, 0, 3, 1), (RUN, 0, 1, 3, 1)


def test_nothing_takes_no_time_from_any_clock_to_itself() -> None:
    paths = run_rows()
    assert paths.transition.tolist() == [[0.0, -INF, -INF], [-INF, 0.0, -INF], [-INF, -INF, 0.0]]
    assert np.diag(paths.carried).tolist() == [0.0, 0.0, 0.0, 0.0]
    assert np.isneginf(paths.carried[~np.eye(4, dtype=bool)]).all()


def test_passages_run_whole_in_part_and_several_times() -> None:
    assert run_rows(WHOLE).transition[0, 0] == 7.0
    assert run_rows((RUN, 0, 0, 3, 5)).transition[0, 0] == 35.0
    assert run_rows(LAST_TWO).transition[0, 0] == 6.0
    assert run_rows((RUN, 0, 1, 2, 1)).transition[0, 0] == 2.0
    assert run_rows((RUN, 0, 0, 1, 1), (RUN, 1, 0, 1, 1)).transition[0, 0] == 9.0
    assert run_rows((RUN, 0, 0, 3, 5)).by_stream.tolist() == [25.0, 10.0]
    assert run_rows(LAST_TWO, (RUN, 1, 0, 1, 1)).by_stream.tolist() == [4.0, 10.0]


def test_a_sent_collective_starts_when_the_computation_reaches_it() -> None:
    paths = run_rows(WHOLE, (SEND, 0, DATA, -1, 0), (RUN, 1, 0, 1, 1))
    assert paths.transition[:2, 0].tolist() == [15.0, 17.0]
    assert paths.transition[:2, 1].tolist() == [-INF, 10.0]  # its stream alone


def test_an_early_collective_waits_for_its_stream_alone() -> None:
    assert run_rows(WHOLE, (SEND, 0, DATA, -1, 1)).transition[:2, 0].tolist() == [7.0, -INF]


def test_a_collective_follows_another() -> None:
    """On another clock, from the end of the first."""
    paths = run_rows((SEND, 0, DATA, -1, 0), (SEND, 1, SECOND, 0, 0))
    assert paths.transition[:, 0].tolist() == [0.0, 10.0, 13.0]
    assert run_rows((SEND, 0, DATA, -1, 0), (SEND, 1, SECOND, -1, 0)).transition[:, 0].tolist() == [0.0, 10.0, 3.0]


def test_what_is_sent_on_one_clock_takes_turns() -> None:
    assert run_rows((SEND, 0, DATA, -1, 0), (SEND, 1, DATA, -1, 0)).transition[1, 0] == 13.0


def test_a_wait_is_for_the_event_that_it_names() -> None:
    sends = ((SEND, 0, DATA, -1, 0), (SEND, 1, SECOND, -1, 0))
    long, short = run_rows(*sends, (WAIT, 0), WHOLE), run_rows(*sends, (WAIT, 1), WHOLE)
    assert (long.transition[0, 0], short.transition[0, 0]) == (17.0, 10.0)
    assert run_rows(*sends, (RUN, 1, 0, 1, 1), (WAIT, 1)).transition[0, 0] == 8.0  # it had passed


def test_a_blocking_collective_holds_the_computation() -> None:
    paths = run_rows((RUN, 0, 0, 1, 1), (BLOCK, 0, DATA), WHOLE)
    assert paths.transition[:2, 0].tolist() == [18.0, 11.0]
    assert paths.transition[:2, 1].tolist() == [17.0, 10.0]  # behind what its stream was at
    assert run_rows((BLOCK, 0, DATA), share=0.5).transition[0, 0] == 10.0  # it takes nothing besides
    assert (
        run_rows((SEND, 0, DATA, -1, 0), (BLOCK, 1, SECOND, 0, 1)).transition[2, 0] == 3.0
    )  # neither early nor behind


def test_what_is_sent_takes_its_share_of_the_next_run() -> None:
    """Of both that were sent before it, once; and not of what was waited for."""
    sends = ((SEND, 0, DATA, -1, 0), (SEND, 1, SECOND, -1, 0))
    paths = run_rows(*sends, WHOLE, WHOLE, share=0.5)
    assert paths.transition[0, 0] == 14.0 + 6.5
    assert run_rows(*sends, (WAIT, 1), WHOLE, share=0.5).transition[0, 0] == 3.0 + 5.0 + 7.0
    assert run_rows(*sends, (WAIT, 0), WHOLE, share=0.5).transition[0, 0] == 10.0 + 1.5 + 7.0
    assert run_rows(*sends, WHOLE, (WAIT, 0), WHOLE, share=0.5).transition[0, 0] == 13.5 + 7.0
    assert run_rows(WHOLE, *sends, share=0.5).transition[0, 0] == 7.0  # nothing runs beside it
    assert run_rows((BLOCK, 0, DATA), (WAIT, 0), WHOLE, share=0.5).transition[0, 0] == 17.0


def test_all_clocks_end_together_where_they_are_joined() -> None:
    rows = (WHOLE, (SEND, 0, DATA, -1, 0))
    assert run_rows(*rows).transition[:, 0].tolist() == [7.0, 17.0, -INF]
    assert run_rows(*rows, joined=True).transition[:, 0].tolist() == [17.0, 17.0, 17.0]
    assert run_rows(*rows, joined=True).carried[:3, 2].tolist() == [0.0, 0.0, 0.0]
    assert run_rows(WHOLE, joined=True, launch=1.0).carried[HOST].tolist() == [-INF, -INF, -INF, 3.0]


def test_the_host_launches_nodes_one_after_the_other() -> None:
    """Launched at 3, 6 and 9 s, the last node of 4 s ends at 13."""
    whole, parts = run_rows(WHOLE, launch=3.0), run_rows((RUN, 0, 0, 1, 1), LAST_TWO, launch=3.0)
    for paths in (whole, parts):
        assert paths.transition[0, 0] == 13.0
        assert paths.carried[[0, HOST], HOST].tolist() == [13.0, 9.0]
        assert paths.carried[[0, HOST], 0].tolist() == [7.0, -INF]
        assert paths.host == 6.0
        assert np.isneginf(paths.carried[DATA : SECOND + 1, [0, HOST]]).all()
    assert run_rows(launch=1.0).carried[:, HOST].tolist() == [-INF, -INF, -INF, 0.0]
    assert run_rows((RUN, 0, 0, 3, 4), launch=0.5).transition[0, 0] == 4 * 7.0 + 0.5
    assert run_rows((RUN, 0, 0, 3, 4), launch=3.0).transition[0, 0] == 3 * 9.0 + 13.0  # the host decides
    assert run_rows((RUN, 0, 0, 3, 4), launch=1.0).transition[0, 0] == 4 * 7.0 + 1.0  # the computation does
    assert run_rows((RUN, 0, 0, 3, 4), launch=1.0).host == 1.0
    assert run_rows((RUN, 0, 0, 3, 4), launch=1.0).carried[HOST, HOST] == 12.0


def test_the_host_launches_collectives_too() -> None:
    paths = run_rows((SEND, 0, DATA, -1, 0), WHOLE, launch=1.0, sent_launch=5.0)
    assert paths.transition[:2, 0].tolist() == [5.0 + 1.0 + 7.0, 15.0]
    assert paths.carried[[0, 1, HOST], HOST].tolist() == [13.0, 15.0, 8.0]
    early = run_rows((SEND, 0, DATA, -1, 1), WHOLE, launch=1.0, sent_launch=5.0)
    assert early.transition[:2, 1].tolist() == [-INF, 10.0]
    assert early.carried[:2, HOST].tolist() == [13.0, -INF]
    block = run_rows((BLOCK, 0, DATA), sent_launch=5.0)
    assert block.transition[:2, 0].tolist() == [15.0, 15.0]
    assert block.carried[[0, 1, HOST], HOST].tolist() == [15.0, 15.0, 5.0]
    assert block.carried[[0, 1, HOST], 0].tolist() == [10.0, 10.0, -INF]


def test_other_clocks_are_the_same_with_and_without_a_host() -> None:
    rows = (WHOLE, (SEND, 0, DATA, -1, 0), (WAIT, 1), WHOLE)
    for launch in (0.0, 1.0):
        paths = run_rows(*rows, launch=launch)
        assert paths.carried[:3, 1:3] == pytest.approx(paths.transition[:, 1:])
    free = run_rows(*rows)
    assert free.carried[:3, :3].tolist() == free.transition.tolist()
    assert free.carried[HOST].tolist() == [-INF, -INF, -INF, 0.0]
    assert free.carried[:, HOST].tolist() == [-INF, -INF, -INF, 0.0]


def test_the_edge_that_decides_a_start_is_named() -> None:
    """Of two edges into node 2 the second is later; node 1 starts by itself after its edge has come."""
    order, pointer, edges = np.arange(3), np.array([0, 0, 1, 3]), np.array([2, 0, 1])
    graph = DelayedGraph(order, pointer, edges, np.array([0, 1, 0]), np.array([0.5, 1.0, 0.0]))
    ends, cause = np.zeros(3), np.full(3, 9)
    delayed_paths(graph, np.array([1.0, 2.0, 3.0]), np.array([0.0, 4.0, -np.inf]), ends, cause)
    assert ends.tolist() == [1.0, 6.0, 10.0] and cause.tolist() == [-1, -1, 1]
