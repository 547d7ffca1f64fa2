"""Counts of what compiled functions do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.compile_fx import compile_fx

from stepsight.dataset.harness.regions.inductor import Access, Launch, Loop, Region, eager, read_region
from stepsight.dataset.harness.regions.loop_counts import Nest, Touch
from stepsight.dataset.kinds.op import OP_KINDS

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU")]
ROWS, WIDTH = 128, 64
Dims = dict[str, int]


def dims_of(function: Callable[..., Any], *inputs: torch.Tensor) -> list[Dims]:
    """Dims by name of the calls of the only region of a function."""
    found: list[Region] = []

    def inner(graph: Any, given: Any, **options: Any) -> Any:
        found.append(read_region(graph, given, **options))
        return eager(graph)

    torch._dynamo.reset()
    with torch._inductor.config.patch({"fx_graph_cache": False, "compile_threads": 1}), torch.no_grad():
        torch.compile(function, backend=lambda g, i: compile_fx(g, i, inner_compile=inner))(*inputs)
    (region,) = found
    return [dict(zip(OP_KINDS["fused_loops"].dim_names, dims, strict=True)) for dims in region.dims]


def test_an_elementwise_function_moves_its_bytes_once() -> None:
    """A product and an exponential of two matrices: one nest that reads both and writes one, a vector at a time."""
    x, y = torch.randn(2, ROWS, WIDTH).unbind()
    (dims,) = dims_of(lambda x, y: (x * y).exp(), x, y)
    vectors = ROWS * WIDTH / 16
    assert (dims["far_bytes"], dims["near_bytes"], dims["nests"]) == (3 * 4 * ROWS * WIDTH, 0, 1)
    assert dims["vectors"] == 0.5 * vectors and dims["moves"] == 2 * 0.5 * vectors + vectors
    assert dims["function_cycles"] in (8 * vectors, 14 * vectors) and dims["strided"] == dims["gathers"] == 0


def test_work_that_a_row_shares_runs_once_a_row() -> None:
    """The root of a number of each row is not taken for every element; equal operations are done once."""
    x, row = torch.randn(ROWS, WIDTH), torch.rand(ROWS, 1)
    (plain,), (rooted,) = dims_of(lambda x, row: x * row, x, row), dims_of(lambda x, row: x * row.sqrt(), x, row)
    assert rooted["function_cycles"] == 5 * ROWS or rooted["function_cycles"] == 8 * ROWS
    (twice,) = dims_of(lambda x, row: x * row.sqrt() + x * row.sqrt(), x, row)
    assert twice["function_cycles"] == rooted["function_cycles"] and twice["moves"] == plain["moves"]


def test_a_softmax_reads_its_rows_again_from_a_near_cache() -> None:
    """The largest of a row, the sum and the quotient are three nests over the same rows."""
    (dims,) = dims_of(lambda x: torch.softmax(x, -1), torch.randn(ROWS, WIDTH))
    assert dims["nests"] >= 3 and dims["near_bytes"] >= 4 * ROWS * WIDTH and dims["far_bytes"] >= 2 * 4 * ROWS * WIDTH


def test_columns_are_strided_and_looked_up_rows_gathered() -> None:
    """A sum down the columns takes another line for every vector; an index that is read makes an access indirect."""
    (down,) = dims_of(lambda x: x.sum(0), torch.randn(ROWS, WIDTH))
    assert down["strided"] + down["far_strided"] == ROWS * WIDTH / 16 and down["gathers"] == 0
    (looked,) = dims_of(lambda i, w: F.embedding(i, w) * 2, torch.randint(1000, (ROWS,)), torch.randn(1000, WIDTH))
    assert looked["gathers"] == 2 * ROWS * WIDTH / 16
    assert looked["far_bytes"] == (8 * ROWS) + 2 * 4 * ROWS * WIDTH


def test_a_buffer_that_the_call_before_wrote_is_near() -> None:
    """Of two calls of one function, the first reads what was not seen before, the second what the first one wrote."""
    reads, writes = ((Access("x", 256),), (Access("y", 256),))
    loops = (Loop("op0", 0, "", 64, 4, reads, writes), Loop("op1", 1, "", 64, 4, writes, (Access("z", 256),)))
    launches = tuple(
        Launch("kernel", (name,), (Nest((Touch(one, False, 256.0), Touch(other, True, 256.0)), {}),))
        for name, one, other in (("op0", "x", "y"), ("op1", "y", "z"))
    )
    sizes = {name: 256 for name in ("x", "y", "z")}
    first, second = Region("forward", (), loops, sizes, ("x",), ("z",), launches).dims
    assert (first[0], first[2]) == (0, 512)  # near and far bytes
    assert (second[0], second[2]) == (256, 256)
