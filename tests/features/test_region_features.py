"""Numbers from the framework ops of a region."""

from __future__ import annotations

from stepsight.dataset.harness.regions.region_record import FrameworkOp, Region
from stepsight.features.region_features import op_numbers


def test_larger_and_slower_ops_cost_more() -> None:
    """A view moves nothing, an addition its bytes, and an exponential takes longer than an addition."""
    ops = [
        FrameworkOp("placeholder", (512, 512), 4, ()), FrameworkOp("aten.view.default", (512 * 512,), 4, (0,)),
        FrameworkOp("aten.add.Tensor", (512, 512), 4, (0,)), FrameworkOp("aten.exp.default", (512, 512), 4, (0,)),
    ]  # fmt: skip
    numbers = op_numbers(Region("inference", tuple(ops), ()))
    _, view, add, exp = numbers.parts.sum(axis=1).tolist()
    assert view < add < exp
    assert len(numbers.x) == len(numbers.key) == len(ops)
