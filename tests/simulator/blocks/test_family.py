from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job import specs
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks import family
from stepsight.simulator.blocks.family import (
    Family,
    decoder_embedding,
    decoder_head,
    decoder_kinds,
    decoder_layer,
    embedding_block,
    find_family,
    head_block,
    layer_block,
    register_family,
)
from stepsight.simulator.blocks.step import Block, RankShape
from tests.simulator.blocks.shapes import (
    both,
    collectives,
    default_kernels,
    flops,
    items,
    ops,
    parameters,
    small_model,
    small_shape,
    words,
)

FAMILIES = tuple(name for name in specs.FAMILIES if name != "dlrm")  # which has a file of its own
CAUSAL = ("gpt", "llama")


def blocks(shape: RankShape) -> list[Block]:
    """One of each kind of block."""
    kinds = [kind for kind, _ in find_family(shape.model.family).layer_kinds(shape.model)]
    return [embedding_block(shape), *(layer_block(shape, kind) for kind in dict.fromkeys(kinds)), head_block(shape)]


def published(name: str) -> RankShape:
    job = Job.from_dict(
        {
            "model": {"name": name},
            "batch": {"micro_batch": 1, "global_batch": 1},
            "cluster": {"hardware": "h100-sxm-80gb", "devices_per_node": 1},
        }
    )
    return RankShape(job.model, 1, "bf16", default_kernels("bf16"))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-124m", 124_439_808),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v3", 671_026_404_352),  # the published checkpoint has 14,848 biases of the choice beside these
        ("bert-large", 335_174_458),
        ("t5-large", 737_668_096),
        ("t5-11b", 11_307_321_344),
        ("vit-l-16", 304_326_632),
        ("vit-h-14", 632_045_800),
    ],
)
def test_published_models_have_their_published_number_of_parameters(name: str, count: int) -> None:
    """To the last one: what the checkpoints hold."""
    shape = published(name)
    tied = shape.model.tied_embeddings
    layers = find_family(shape.model.family).layer_kinds(shape.model)
    ends = parameters(embedding_block(shape, tied)) + parameters(head_block(shape, tied))
    assert ends + sum(number * parameters(layer_block(shape, kind)) for kind, number in layers) == count


def test_deepseek_v3_activates_37_billion_parameters() -> None:
    """All but the experts that a token does not visit (arXiv:2412.19437, abstract)."""
    shape = published("deepseek-v3")
    model = shape.model
    moe = layer_block(shape, "moe")
    routed = sum(sum(step.parameters) for step in moe if step.expert)
    active = parameters(moe) - routed * (1 - model.experts_per_token / model.experts)
    ends = parameters(embedding_block(shape)) + parameters(head_block(shape))
    assert 3 * parameters(layer_block(shape, "dense")) + 58 * active + ends == pytest.approx(37.5e9, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "vocab_parallel": False},
        {"cp": 2},
        {"cp": 2, "context_parallel": "all_gather"},
        {"model": {"fused_attention": False}},
        {"offload_share": 1.0},
    ],
    ids=str,
)
def test_every_family_builds_in_every_way(family: str, precision: str, changes: dict[str, Any]) -> None:
    """Blocks have parameters, forward and backward, and nothing of size zero."""
    model = {"seq_len": 64, **changes.get("model", {})}
    for block in blocks(small_shape(family, precision=precision, **{**changes, "model": model})):
        assert parameters(block) > 0
        assert items(block) and items(block, backward=True)
        assert all(op.num_bytes > 0 for op in ops(block))


@pytest.mark.parametrize("family", FAMILIES)
def test_backward_has_twice_the_matrix_products_of_forward(family: str) -> None:
    """One product for the input and one for the weights; the patches of ``vit`` have no gradient of their input."""
    for block in blocks(small_shape(family)):
        forward, grads = flops(block, "linear"), flops(block, "linear_dgrad", "linear_wgrad")
        of_patches = sum(item.flops for step in block if step.name == "patches" for item in step.forward)
        assert grads == 2 * forward - of_patches


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_ranks_share_the_layers_flop(family: str) -> None:
    for one, half in zip(blocks(small_shape(family))[1:-1], blocks(small_shape(family, tp=2))[1:-1], strict=True):
        assert flops(half, "linear", "attention") * 2 == flops(one, "linear", "attention")


