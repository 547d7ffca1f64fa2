from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.family import layer_block
from stepsight.simulator.blocks.step import OverlappedOp, Saved, Step, kept_bytes, offloaded
from tests.simulator.blocks.shapes import items, small_shape, words


def test_what_a_layer_keeps_leaves_and_comes_back_beside_it() -> None:
    shape = small_shape(precision="bf16")
    plain, moved = (
        layer_block(shape, "layer"),
        layer_block(small_shape(precision="bf16", offload_share=1.0), "layer"),
    )
    assert moved[1:-1] == plain
    assert words(moved).startswith("~to_host layer_norm") and words(moved).endswith("add |")
    assert words(moved, backward=True).startswith("~from_host") and words(moved, backward=True).endswith("add |")
    transfer = items(moved)[0]
    assert isinstance(transfer, OverlappedOp)
    assert transfer.work.num_bytes == kept_bytes(plain)
    half = items(layer_block(small_shape(precision="bf16", offload_share=0.5), "layer"))[0]
    assert isinstance(half, OverlappedOp) and half.work.num_bytes == kept_bytes(plain) / 2


def test_a_named_tensor_counts_once() -> None:
    tensor = Saved(8, "x")
    block = (Step("a", saved=(tensor, Saved(4))), Step("b", saved=(tensor,)))
    assert kept_bytes(block) == 12
    assert offloaded(block, "fp32")[0].forward == (OverlappedOp(Op("to_host", (3,), "fp32")),)


def test_nothing_kept_nothing_moved() -> None:
    assert offloaded((Step("a"),), "fp32") == (Step("a"),)
