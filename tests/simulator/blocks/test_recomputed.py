"""Modules that backward recomputes: their forward once more, and nothing that they make is kept."""

from typing import Any

import pytest

from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.family import layer_block
from stepsight.simulator.blocks.step import Block, RankShape, kept_bytes
from tests.simulator.blocks.shapes import flops, items, small_shape, words

MIXTURE = {"experts": 8, "experts_per_token": 2, "shared_experts": 1}
LATENT = {
    "attention": "mla", "kv_lora_rank": 32, "q_lora_rank": 48, "rope_head_dim": 8, "v_head_dim": 16, "head_dim": 16,
    "kv_heads": 4,
}  # fmt: skip


def both(kind: str, modules: tuple[str, ...], **model: Any) -> tuple[Block, Block]:
    """A layer without and with recomputed modules."""

    def layer(again: tuple[str, ...]) -> Block:
        shape: RankShape = small_shape("llama", ep=4, precision="bf16", model=model, recompute_modules=again)
        return layer_block(shape, kind)

    return layer(()), layer(modules)


def bytes_of(block: Block) -> float:
    return sum(item.num_bytes for item in items(block, backward=True) if isinstance(item, Op))


def test_the_gates_of_experts_run_again_and_their_output_is_not_kept() -> None:
    plain, again = both("moe", ("moe_act",), **MIXTURE)
    rows, ffn = 64 * 2, 128
    assert words(again) == words(plain)
    assert words(again, backward=True).count("swiglu ") == words(plain, backward=True).count("swiglu ") + 1
    assert bytes_of(again) - bytes_of(plain) == 3 * rows * ffn * 2  # both halves read, one written, in bf16
    assert kept_bytes(plain) - kept_bytes(again) == rows * ffn * 2


def test_biases_and_clamps_are_part_of_the_gate() -> None:
    plain, again = both("moe", ("moe_act",), **MIXTURE, expert_bias=True)
    rows, ffn = 64 * 2, 128
    assert bytes_of(again) - bytes_of(plain) == (3 + 8) * rows * ffn * 2  # two halves and the whole, copied


@pytest.mark.parametrize(("module", "kind"), [("mlp", "dense"), ("moe", "moe"), ("shared_experts", "moe")])
def test_whole_modules_cost_their_forward(module: str, kind: str) -> None:
    """FLOP of backward grow by those of the module's forward; experts are all of a mixture's layer but attention."""
    plain, again = both(kind, (module,), **MIXTURE)
    per_linear = 2 * 64 * 64 * 128
    linears = {"mlp": 3 * 2, "shared_experts": 3, "moe": 3 + 3 * 2}[module] * per_linear  # a dense MLP is twice as wide
    router = 2 * 64 * 64 * 8 if module == "moe" else 0
    kinds = ("linear", "grouped_linear")
    assert flops(again, *kinds) - flops(plain, *kinds) == linears + router
    assert kept_bytes(again) < kept_bytes(plain)


def test_projections_up_of_latent_attention_run_again() -> None:
    plain, again = both("moe", ("mla_up_proj", "layernorm"), **MIXTURE, **LATENT)
    up = 2 * 64 * (48 * 4 * 24 + 32 * 4 * 32)
    assert flops(again, "linear") - flops(plain, "linear") == up
    norms = words(again, backward=True).split().count("rms_norm")
    assert norms - words(plain, backward=True).split().count("rms_norm") == 2
    heads = 4 * (24 + 24 + 16)
    assert kept_bytes(plain) - kept_bytes(again) >= 64 * heads * 2