@pytest.mark.parametrize("family", FAMILIES)
def test_only_decoders_look_back_alone(family: str) -> None:
    shape = small_shape(family)
    kinds = [kind for kind, _ in find_family(family).layer_kinds(shape.model)]
    flags = {op.dims[-1] for kind in kinds for op in ops(layer_block(shape, kind), "attention")}
    assert flags == ({0, 1} if family == "t5" else {1} if family in CAUSAL else {0})


def test_a_family_of_ones_own_is_known_to_jobs() -> None:
    """By the name it was registered with, once."""
    name = "family-of-this-test"
    register_family(
        name, Family(family.decoder_embedding, lambda shape, kind: family.decoder_layer(shape)[:5], family.decoder_head)
    )
    try:
        shape = small_shape(name)
        assert len(layer_block(shape, "layer")) == 5
        assert find_family(name).layer_kinds(shape.model) == (("layer", 2),)
        assert find_family(name).boundary_bytes(shape, 1) == 64 * 64 * 4
        assert both(embedding_block(shape))
    finally:
        specs.FAMILIES.unregister(name)
    with pytest.raises(JobError, match="model family 'gpt' comes with stepsight"):
        register_family("gpt", find_family("gpt"))
    with pytest.raises(JobError, match=r"must be a simulator\.blocks\.Family, got None"):
        register_family(name, None)  # type: ignore[arg-type]
    with pytest.raises(JobError, match=rf"model family must be one of gpt, .* got '{name}'"):
        find_family(name)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (None, "layer of a model family must be a function of shape, kind, got None"),
        (lambda shape: (), r"layer of a model family must take 2 \(shape, kind\), got \(shape\)"),
    ],
)
def test_a_family_of_wrong_functions_is_refused(layer: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        Family(family.decoder_embedding, layer, family.decoder_head)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda shape, kind: 1 / 0, "model family 'broken': layer raises ZeroDivisionError: division by zero"),
        (lambda shape, kind: [1], r"model family 'broken': layer must return a tuple of steps, got \[1\]"),
    ],
)
def test_a_family_whose_blocks_cannot_be_built_says_why(layer: Any, message: str) -> None:
    register_family("broken", Family(family.decoder_embedding, layer, family.decoder_head))
    try:
        shape = small_shape(family="broken")
        with pytest.raises(JobError, match=message):
            layer_block(shape, "layer")
    finally:
        specs.FAMILIES.unregister("broken")


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


def test_norms_come_after_the_residuals() -> None:
    block = family.bert_layer(small_shape("bert"))
    assert words(block) == "linear attention linear add layer_norm linear gelu linear add layer_norm"
    assert parameters(block) == 12 * 64**2 + 13 * 64


def test_gradients_are_added_where_the_residual_begins() -> None:
    """As often as in a layer with norms before: twice."""
    assert words(family.bert_layer(small_shape("bert")), backward=True).split().count("add") == 2


def test_masked_tokens_are_predicted_through_a_transform() -> None:
    block = family.bert_head(small_shape("bert"), shared=True)
    assert words(block) == "linear gelu layer_norm linear cross_entropy"
    assert parameters(block) == 64**2 + 64 + 2 * 64 + 512


