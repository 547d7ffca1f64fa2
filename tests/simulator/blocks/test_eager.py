"""What frameworks run for norms, rotary positions, gated activations and losses that nothing fuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks import family, layer_parts
from stepsight.simulator.blocks.layer_parts import eager_gated, eager_rms_norm, eager_rope
from stepsight.simulator.blocks.step import Block, RankShape
from tests.simulator.blocks.shapes import GEMMS, both, ops, small_shape, words


def _shape(precision: str = "bf16", **kernels: bool) -> RankShape:
    return small_shape("llama", precision=precision, kernels=dict(kernels))


def _streamed(block: Block) -> float:
    """Bytes that everything but products moves, forward and backward."""
    found = [item for item in both(block) if isinstance(item, Op) and item.kind not in GEMMS]
    return sum(op.num_bytes for op in found)


def test_an_eager_norm_moves_36_bytes_of_each_element_forward_and_68_backward() -> None:
    forward, backward = eager_rms_norm(_shape(), 64, 64)
    assert sum(op.num_bytes for op in forward) == 36 * 64 * 64
    assert sum(op.num_bytes for op in backward) == 68 * 64 * 64


def test_an_eager_gate_moves_10_and_18_bytes_and_rotary_positions_20() -> None:
    forward, backward = eager_gated(_shape(), 100)
    assert sum(op.num_bytes for op in forward) == 1000 and sum(op.num_bytes for op in backward) == 1800
    assert sum(op.num_bytes for op in eager_rope(_shape(), 100)) == 2000


@pytest.mark.parametrize("block", [family.decoder_layer, family.decoder_head])
def test_eager_kernels_stream_more_and_compute_the_same_products(block: object) -> None:
    plain, loose = (block(_shape(separate_kernels=flag)) for flag in (False, True))  # type: ignore[operator]
    assert _streamed(loose) > _streamed(plain)
    products = [[op for kind in GEMMS for op in ops(one, kind)] for one in (plain, loose)]
    assert products[0] == products[1]
    assert [step.parameters for step in plain] == [step.parameters for step in loose]


def test_separate_linears_compute_as_much_with_as_many_weights() -> None:
    """Gradients of the input are summed, by a read of each further one, or an addition if nothing fuses."""
    shape = _shape("fp8", fp8_weights=True)
    for eager, kind in ((False, "reduce"), (True, "add")):
        flags = {"fp8_weights": True, "separate_kernels": eager}
        joined, apart = (family.decoder_layer(_shape("fp8", separate_linears=flag, **flags)) for flag in (False, True))
        assert [len(ops(block, "linear")) for block in (joined, apart)] == [4, 7]
        for gemm in GEMMS:
            assert sum(op.flops for op in ops(joined, gemm)) == sum(op.flops for op in ops(apart, gemm))
        for before, after in zip(joined, apart, strict=True):
            assert sum(before.parameters) == sum(after.parameters) and sum(before.narrow) == sum(after.narrow)
            assert not after.narrow or sorted(after.narrow) == sorted(after.parameters)
        sums = [[op.dims for op in ops(block, kind)].count((shape.rows * 64,)) for block in (joined, apart)]
        assert sums[1] == sums[0] + 3
        assert len(ops(apart, "copy")) == len(ops(joined, "copy")) - 1


def test_norms_that_run_again_do_so_with_the_residual_before_them() -> None:
    plain, again = (family.decoder_layer(_shape(norms_again=flag)) for flag in (False, True))
    assert len(ops(again, "rms_norm")) == 2 * len(ops(plain, "rms_norm"))
    assert {op.dtype for op in ops(again, "rms_norm")} == {"fp32"}
    assert len(ops(again, "add")) == len(ops(plain, "add")) + 2


def test_metrics_read_all_logits_seven_times() -> None:
    plain, counted = _shape(), _shape(token_metrics=True)
    more = _streamed(family.decoder_head(counted)) - _streamed(family.decoder_head(plain))
    logits = plain.rows * plain.model.vocab
    assert more == (5 * 4 + 2 * 8 + 2 * 6) * logits


def test_each_loss_for_metrics_casts_the_logits_and_reads_and_writes_them_in_fp32() -> None:
    plain = _shape()
    counted = replace(plain, model=replace(plain.model, metric_losses=2))
    more = _streamed(family.decoder_head(counted)) - _streamed(family.decoder_head(plain))
    assert more == 2 * (6 + 8) * plain.rows * plain.model.vocab
    assert words(family.decoder_head(counted), backward=True) == words(family.decoder_head(plain), backward=True)


@pytest.mark.parametrize("flag", ["separate_kernels", "norms_again", "token_metrics"])
def test_where_both_types_are_one_nothing_is_cast(flag: str) -> None:
    """Otherwise the same kernels run in the same order."""
    for part in (family.decoder_layer, family.decoder_head):
        full, half = (part(_shape(precision, **{flag: True})) for precision in ("fp32", "bf16"))
        assert "cast" not in words(full) + words(full, backward=True)
        assert [op.kind for op in ops(full)] == [op.kind for op in ops(half) if op.kind != "cast"]


def test_dynamic_scaling_reads_operands_first_and_casts_them_where_they_are_used() -> None:
    """Input, weight, gradient, weight, input: six bytes of each element; current scaling has two of them."""
    finds, casts = {"finds_scales": True}, {"finds_scales": True, "fp8_dynamic": True}
    shapes = [small_shape("llama", precision="fp8", kernels=kernels) for kernels in ({}, finds, casts)]
    rows, n, k = shapes[0].rows, 128, 64
    delayed, current, dynamic = (_streamed((layer_parts.linear(shape, "fc", n, k, rows),)) for shape in shapes)
    assert delayed == 4 * rows * (n + k) and current == 6 * rows * (n + k)
    assert dynamic == 6 * (rows * (n + 2 * k) + 2 * n * k)
