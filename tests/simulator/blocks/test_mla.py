import pytest

from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.attention import latent_attention
from stepsight.simulator.blocks.family import decoder_layer
from stepsight.simulator.blocks.step import kept_bytes
from tests.simulator.blocks.shapes import collectives, flops, items, parameters, small_shape, words

SIZES = {"attention": "mla", "kv_heads": 4, "head_dim": 16, "kv_lora_rank": 32, "rope_head_dim": 8, "v_head_dim": 12}
QUERIES = {**SIZES, "q_lora_rank": 48}


def test_parameters_follow_the_paper() -> None:
    """DeepSeek-V2, section 2.1: projections down and up, and a norm of each latent."""
    keys_values = 64 * (32 + 8) + 32 + 32 * 4 * (16 + 12)
    out = 4 * 12 * 64
    assert parameters(latent_attention(small_shape("llama", model=SIZES))) == 64 * 4 * 24 + keys_values + out
    queries = 64 * 48 + 48 + 48 * 4 * 24
    assert parameters(latent_attention(small_shape("llama", model=QUERIES))) == queries + keys_values + out


def test_keys_are_wider_than_values() -> None:
    block = latent_attention(small_shape("llama", model=QUERIES))
    assert Op("mla_attention", (2, 4, 32, 32, 24, 12, 1), "fp32") in items(block)
    assert words(block).startswith("linear linear rms_norm rms_norm linear linear rope copy mla_attention linear")
    assert flops(block, "mla_attention") == 2 * 4 * (24 + 12) * 32 * 32


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_share_heads_and_exchange_latents(sequence_parallel: bool) -> None:
    shape = small_shape("llama", tp=2, model=QUERIES, sequence_parallel=sequence_parallel)
    block = latent_attention(shape)
    latents, whole = 64 * (48 + 32 + 8) * 4, 64 * 64 * 4
    words = ("reduce_scatter", "all_gather") if sequence_parallel else ("all_reduce", "all_reduce")
    scatter, gather = words
    backward = collectives(block, "tp", backward=True)
    assert backward[-1] == Collective(scatter, latents, 2, 2)
    assert Collective(gather, latents if sequence_parallel else whole, 2, 2) in collectives(block, "tp", backward=False)
    assert flops(block, "mla_attention") * 2 == flops(
        latent_attention(small_shape("llama", model=QUERIES)), "mla_attention"
    )


def test_a_rings_messages_hold_wide_keys_and_values() -> None:
    block = decoder_layer(small_shape("llama", cp=2, model=QUERIES))
    assert collectives(block, "cp", backward=False)[0].num_bytes == 2 * 16 * 4 * (24 + 12) * 4


def test_the_input_of_both_projections_is_kept_once() -> None:
    for model in (SIZES, QUERIES):
        block = latent_attention(small_shape("llama", model=model))
        assert sum(step.saved_bytes for step in block) - kept_bytes(block) == 64 * 64 * 4
