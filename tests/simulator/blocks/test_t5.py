from collections import Counter

from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks import family
from tests.simulator.blocks.shapes import items, ops, parameters, small_model, small_shape, words


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
