import pytest

from stepsight.dataset.job import ModelSpec
from stepsight.dataset.op import Collective, Op
from stepsight.simulator.layers import Block, RankShape, embedding_block, head_block, layer_block


def shape(family: str = "gpt", tp: int = 1, sequence_parallel: bool = False) -> RankShape:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 512, "seq_len": 32}
    model = ModelSpec(family=family, kv_heads=2 if family == "llama" else 4, gated_mlp=family == "llama", **sizes)
    return RankShape(model, 2, "fp32", tp, tp, sequence_parallel)


def words(block: Block, *, backward: bool = False) -> str:
    steps = [step.full_backward for step in reversed(block)] if backward else [s.forward for s in block]
    return " ".join(work.kind for works in steps for work in works)


def test_gpt_layer_forward() -> None:
    assert words(layer_block(shape())) == ("layer_norm linear attention linear add layer_norm linear gelu linear add")


def test_gpt_layer_backward() -> None:
    linear = "linear_dgrad linear_wgrad bias_grad"
    assert words(layer_block(shape()), backward=True) == (
        f"{linear} gelu_backward {linear} layer_norm_backward add "
        f"{linear} attention_backward copy {linear} layer_norm_backward add"
    )


def test_llama_layer_has_rotary_gated_mlp_and_no_biases() -> None:
    block = layer_block(shape("llama"))
    assert words(block) == "rms_norm linear rope attention linear add rms_norm linear swiglu linear add"
    assert "bias_grad" not in words(block, backward=True)
    assert words(block, backward=True).split().count("linear_wgrad") == 4
    assert "rope_backward linear_wgrad linear_dgrad" in words(block, backward=True)
    qkv = next(step for step in block if step.name == "qkv")
    assert qkv.forward[0].dims == (64, (4 + 2 * 2) * 16, 64)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_tensor_parallel_halves_gemms_and_reduces_what_they_leave(family: str) -> None:
    """Two all-reduces forward, two backward, each of the whole activation (Shoeybi et al. 2019)."""
    block = layer_block(shape(family, tp=2))
    full = Collective("all_reduce", 64 * 64 * 4, 2, 2)
    assert [w for step in block for w in step.forward if isinstance(w, Collective)] == [full, full]
    assert [w for step in block for w in step.backward if isinstance(w, Collective)] == [full, full]
    gemms = [w for s in block for w in s.forward if isinstance(w, Op) and w.kind == "linear"]
    whole = [w for s in layer_block(shape(family)) for w in s.forward if isinstance(w, Op) and w.kind == "linear"]
    assert sum(gemm.flops for gemm in gemms) * 2 == sum(gemm.flops for gemm in whole)


def test_sequence_parallel_gathers_and_scatters_instead() -> None:
    """The volume of an all-reduce stays; norms and residuals hold a share of the rows (Korthikanti et al. 2022)."""
    block = layer_block(shape(tp=2, sequence_parallel=True))
    assert words(block).count("all_gather") == words(block).count("reduce_scatter") == 2
    assert words(block, backward=True).count("all_gather") == words(block, backward=True).count("reduce_scatter") == 2
    norm = next(step for step in block if step.name == "norm1")
    assert norm.forward[0] == Op("layer_norm", (32, 64), "fp32")


def test_embedding_computes_no_gradient_of_its_input() -> None:
    block = embedding_block(shape())
    assert words(block) == "embedding add"
    assert words(block, backward=True) == "reduce embedding_backward"


def test_head_shares_the_table_of_tied_embeddings() -> None:
    assert sum(sum(step.parameters) for step in head_block(shape(), shared=True)) == 2 * 64
    assert sum(sum(step.parameters) for step in head_block(shape())) == 2 * 64 + 512 * 64


def test_parameters_of_a_gpt_layer() -> None:
    """12 h^2 + 13 h."""
    assert sum(sum(step.parameters) for step in layer_block(shape())) == 12 * 64**2 + 13 * 64
