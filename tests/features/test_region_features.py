"""Numbers from compiled regions."""

from __future__ import annotations

import numpy as np

from stepsight.dataset.harness.regions.region_record import Access, FrameworkOp, Loop, Region
from stepsight.features.region_features import region_numbers

MIB = 2**20


def _loop(name: str, kernel: int, read: str, write: str) -> Loop:
    reads, writes = (Access(read, MIB, "contiguous"),), (Access(write, MIB, "contiguous"),)
    return Loop(
        name, kernel, "", "", MIB // 4, 1, 4, {"load": 1, "add": 1, "store": 1}, reads, writes, (1,), 1, 16, 1024
    )


def _region(kernels: tuple[int, int]) -> Region:
    """Two loops in a chain: ``x -> y -> z``."""
    ops = (FrameworkOp("placeholder", (512, 512), 4, ()), FrameworkOp("aten.add.Tensor", (512, 512), 4, (0,), True))
    loops = (_loop("a", kernels[0], "x", "y"), _loop("b", kernels[1], "y", "z"))
    return Region("inference", ops, loops, {"x": MIB, "y": MIB, "z": MIB}, ("x",), ("z",))


def test_what_stays_within_a_kernel_is_not_moved() -> None:
    """Fusing two loops saves writing and reading the buffer between them."""
    fused, apart = region_numbers(_region((0, 0))), region_numbers(_region((0, 1)))
    assert len(fused.parts["kernel"]) == 1
    assert fused.parts["kernel"].sum() < apart.parts["kernel"].sum()
    assert np.isclose(fused.parts["loop"].sum(), apart.parts["loop"].sum())


def test_edges_follow_buffers() -> None:
    """The reader of a buffer hears from its writer: its bytes, and whether they share a kernel."""
    for kernels, same in (((0, 0), 1.0), ((0, 1), 0.0)):
        index, about = region_numbers(_region(kernels)).edges["loop", "feeds", "loop"]
        assert index.tolist() == [[0], [1]]
        assert np.isclose(about[0, 0], np.log1p(MIB))
        assert about[0, 3] == same


def test_scalar_code_is_slower() -> None:
    """A loop without vectors costs more than the same loop with them."""
    region = _region((0, 1))
    scalar = Loop(**{**{n: getattr(region.loops[0], n) for n in Loop.__slots__}, "tiles": 0, "lanes": 1})
    slow = region_numbers(Region("inference", region.ops, (scalar, region.loops[1]), region.buffers, ("x",), ("z",)))
    assert slow.parts["loop"][0].sum() > 2 * region_numbers(region).parts["loop"][0].sum()
