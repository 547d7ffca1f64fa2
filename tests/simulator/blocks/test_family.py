from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job import specs
from stepsight.dataset.job.job import Job
from stepsight.simulator.blocks import family
from stepsight.simulator.blocks.family import (
    Family,
    embedding_block,
    find_family,
    head_block,
    layer_block,
    register_family,
)
from stepsight.simulator.blocks.step import Block, RankShape
from tests.simulator.blocks.shapes import both, default_kernels, flops, items, ops, parameters, small_shape

FAMILIES = tuple(specs.FAMILIES)
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
        {"offload_activations": True},
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
