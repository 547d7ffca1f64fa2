"""The rules of the clock, one by one, on entries written by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.simulator.clock.engine import HOST, Floats
from stepsight.simulator.clock.track import (
    APART,
    Durations,
    Log,
    State,
    Steady,
    Uses,
    at_rest,
    end_clocks,
    new_log,
    run_entries,
    run_periods,
    through,
    trace_path,
)
from stepsight.simulator.schedules.order import COMPUTE, POST, RECEIVE, SEND, WAIT, Entries

INF = np.inf
Row = tuple[int, int, int, int]


def entries(*rows: Row) -> Entries:
    """Op, rank, item and side of each."""
    return Entries(*np.array(rows, dtype=np.int32).reshape(-1, 4).T.copy())


def durations(
    transition: list[list[list[float]]], segment: list[int], message: list[float], host: list[list[float]]
) -> Durations:
    matrices = np.array(transition)
    return Durations(
        np.array(segment, dtype=np.uint32), matrices, np.array(message), np.array(host), tuple(range(len(matrices[0])))
    )


def full_run(what: Entries, takes: Durations) -> tuple[State, Log]:
    """All entries, logged."""
    ranks, clocks = len(takes.host), len(takes.clocks)
    state = at_rest(ranks, len(takes.message), clocks, 0)
    log = new_log(len(takes.segment), len(takes.message), clocks)
    run_entries(what.unsigned(), takes, state, log, (0, len(what.op), APART))
    return state, log


def skipping_run(what: Entries, takes: Durations, steady: Steady) -> Floats:
    """The clocks after all entries but those of periods that repeat."""
    clocks = np.zeros((1, len(takes.host), len(takes.clocks)))
    given = takes._replace(transition=takes.transition[None], message=takes.message[None])
    run_periods(what.unsigned(), given, clocks, steady)
    return np.asarray(clocks[0])


# Two ranks; rank 0 runs action 0 and sends message 0, which rank 1 waits for before action 1.
ACROSS = entries(
    (COMPUTE, 0, 0, 0), (POST, 1, 0, RECEIVE), (POST, 0, 0, SEND), (WAIT, 1, 0, RECEIVE), (COMPUTE, 1, 1, 0),
    (WAIT, 0, 0, SEND),
)  # fmt: skip


def test_the_host_takes_its_time_before_actions_and_posts_but_not_waits() -> None:
    takes = durations([[[2.0]], [[5.0]]], [0, 1], [0.5], [[0.1, 0.01], [0.2, 0.02]])
    state, log = full_run(ACROSS, takes)
    sent = 0.1 + 2.0 + 0.01
    assert state.posted.tolist() == [[pytest.approx(sent), 0.02]]
    assert log.start.ravel().tolist() == pytest.approx([0.1, sent + 0.5 + 0.2])
    assert state.clocks.ravel().tolist() == pytest.approx([sent + 0.5, sent + 0.5 + 0.2 + 5.0])


@pytest.mark.parametrize(("first", "late", "held"), [(2.0, SEND, [True, True]), (0.0, RECEIVE, [True, True])])
def test_a_message_starts_when_the_later_side_has_posted_it(first: float, late: int, held: list[bool]) -> None:
    takes = durations([[[first]], [[5.0]]], [0, 1], [0.5], [[0.0, 0.01], [0.0, 0.25]])
    state, log = full_run(ACROSS, takes)
    begin = max(first + 0.01, 0.25)
    assert log.late.tolist() == [late]
    assert log.message_start.tolist() == pytest.approx([begin])
    assert log.message_finish.tolist() == pytest.approx([begin + 0.5])
    assert log.held.tolist() == [held]
    assert state.clocks[0, 0] == pytest.approx(begin + 0.5)


def test_equal_posts_are_the_senders() -> None:
    _, log = full_run(ACROSS, durations([[[0.0]], [[5.0]]], [0, 1], [0.5], [[0.0, 0.0], [0.0, 0.0]]))
    assert log.late.tolist() == [SEND]


def test_what_has_passed_holds_nobody() -> None:
    """Rank 0 runs another action while its message passes; a wait that ends just then holds it neither."""
    rows = [*zip(*(field.tolist() for field in ACROSS), strict=True)]
    what = entries(*rows[:-1], (COMPUTE, 0, 2, 0), rows[-1])
    for own in (9.0, 0.5):
        takes = durations([[[2.0]], [[5.0]], [[own]]], [0, 1, 2], [0.5], [[0.0, 0.0], [0.0, 0.0]])
        state, log = full_run(what, takes)
        assert log.held.tolist() == [[False, True]]
        assert state.clocks[0, 0] == 2.0 + own


def test_an_action_maps_clocks_to_clocks() -> None:
    """To each clock the longest of the paths from the others; a tie goes to the first."""
    takes = durations([[[1.0, 3.0], [-INF, 4.0]], [[2.0, 2.0], [5.0, 0.0]]], [0, 1], [], [[0.5, 0.0]])
    what = entries((COMPUTE, 0, 0, 0), (COMPUTE, 0, 1, 0))
    state, log = full_run(what, takes)
    assert log.start.tolist() == [[0.5, 0.0], [3.5, 4.0]]
    assert log.finish.tolist() == [[3.0, 4.0], [6.0, 8.5]]
    assert log.cause.tolist() == [[1, 1], [1, 0]]
    assert state.clocks.tolist() == [[6.0, 8.5]]
    tied = durations([[[2.0, 2.0], [0.0, 0.0]]], [0], [], [[0.0, 0.0]])
    assert full_run(entries((COMPUTE, 0, 0, 0)), tied)[1].cause.tolist() == [[0, 0]]


def test_through_is_the_rule_of_an_action() -> None:
    transition = np.array([[1.0, 3.0], [-INF, 4.0]])
    assert through(transition, np.array([0.5, 0.0])).tolist() == [3.0, 4.0]
    assert through(np.stack([transition, transition + 1]), np.array([[0.5, 0.0], [9.0, 0.0]])).tolist() == [
        [3.0, 4.0], [11.0, 5.0],
    ]  # fmt: skip


def test_the_path_follows_what_was_waited_for() -> None:
    """From rank 1's end over its action, the message, rank 0's post and action; host times where the path goes."""
    takes = durations([[[2.0]], [[5.0]]], [0, 1], [0.5], [[0.1, 0.01], [0.2, 0.02]])
    _, log = full_run(ACROSS, takes)
    uses = Uses(np.zeros((2, 1, 1)), np.zeros(1), np.zeros(2))
    trace_path(ACROSS.unsigned(), takes.segment, log, (1, 0), uses)
    assert uses.transition.ravel().tolist() == [1.0, 1.0]
    assert uses.message.tolist() == [1.0]
    assert uses.host.tolist() == [2.0, 1.0]  # before both actions; the sender's post


def test_the_path_of_another_clock_meets_no_host() -> None:
    """A stream that nothing feeds from the computation is its own path, over messages too."""
    what = entries((POST, 0, 0, SEND), (POST, 1, 0, RECEIVE), (COMPUTE, 0, 0, 0), (WAIT, 0, 0, SEND))
    takes = durations([[[1.0, -INF], [-INF, 4.0]]], [0], [9.0], [[0.5, 0.25], [0.5, 0.25]])
    _, log = full_run(what, takes)
    uses = Uses(np.zeros((1, 2, 2)), np.zeros(1), np.zeros(2))
    trace_path(what.unsigned(), takes.segment, log, (0, 1), uses)
    assert uses.transition.tolist() == [[[0.0, 0.0], [0.0, 1.0]]]
    assert uses.message.tolist() == [0.0]
    assert uses.host.tolist() == [0.0, 0.0]


# Rank 0 runs an action and sends its result; rank 1 asks, waits, and runs an action: a period of six entries.
PERIODS = 60


def pipeline(periods: int) -> Entries:
    rows: list[Row] = []
    for turn in range(periods):
        rows += [
            (COMPUTE, 0, 2 * turn, 0), (POST, 0, turn, SEND), (POST, 1, turn, RECEIVE), (WAIT, 1, turn, RECEIVE),
            (COMPUTE, 1, 2 * turn + 1, 0),
        ]  # fmt: skip
    return entries(*rows)


def alternating(transition: Floats, periods: int, message: float, host: list[list[float]]) -> Durations:
    """Segments 0 and 1 in turn."""
    segment = np.tile(np.array([0, 1], dtype=np.uint32), periods)
    return Durations(segment, transition, np.full(periods, message), np.array(host), tuple(range(len(transition[0]))))


@given(
    num_clocks=st.integers(1, HOST + 1),
    seed=st.integers(0, 2**20),
    periods=st.integers(1, PERIODS),
    lag=st.integers(1, 3),
    head=st.integers(0, 3),
    tail=st.integers(0, 3),
)
def test_skipping_what_repeats_ends_where_running_it_ends(
    num_clocks: int, seed: int, periods: int, lag: int, head: int, tail: int
) -> None:
    random = np.random.default_rng(seed)
    transition = random.uniform(0.1, 1.0, (2, num_clocks, num_clocks))
    none = random.random(transition.shape) < 0.7
    none[:, range(num_clocks), range(num_clocks)] = False
    transition[none] = -np.inf
    for clock in range(1, num_clocks):
        transition[:, clock, clock] = 0.0 if clock < HOST else random.uniform(0.0, 1.0)
    all_periods = head + periods + tail
    what = pipeline(all_periods)
    host = [random.uniform(0, 0.1, 2).tolist()] * 2
    takes = alternating(transition, all_periods, float(random.uniform(0, 2)), host)
    state, log = full_run(what, takes)
    for rank, clock in np.ndindex(2, num_clocks):
        uses = Uses(np.zeros(transition.shape), np.zeros(all_periods), np.zeros(2))
        trace_path(what.unsigned(), takes.segment, log, (rank, clock), uses)
        lengths = np.where(uses.transition > 0, uses.transition * np.where(none, 0.0, transition), 0.0).sum()
        total = lengths + uses.message @ takes.message + uses.host @ takes.host.mean(axis=0)
        assert total == pytest.approx(state.clocks[rank, clock], rel=1e-9)
    assert skipping_run(what, takes, Steady(5 * head, 5, periods, lag)) == pytest.approx(state.clocks, rel=1e-9)
    assert end_clocks(what, takes) == pytest.approx(state.clocks, rel=1e-12)


@pytest.mark.parametrize(("num_clocks", "runs"), [(1, True), (HOST + 1, True), (2, False)])
def test_a_steady_state_is_skipped(num_clocks: int, runs: bool) -> None:
    """What the middle takes does not matter; with a stream that moves on, nothing is skipped."""
    transition = np.full((2, num_clocks, num_clocks), -np.inf)
    transition[:, range(num_clocks), range(num_clocks)] = 0.0
    transition[:, 0, 0] = 2.0, 1.0  # the second rank waits for the first
    if num_clocks > HOST:
        transition[:, HOST, HOST] = 0.5
    if num_clocks == 2:
        transition[:, 1, 1] = 0.5
    what, takes = pipeline(PERIODS), alternating(transition, PERIODS, 0.25, [[0.0, 0.0], [0.0, 0.0]])
    end = full_run(what, takes)[0].clocks
    assert skipping_run(what, takes, Steady(0, 5, PERIODS, 1)) == pytest.approx(end)
    takes.message[PERIODS // 2] = 1e6
    assert (skipping_run(what, takes, Steady(0, 5, PERIODS, 1)).max() == pytest.approx(end.max())) == runs


def test_a_host_that_falls_behind_is_not_skipped() -> None:
    """It moves on by more than the computation, so it will be waited for."""
    transition = np.full((2, HOST + 1, HOST + 1), -np.inf)
    transition[:, range(HOST + 1), range(HOST + 1)] = 0.0
    transition[:, 0, 0] = 1.0
    transition[:, 0, HOST], transition[:, HOST, HOST] = -20.0, 2.0
    what, takes = pipeline(PERIODS), alternating(transition, PERIODS, 0.0, [[0.0, 0.0], [0.0, 0.0]])
    clocks = skipping_run(what, takes, Steady(0, 5, PERIODS, 1))
    assert clocks == pytest.approx(full_run(what, takes)[0].clocks)
    assert clocks[0, 0] > PERIODS + 10
