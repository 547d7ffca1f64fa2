"""Scripts do what the lowered job does; ``jobs_and_scripts`` compares all strategies."""

from __future__ import annotations

import pytest

from tests.dataset.capture.jobs_and_scripts import compare, strategies


@pytest.mark.parametrize("name", ["gpt, tp 2 x ddp 4", "gpt, fsdp 8"])
def test_a_captured_script_has_the_collectives_and_flop_of_its_job(name: str) -> None:
    row = compare(name, strategies()[name])
    assert row["differences"] == [] and row["collectives"] > 0
    assert row["flops_off_percent"] < 1.0 and abs(row["time_off_percent"]) < 5.0
