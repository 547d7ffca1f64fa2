import pytest

from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.family import decoder_embedding, decoder_head, decoder_kinds, decoder_layer
from tests.simulator.blocks.shapes import collectives, flops, items, parameters, small_model, small_shape, words


def test_gpt_layer_forward() -> None:
    assert (
        words(decoder_layer(small_shape()))
        == "layer_norm linear attention linear add layer_norm linear gelu linear add"
    )


def test_gpt_layer_backward() -> None:
    linear = "linear_dgrad linear_wgrad bias_grad"
    assert words(decoder_layer(small_shape()), backward=True) == (
        f"{linear} gelu_backward {linear} layer_norm_backward add "
        f"{linear} attention_backward copy {linear} layer_norm_backward add"
    )


def test_llama_layer_has_rotary_gated_mlp_and_no_biases() -> None:
    block = decoder_layer(small_shape("llama"))
    assert words(block) == "rms_norm linear rope attention linear add rms_norm linear swiglu linear add"
    assert "bias_grad" not in words(block, backward=True)
    assert words(block, backward=True).split().count("linear_wgrad") == 4
    assert "rope_backward linear_wgrad linear_dgrad" in words(block, backward=True)
    qkv = next(step for step in block if step.name == "qkv")
    assert qkv.forward == (Op("linear", (64, (4 + 2 * 2) * 16, 64), "fp32"),)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_tensor_parallel_halves_gemms_and_reduces_what_they_leave(family: str) -> None:
    """Two all-reduces forward, two backward, each of the whole activation (Shoeybi et al. 2019)."""
    block = decoder_layer(small_shape(family, tp=2))
    full = Collective("all_reduce", 64 * 64 * 4, 2, 2)
    assert collectives(block, "tp", backward=False) == collectives(block, "tp", backward=True) == [full, full]
    assert flops(block, "linear") * 2 == flops(decoder_layer(small_shape(family)), "linear")


def test_sequence_parallel_gathers_and_scatters_instead() -> None:
    """The volume of an all-reduce stays; norms and residuals hold a share of the rows (Korthikanti et al. 2022)."""
    block = decoder_layer(small_shape(tp=2, sequence_parallel=True))
    assert words(block).count("all_gather") == words(block).count("reduce_scatter") == 2
    assert words(block, backward=True).count("all_gather") == words(block, backward=True).count("reduce_scatter") == 2
    norm = next(step for step in block if step.name == "norm1")
    assert norm.forward == (Op("layer_norm", (32, 64), "fp32"),)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_flop_of_a_layer_is_six_per_parameter_and_token_and_attention(family: str) -> None:
    """Matrix products: 6 x weights x tokens; causal attention: 7 s^2 h b (2 forward, 5 in the backward's kernel)."""
    shape = small_shape(family)
    block = decoder_layer(shape)
    weights = sum(numel for step in block for numel in step.parameters if numel > 2 * 256)
    assert flops(block, "linear", "linear_dgrad", "linear_wgrad") == 6 * weights * shape.rows
    assert flops(block, "attention", "attention_backward") == 7 * 32**2 * 64 * shape.micro_batch


def test_embedding_computes_no_gradient_of_its_input() -> None:
    block = decoder_embedding(small_shape())
    assert words(block) == "embedding add"
    assert words(block, backward=True) == "reduce embedding_backward"


def test_head_shares_the_table_of_tied_embeddings() -> None:
    assert parameters(decoder_head(small_shape(), shared=True)) == 2 * 64
    assert parameters(decoder_head(small_shape())) == 2 * 64 + 512 * 64


def test_parameters_of_a_gpt_layer() -> None:
    """12 h^2 + 13 h."""
    assert parameters(decoder_layer(small_shape())) == 12 * 64**2 + 13 * 64


def test_a_whole_vocabulary_on_every_rank_needs_no_reduction() -> None:
    """Each rank looks up its own rows; with sequence parallelism it fetches all rows before the logits."""
    shape = small_shape(tp=2, vocab_parallel=False, sequence_parallel=True)
    first, last = decoder_embedding(shape), decoder_head(shape)
    assert parameters(first) == parameters(decoder_embedding(small_shape()))
    assert collectives(first, "tp") == []
    assert first[0].replicated and items(first)[0] == Op("embedding", (32, 64, 512), "fp32")
    assert collectives(last, "tp") == [Collective("all_gather", 64 * 64 * 4, 2, 2)]
    assert collectives(decoder_head(small_shape(tp=2, vocab_parallel=False)), "tp") == []


def test_layers_of_a_mixture_are_dense_first_and_then_every_other() -> None:
    model = small_model(layers=7, experts=8, experts_per_token=2, dense_layers=3, moe_every=2)
    assert decoder_kinds(model) == (("dense", 4), ("moe", 1), ("dense", 1), ("moe", 1))
    assert decoder_kinds(small_model()) == (("layer", 2),)
