"""Ranks that issue their common collectives in other orders are refused; those that need not meet are not compared."""

from __future__ import annotations

import pytest

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.capturing_run import Issued, check_orders, issued_by_group

A: Issued = ("a", "all_reduce", 16, "train.py:7")
B: Issued = ("b", "all_reduce", 16, "train.py:8")
PAIR = (0, 1)


def test_the_same_order_is_right() -> None:
    check_orders({0: {PAIR: [A, B]}, 1: {PAIR: [A, B]}, 2: {(2, 3): [B]}})


@pytest.mark.parametrize("theirs", [[B, A], [A], [A, B, B], [A, ("b", "all_reduce", 32, "")], []])
def test_another_order_would_never_end(theirs: list[Issued]) -> None:
    with pytest.raises(CaptureError, match="ranks 0 and 1 would wait for each other forever: as number"):
        check_orders({0: {PAIR: [A, B]}, 1: {PAIR: theirs}})


def test_names_of_groups_count_only_where_ranks_share_them() -> None:
    check_orders({0: {PAIR: [A, B]}, 1: {PAIR: [("c", *A[1:]), ("d", *B[1:])]}})


def test_a_record_is_read_by_ranks() -> None:
    record = {"groups": [["dp", [0, 1]], ["tp", [0, 2]]], "issued": [[0, *A], [1, *B], [0, *B]]}
    assert issued_by_group(record) == {(0, 1): [A, B], (0, 2): [B]}
