import pytest

from stepsight.simulator.blocks import family
from stepsight.simulator.blocks.step import kept_bytes
from tests.simulator.blocks.shapes import flops, ops, small_shape, words

SEPARATE = {"fused_attention": False}


def test_scores_softmax_and_values_are_kernels_of_their_own() -> None:
    block = family.decoder_layer(small_shape(model=SEPARATE))
    assert "linear batched_matmul softmax batched_matmul linear" in words(block)
    megatron = family.decoder_layer(small_shape(precision="bf16", model=SEPARATE))
    assert "softmax batched_matmul copy linear" in words(megatron)  # heads side by side again
    assert "batched_matmul batched_matmul softmax_backward batched_matmul batched_matmul copy" in words(
        block, backward=True
    )
    assert [step.name for step in block if step.attention_core] == ["scores", "softmax", "context"]


def test_the_whole_square_is_computed_and_backward_costs_twice_as_much() -> None:
    """4 s^2 h b forward, where a causal kernel does half of that."""
    block, fused = family.decoder_layer(small_shape(model=SEPARATE)), family.decoder_layer(small_shape())
    assert flops(block, "batched_matmul") == 3 * 4 * 32**2 * 64 * 2 == 6 * flops(fused, "attention")


def test_the_score_matrix_is_kept_once() -> None:
    """2 a s^2 b bytes in 16 bits, without dropout (Korthikanti et al. 2022); instead of fp32 sums of every row."""
    more, fused = (small_shape(precision="bf16", model=model) for model in (SEPARATE, {}))
    scores, sums = 2 * 4 * 32**2 * 2, 64 * 4 * 4
    assert kept_bytes(family.decoder_layer(more)) - kept_bytes(family.decoder_layer(fused)) == scores - sums


def test_grouped_keys_are_repeated_for_every_head() -> None:
    block = family.decoder_layer(small_shape("llama", model=SEPARATE))
    assert "rope copy batched_matmul" in words(block)
    assert all(op.dims[0] == 2 * 4 for op in ops(block, "batched_matmul"))


@pytest.mark.parametrize("cp", [2, 4])
def test_all_keys_are_fetched_first(cp: int) -> None:
    shape = small_shape(cp=cp, model=SEPARATE, context_parallel="all_gather")
    alone = family.decoder_layer(small_shape(model=SEPARATE))
    assert "all_gather batched_matmul softmax" in words(family.decoder_layer(shape))
    assert flops(family.decoder_layer(shape), "batched_matmul") * cp == flops(alone, "batched_matmul")
