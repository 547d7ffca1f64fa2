"""Every schedule by its name: as published, complete, and able to run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.schedules import SCHEDULES
from stepsight.simulator.schedules import KIND_NAMES, Schedule, find_schedule, order_actions


def words(schedule: Schedule, stage: int) -> str:
    return " ".join(KIND_NAMES[kind] + str(micro) for kind, micro, _ in schedule.actions[stage].tolist())


def chunk_words(schedule: Schedule, stage: int) -> str:
    return " ".join(f"{KIND_NAMES[kind]}{micro}{'abc'[c]}" for kind, micro, c in schedule.actions[stage].tolist())


def test_one_f_one_b_as_published() -> None:
    schedule = find_schedule("1f1b", 3, 4)
    assert words(schedule, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(schedule, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_gpipe_runs_all_forwards_first() -> None:
    assert words(find_schedule("gpipe", 2, 2), 1) == "F0 F1 B0 B1"


def test_breadth_first_runs_chunk_by_chunk_and_backwards_in_reverse() -> None:
    expected = "F0a F1a F0b F1b B1b B0b B1a B0a"
    assert chunk_words(find_schedule("looped-bfs", 2, 2, 2), 1) == expected


def test_interleaved_as_published() -> None:
    """Figure 4 of Narayanan et al. 2021: rounds of as many micro-batches as stages."""
    schedule = find_schedule("1f1b", 2, 4, 2)
    assert chunk_words(schedule, 1) == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"


def test_zero_bubble_keeps_the_first_stages_memory() -> None:
    """ZB-H1: no stage has more micro-batches between forward and weight gradient than 1F1B's first stage has."""
    schedule = find_schedule("zb-h1", 4, 8)
    assert words(schedule, 3)[:35] == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1"
    for rows in schedule.actions:
        held = np.select([rows[:, 0] == 0, rows[:, 0] == 3], [1, -1], 0).cumsum()
        assert held.max() == 4


def test_one_stage_alternates_whatever_the_schedule() -> None:
    for name in SCHEDULES:
        assert words(find_schedule(name, 1, 2), 0) == "F0 B0 F1 B1"
    assert chunk_words(find_schedule("1f1b", 1, 2, 2), 0) == "F0a F0b B0b B0a F1a F1b B1b B1a"


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    stages=st.integers(1, 9),
    micro_batches=st.integers(1, 24),
    v=st.integers(1, 4),
)
def test_every_schedule_is_complete_and_runs(name: str, stages: int, micro_batches: int, v: int) -> None:
    """Or says in one line which rule does not hold."""
    try:
        schedule = find_schedule(name, stages, micro_batches, v)
    except JobError as error:
        assert "\n" not in str(error) and ", got " in str(error)
        assert not SCHEDULES[name].allows(v) or v > 1
        return
    order = order_actions(schedule)
    assert schedule.num_parts == stages * v
    assert len(order) == sum(len(rows) for rows in schedule.actions)


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(JobError, match=r"schedule must be one of gpipe, 1f1b, .*, got 'zigzag'"):
        find_schedule("zigzag", 2, 2)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "v", "message"),
    [
        ("gpipe", 4, 8, 2, r"schedule gpipe has virtual_stages = 1, got 2"),
        ("zbv", 4, 8, 3, r"schedule zbv has virtual_stages = 2, got 3"),
        ("interleaved-zb", 4, 8, 1, r"schedule interleaved-zb has virtual_stages from 2 to 1024, got 1"),
        ("1f1b", 4, 9, 2, r"num_micro_batches % \(num_micro_batches // pp\) must be 0, got 9 % \(9 // 4\) = 1"),
        ("dualpipev", 4, 7, 2, r"dualpipev needs num_micro_batches >= 2 \* pp, got 7 < 2 \* 4 = 8"),
    ],
)
def test_rules_are_said_with_their_values(name: str, stages: int, micro_batches: int, v: int, message: str) -> None:
    with pytest.raises(JobError, match=message):
        find_schedule(name, stages, micro_batches, v)
