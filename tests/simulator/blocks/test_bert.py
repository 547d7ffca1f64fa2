from stepsight.simulator.blocks import bert
from tests.simulator.blocks.shapes import parameters, small_shape, words


def test_norms_come_after_the_residuals() -> None:
    block = bert.layer(small_shape("bert"))
    assert words(block) == "linear attention linear add layer_norm linear gelu linear add layer_norm"
    assert parameters(block) == 12 * 64**2 + 13 * 64


def test_gradients_are_added_where_the_residual_begins() -> None:
    """As often as in a layer with norms before: twice."""
    assert words(bert.layer(small_shape("bert")), backward=True).split().count("add") == 2


def test_masked_tokens_are_predicted_through_a_transform() -> None:
    block = bert.head(small_shape("bert"), shared=True)
    assert words(block) == "linear gelu layer_norm linear cross_entropy"
    assert parameters(block) == 64**2 + 64 + 2 * 64 + 512
