"""Regions as Inductor fuses them."""

from __future__ import annotations

import pytest
import torch

from stepsight.dataset.harness.regions.fused_regions import read_regions
from stepsight.dataset.harness.regions.region_record import Region

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU")]


def _function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2.0, -1) * w


@pytest.fixture(scope="module")
def regions() -> list[Region]:
    """Of a softmax and its gradient, with a row of weights."""
    return read_regions(_function, (torch.randn(64, 128, requires_grad=True), torch.randn(128)), training=True)


def test_forward_and_backward_are_read(regions: list[Region]) -> None:
    """A function that needs gradients has two regions."""
    assert [region.direction for region in regions] == ["forward", "backward"]


def test_the_scheduler_tells_what_is_fused(regions: list[Region]) -> None:
    """All loops of a softmax over rows are one kernel, vectorised, and reductions say how long they are."""
    loops = regions[0].loops
    assert {loop.kernel for loop in loops} == {0}
    assert {loop.reduced for loop in loops} == {1, 128}
    assert all(
        loop.tiles == 1 and loop.lanes > 1 and loop.inner == 128 for loop in loops if loop.numel * loop.reduced > 64
    )
    read = {each.buffer: each.num_bytes for loop in loops for each in loop.reads if each.buffer in regions[0].inputs}
    assert sorted(read.values()) == [128 * 4, 64 * 128 * 4]


def test_every_loop_names_framework_ops(regions: list[Region]) -> None:
    """Loops refer to ops of the graph before fusion."""
    for region in regions:
        assert all(loop.origins and max(loop.origins) < len(region.ops) for loop in region.loops)


def test_a_region_survives_json(regions: list[Region]) -> None:
    """``from_dict`` is the inverse of ``to_dict``."""
    assert [Region.from_dict(region.to_dict()) for region in regions] == regions
