"""Fused kernels of a captured region."""

from __future__ import annotations

import torch

from stepsight.dataset.harness.capturing.compiled_regions import between_collectives, communicates, kernel_bytes
from stepsight.dataset.harness.regions.inductor import Access, Loop, Region


def _loop(name: str, reads: tuple[str, ...], writes: str) -> Loop:
    touched = tuple(Access(each, 400) for each in reads)
    return Loop(name, 0, "", 100, 4, touched, (Access(writes, 400),))


def test_a_fused_kernel_moves_what_lies_outside_of_it() -> None:
    """A buffer between its own loops stays in registers; inputs are read once, and what others read is written."""
    loops = (_loop("a", ("x", "y"), "inner"), _loop("b", ("inner", "x"), "out"), _loop("c", ("out",), "after"))
    sizes = dict.fromkeys(("x", "y", "inner", "out", "after"), 400)
    region = Region("forward", (), loops, sizes, ("x", "y"), ("after",))
    assert kernel_bytes(region, loops[:2]) == (1200, 4)  # x, y, and out
    assert kernel_bytes(region, loops[:1]) == (1200, 4)  # inner is read by another kernel


def test_a_region_is_split_at_its_collectives() -> None:
    """Each part holds collectives alone or none, and the parts compute what the region does."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    twice = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
    sent = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (twice,))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (sent, x)),))
    parts = between_collectives(torch.fx.GraphModule({}, graph))
    found = [
        [communicates(node) for node in part.graph.nodes if node.op == "call_function"] for part in parts.children()
    ]
    assert found == [[False], [True], [False]]
    assert torch.equal(parts(torch.ones(3))[0], torch.full((3,), 3.0))
