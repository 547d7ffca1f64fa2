from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.family import decoder_head, decoder_layer
from stepsight.simulator.blocks.layer_parts import column_linear
from tests.simulator.blocks.shapes import items, ops, small_shape


def test_fp8_products_cast_their_input_and_the_gradient_of_their_output() -> None:
    step = column_linear(small_shape("llama", precision="fp8"), "x", 256, 64)
    assert step.forward == (Op("copy", (64 * 64,), "bf16"), Op("linear", (64, 256, 64), "fp8"))
    assert step.full_backward == (
        Op("copy", (64 * 256,), "bf16"),
        Op("linear_dgrad", (64, 256, 64), "fp8"),
        Op("linear_wgrad", (64, 256, 64), "fp8"),
    )
    assert step.saved_bytes == 64 * 64


def test_all_but_products_of_layers_stay_in_bf16() -> None:
    shape = small_shape("llama", precision="fp8")
    assert {op.kind for op in ops(decoder_layer(shape)) if op.dtype == "fp8"} == {
        "linear",
        "linear_dgrad",
        "linear_wgrad",
    }
    assert not [op for op in ops(decoder_head(shape)) if op.dtype == "fp8"]


def test_other_precisions_cast_nothing() -> None:
    assert not [
        i for i in items(decoder_layer(small_shape("llama", precision="bf16"))) if getattr(i, "kind", "") == "copy"
    ]
