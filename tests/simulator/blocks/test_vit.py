from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks import family
from tests.simulator.blocks.shapes import items, small_shape, words


def test_patches_are_a_linear_without_a_gradient_of_the_image() -> None:
    """32 patches of two images; the class token comes after."""
    block = family.vit_embedding(small_shape("vit"))
    assert items(block)[0] == Op("linear", (64, 64, 48), "fp32")
    assert words(block, backward=True) == "reduce reduce linear_wgrad bias_grad"


def test_one_row_of_each_image_is_classified() -> None:
    block = family.vit_head(small_shape("vit"))
    assert Op("linear", (2, 512, 64), "fp32") in items(block)
    assert words(block) == "layer_norm copy linear cross_entropy"
