"""Readers of traces by the name of their format, those of users among them."""

from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.traces.placement import Placement
from stepsight.dataset.traces.trace_formats import TRACE_READERS, read_rank_trace

PLACE = Placement(rank=0, devices_per_node=1, tp=1, dp=1)


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        ("kineto", "trace format 'mine': a reader of traces must be a function of path, placement, got 'kineto'"),
        (lambda path: None, r"a reader of traces must take 2 \(path, placement\), got \(path\)"),
    ],
)
def test_what_is_no_reader_is_refused(reader: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        TRACE_READERS.register("mine", reader)
    assert "mine" not in TRACE_READERS


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (lambda path, placement: {}[placement.rank], "trace format mine: cannot read rank0.txt: KeyError: 0"),
        (lambda path, placement: [1.0], r"trace format mine: a reader must return a RankTrace, got \[1.0\]"),
    ],
)
def test_a_reader_that_fails_is_one_line(reader: Any, message: str) -> None:
    with TRACE_READERS.registered("mine", reader), pytest.raises(TraceError, match=message):
        read_rank_trace("mine", Path("rank0.txt"), PLACE)
