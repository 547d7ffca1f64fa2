from dataclasses import replace

from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks import family
from tests.simulator.blocks.shapes import parameters, small_shape, words


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
