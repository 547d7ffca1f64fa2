"""Regions as Inductor fuses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.compile_fx import compile_fx

from stepsight.dataset.harness.regions.inductor import Region, eager, read_region

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU")]


def _function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2.0, -1) * w


@pytest.fixture(scope="module")
def regions() -> list[Region]:
    """Of a softmax and its gradient, with a row of weights; the ops run eagerly."""
    found: list[Region] = []

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        found.append(read_region(graph, inputs, **options))
        return eager(graph)

    torch._dynamo.reset()
    fresh = torch._inductor.config.patch({"fx_graph_cache": False, "compile_threads": 1})
    with fresh, torch._functorch.config.patch(enable_autograd_cache=False):
        run = torch.compile(_function, backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner))
        run(torch.randn(64, 128, requires_grad=True), torch.randn(128)).sum().backward()
    return found


def test_forward_and_backward_are_read(regions: list[Region]) -> None:
    """A function that needs gradients has two regions."""
    assert [region.direction for region in regions] == ["forward", "backward"]


def test_the_scheduler_tells_what_is_fused(regions: list[Region]) -> None:
    """All loops of a softmax over rows are one kernel, and each reads as many bytes as its buffers have."""
    loops = regions[0].loops
    assert {loop.kernel for loop in loops} == {0}
    assert max(loop.elements for loop in loops) == 64 * 128
    read = {each.buffer: each.num_bytes for loop in loops for each in loop.reads if each.buffer in regions[0].inputs}
    assert sorted(read.values()) == [128 * 4, 64 * 128 * 4]
    assert [set(launch.loops) for launch in regions[0].launches] == [{loop.name for loop in loops}]


def test_every_loop_names_framework_ops(regions: list[Region]) -> None:
    """Loops refer to ops of the graph before fusion."""
    for region in regions:
        assert all(loop.origins and max(loop.origins) < len(region.nodes) for loop in region.loops)