def test_only_masked_tokens_reach_the_head() -> None:
    """They are copied together first, and the products have as few rows."""
    shape = small_shape("bert")
    few = family.bert_head(replace(shape, model=replace(shape.model, loss_share=0.25)), shared=True)
    assert words(few) == "copy linear gelu layer_norm linear cross_entropy"
    rows = [item.dims[0] for step in few for item in step.forward if isinstance(item, Op) and item.kind == "linear"]
    assert rows == [shape.rows // 4] * 2


def test_padding_that_is_left_out_shortens_sequences() -> None:
    shape = small_shape("bert")
    short = replace(shape, model=replace(shape.model, unpadded_len=shape.model.seq_len // 2))
    assert 2 * short.rows == shape.rows
    assert parameters(family.bert_embedding(short)) == parameters(family.bert_embedding(shape))


def test_patches_are_a_linear_without_a_gradient_of_the_image() -> None:
    """32 patches of two images; the class token comes after."""
    block = family.vit_embedding(small_shape("vit"))
    assert items(block)[0] == Op("linear", (64, 64, 48), "fp32")
    assert words(block, backward=True) == "reduce reduce linear_wgrad bias_grad"


def test_one_row_of_each_image_is_classified() -> None:
    block = family.vit_head(small_shape("vit"))
    assert Op("linear", (2, 512, 64), "fp32") in items(block)
    assert words(block) == "layer_norm copy linear cross_entropy"


def test_the_decoder_also_looks_at_the_encoder() -> None:
    """32 queries of the decoder, 64 keys of the encoder, every one seen."""
    block = family.t5_layer(small_shape("t5"), "decoder")
    assert [op.dims for op in ops(block, "attention")] == [(2, 4, 4, 32, 32, 16, 1), (2, 4, 4, 32, 64, 16, 0)]
    linears = [item.dims for item in items(block) if isinstance(item, Op) and item.kind == "linear"]
    assert (128, 2 * 64, 64) in linears  # keys and values of the encoder's tokens


def test_encoder_layers_have_the_encoders_tokens() -> None:
    block = family.t5_layer(small_shape("t5"), "encoder")
    assert items(block)[0] == Op("rms_norm", (128, 64), "fp32")
    assert words(block) == "rms_norm linear attention linear add rms_norm linear relu linear add"


def test_the_last_encoder_layer_ends_with_the_encoders_norm() -> None:
    shape = small_shape("t5")
    assert family.t5_kinds(shape.model) == (("encoder", 2), ("last_encoder", 1), ("decoder", 1), ("last_decoder", 1))
    assert family.t5_kinds(small_model("t5", encoder_layers=1))[0] == ("last_encoder", 1)
    more = parameters(family.t5_layer(shape, "last_encoder")) - parameters(family.t5_layer(shape, "encoder"))
    assert more == 64


def test_one_table_embeds_both_and_adds_their_gradients() -> None:
    block = family.t5_embedding(small_shape("t5"))
    assert [op.dims[0] for op in ops(block, "embedding") if op.dims[2] == 512] == [128, 64]
    assert sum(512 * 64 in step.parameters for step in block) == 1
    assert "embedding_backward add embedding_backward" in words(block, backward=True)


def test_every_boundary_passes_encoder_and_decoder() -> None:
    shape = small_shape("t5", precision="bf16")
    assert {family.t5_boundary_bytes(shape, layers) for layers in range(1, 5)} == {(128 + 64) * 64 * 2}


def test_gated_models_have_gated_gelu() -> None:
    assert "geglu" in words(family.t5_layer(small_shape("t5", model={"gated_mlp": True}), "encoder"))


def test_unfused_attention_adds_the_bias_to_the_scores() -> None:
    block = family.t5_layer(small_shape("t5", model={"fused_attention": False}), "encoder")
    assert "batched_matmul add softmax batched_matmul" in words(block)


def test_only_the_last_layers_add_to_no_gradient() -> None:
    """Of the bias (4 heads of 32 x 32) and of the encoder's output (2 x 64 tokens, 64 wide)."""
    shape = small_shape("t5", model={"fused_attention": False})
    both, none = (Counter(ops(family.t5_layer(shape, kind), "add")) for kind in ("decoder", "last_decoder"))
    assert both - none == Counter([shape.op("add", 4 * 32 * 32), shape.op("add", 2 * 64 * 64)])


def test_a_family_with_defaults_reaches_other_processes() -> None:
    """Worker processes of a search get the job's family pickled."""
    own = Family(decoder_embedding, decoder_layer, decoder_head)
    assert pickle.loads(pickle.dumps(own)) == own
