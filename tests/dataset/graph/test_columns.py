from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.dataset.graph.columns import merge, overlap
from stepsight.dataset.graph.rank_trace import Placement

intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12)


@given(intervals, st.tuples(st.integers(0, 70), st.integers(0, 70)))
def test_overlap_counts_every_moment_once(stretches: list[tuple[int, int]], window: tuple[int, int]) -> None:
    """Against counting whole moments one by one."""
    start, end = sorted(window)
    covered = {moment for begin, length in stretches for moment in range(begin, begin + length)}
    merged = merge([(float(begin), float(begin + length)) for begin, length in stretches])
    found = overlap(merged, np.array([float(start)]), np.array([float(end)]))
    assert found[0] == pytest.approx(len(covered & set(range(start, end))))


@given(intervals)
def test_merged_intervals_are_disjoint_and_in_order(stretches: list[tuple[int, int]]) -> None:
    merged = merge([(float(begin), float(begin + length)) for begin, length in stretches])
    assert merged.shape == (len(merged), 2)
    assert (merged[:, 1] > merged[:, 0]).all() and (merged[1:, 0] > merged[:-1, 1]).all()


def test_overlap_of_many_stretches_at_once() -> None:
    idle = merge([(10.0, 20.0), (30.0, 40.0)])
    found = overlap(idle, np.array([0.0, 15.0, 20.0]), np.array([50.0, 35.0, 30.0]))
    assert found.tolist() == [20.0, 10.0, 0.0]


def test_groups_lie_along_the_axes_of_the_job() -> None:
    """tp 2, dp 2, pp 2: rank = tp_rank + 2 * (dp_rank + 2 * stage)."""
    place = Placement(rank=5, devices_per_node=4, tp=2, dp=2)
    assert [place.axis(ranks) for ranks in ((4, 5), (5, 7), (1, 5), (0, 3), (0, 1, 2, 3))] == ["tp", "dp", "pp", "", ""]
    assert place.data_parallel_group(5) == (5, 7)
    assert place.ranks_per_node((1, 5), 2) == 1 and place.ranks_per_node((4, 5), 2) == 2
    assert Placement().ranks_per_node((1, 5), 2) == 2 and Placement().axis((0, 1)) == ""
