"""What is printed of a captured script: small numbers keep their digits, and the world is stated as it is."""

from __future__ import annotations

from typing import Any

import pytest

from stepsight.dataset.capture.captured import warnings_once
from stepsight.experiments.reports.run_texts import capture_text, scaled

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (192, "192 B"), (3_159_040, "3.16 MB"), (1e9, "1.00 GB"), (5e12, "5000.00 GB")]
)
def test_a_number_has_the_largest_unit_that_it_fills(value: float, text: str) -> None:
    assert scaled(value, UNITS) == text


@pytest.mark.parametrize(
    ("world", "text"), [(1, "1 rank on one node"), (4, "4 ranks on one node"), (64, "64 ranks, 8 on each node")]
)
def test_the_head_says_how_many_ranks_share_a_node(world: int, text: str) -> None:
    rank: dict[str, Any] = {
        "rank": 0, "ops": 1, "ops_by_phase": {"forward": 1}, "flops": 16.0, "peak_bytes": 64, "streams": ["compute"],
        "collectives": [], "ops_by_kind": {"linear": 1}, "warnings": [],
    }  # fmt: skip
    shown = capture_text({"script": "train.py", "world_size": world, "devices_per_node": 8, "ranks": [rank]})
    assert shown.splitlines()[0] == f"script     train.py: {text}"
    assert "16 FLOP, peak memory 64 B of tensors" in shown and "no collectives" in shown


def test_a_warning_of_many_lines_and_ranks_is_said_once() -> None:
    texts = ["train.py:15 reads a value", "train.py:31 reads a value", "train.py:15 reads a value", "a region: odd"]
    assert warnings_once(texts) == ["train.py:15 reads a value (also train.py:31)", "a region: odd"]
