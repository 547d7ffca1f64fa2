"""Entries of ranks, in one order that can run."""

import numpy as np
import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.simulator.schedules import Order, find_schedule, order_actions
from stepsight.simulator.schedules.order import COMPUTE, POST, RECEIVE, SEND, WAIT, find_messages
from stepsight.simulator.schedules.runtimes import interleaved


@pytest.fixture
def order() -> Order:
    """Two stages, one micro-batch: F0 on 0, F0 on 1, B0 on 1, B0 on 0."""
    return order_actions(find_schedule("1f1b", 2, 1))


def rank(*rows: tuple[int, int, int]) -> tuple[np.ndarray, ...]:
    """Op, item and side of each entry."""
    return tuple(np.array(rows, dtype=np.int32).T)


def test_messages_are_results_that_leave_a_stage(order: Order) -> None:
    found = find_messages(order)
    assert (found.source.tolist(), found.target.tolist()) == ([0, 2], [1, 3])
    assert (found.of_source.tolist(), found.of_target.tolist()) == ([0, -1, 1, -1], [-1, 0, -1, 1])


def test_a_wait_comes_after_both_posts(order: Order) -> None:
    first = rank((COMPUTE, 0, 0), (POST, 0, SEND), (POST, 1, RECEIVE), (WAIT, 1, RECEIVE), (COMPUTE, 3, 0))
    second = rank((POST, 0, RECEIVE), (WAIT, 0, RECEIVE), (COMPUTE, 1, 0), (COMPUTE, 2, 0), (POST, 1, SEND))
    found = interleaved(order, find_messages(order), [first, second])
    assert found.stage.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert found.item.tolist() == [0, 0, 1, 0, 0, 1, 2, 1, 1, 3]


def test_ranks_that_wait_in_a_circle_are_named(order: Order) -> None:
    """One waits for its send before it asks for what the other sends first."""
    first = rank((COMPUTE, 0, 0), (POST, 0, SEND), (WAIT, 0, SEND), (POST, 1, RECEIVE))
    second = rank((POST, 1, SEND), (WAIT, 1, SEND), (POST, 0, RECEIVE))
    both = "stage 0 waits until stage 1 takes F0 of part 0; stage 1 waits until stage 0 takes B0 of part 1"
    with pytest.raises(JobError, match=f"deadlock, got: {both}$"):
        interleaved(order, find_messages(order), [first, second])
    third = rank((WAIT, 0, RECEIVE), (POST, 0, RECEIVE))
    with pytest.raises(JobError, match=r"got: stage 1 waits until stage 0 sends F0 of part 0$"):
        interleaved(order, find_messages(order), [rank((COMPUTE, 0, 0)), third])
