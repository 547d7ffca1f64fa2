"""What frameworks do differently, as jobs say it: dropout, gradient buffers, scattered messages, attention kernels."""

from __future__ import annotations

import pytest

from stepsight.simulator.blocks import family
from stepsight.simulator.blocks.layer_parts import arrivals
from stepsight.simulator.programs.sizes import PartShape
from stepsight.simulator.programs.stage import part_units
from tests.simulator.blocks.shapes import ops, small_shape, words

UNFUSED = {"fused_attention": False}


def test_dropout_of_unfused_scores_is_a_kernel_and_of_residuals_one_more_in_backward() -> None:
    block = family.decoder_layer(small_shape(model={**UNFUSED, "dropout": 0.1}))
    assert "softmax dropout batched_matmul" in words(block)
    assert "dropout_backward" not in words(family.decoder_layer(small_shape(model=UNFUSED)), backward=True)
    numel = [op.dims[0] for op in ops(block, "dropout_backward")]
    assert sorted(numel) == [2 * 32 * 64, 2 * 32 * 64, 2 * 4 * 32 * 32]


def test_fused_attention_drops_scores_at_no_cost() -> None:
    block = family.decoder_layer(small_shape(model={"dropout": 0.1}))
    assert "attention" in words(block) and not ops(block, "dropout")


def test_gradients_added_to_buffers_cost_an_addition_for_each_product() -> None:
    plain, buffers = (small_shape(precision="bf16", kernels={"accumulation": how}) for how in ("product", "buffer"))
    more = len(ops(family.decoder_layer(buffers), "add")) - len(ops(family.decoder_layer(plain), "add"))
    assert more == len(ops(family.decoder_layer(plain), "linear_wgrad")) == 4


def test_gradients_in_16_bits_are_cast_before_they_are_added_to_fp32_buffers() -> None:
    """18 bytes of each weight: read 2 and write 4, then read 8 and write 4."""
    casts = family.decoder_layer(small_shape(precision="bf16", kernels={"accumulation": "cast"}))
    weights = sum(op.dims[1] * op.dims[2] for op in ops(casts, "linear_wgrad"))
    added = [op for op in ops(casts, "add") if op.dtype == "fp32"]
    assert sum(op.num_bytes for op in (*ops(casts, "cast"), *added)) == 18 * weights


@pytest.mark.parametrize(
    ("kernels", "kind"), [("", "attention"), ("flash-3", "attention"), ("flash-2", "flash2_attention")]
)
def test_a_generation_of_attention_has_kernels_of_its_own(kernels: str, kind: str) -> None:
    block = family.decoder_layer(small_shape(model={"attention_kernels": kernels}))
    assert len(ops(block, kind)) == len(ops(block, f"{kind}_backward")) == 1


def test_scattered_activations_are_gathered_where_they_arrive() -> None:
    """Forward on all parts but the first, backward on all but the last."""
    shape = small_shape(tp=2, precision="bf16", scatter_p2p=True)
    first, middle, last = (PartShape((("layer", 1),), first=at == 0, last=at == 2) for at in range(3))
    ends = [[unit.block for unit in part_units(shape, part)] for part in (first, middle, last)]
    here, there = arrivals(shape)
    assert [here in blocks for blocks in ends] == [False, True, True]
    assert [there in blocks for blocks in ends] == [True, True, False]
    gather = here[0].forward[0]
    assert gather.work.num_bytes == 2 * 32 * 64 * 2  # type: ignore[union-attr]
