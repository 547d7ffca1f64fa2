from __future__ import annotations

from typing import Any

import pytest

from stepsight.dataset.kinds.op import OP_KINDS
from stepsight.dataset.kinds.op_kinds import count
from stepsight.dataset.traces.classify import Scope, annotated_op, call_table, classify


def args(*dims: Any, dtype: str = "float", **more: Any) -> dict[str, Any]:
    return {
        "Input Dims": list(dims),
        "Input type": [dtype] * len(dims),
        **{k.replace("_", " "): v for k, v in more.items()},
    }


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("aten::addmm", args([6], [4, 8], [8, 6]), "linear[4x6x8]fp32"),
        ("aten::mm", args([4, 8], [8, 6], dtype="c10::BFloat16"), "linear[4x6x8]bf16"),
        ("aten::bmm", args([3, 4, 8], [3, 8, 6]), "linear[12x6x8]fp32"),
        ("aten::native_layer_norm", args([2, 4, 8], [], [8], [8]), "layer_norm[8x8]fp32"),
        (
            "aten::native_layer_norm_backward",
            args([2, 4, 8], [2, 4, 8], [], [2, 4, 1], [2, 4, 1], [8], [8]),
            "layer_norm_backward[8x8]fp32",
        ),
        ("aten::_fused_rms_norm", args([2, 4, 8], [], [8]), "rms_norm[8x8]fp32"),
        ("aten::embedding", args([50, 8], [2, 4]), "embedding[8x8x50]fp32"),
        (
            "aten::embedding_dense_backward",
            args([2, 4, 8], [2, 4], [], Concrete_Inputs=["", "", "50", "-1", "False"]),
            "embedding_backward[8x8x50]fp32",
        ),
        ("aten::cross_entropy_loss", args([8, 50], [8]), "cross_entropy[8x50]fp32"),
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            args(*[[2, 4, 16, 8]] * 3, Concrete_Inputs=["", "", "", "0.", "True", "", ""]),
            "attention[2x4x4x16x16x8x1]fp32",
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            args([2, 4, 16, 8], [2, 2, 16, 8], [2, 2, 16, 8], Concrete_Inputs=["", "", "", "0.", "False", "False", ""]),
            "attention[2x4x2x16x16x8x0]fp32",
        ),
        ("aten::_fused_adamw_", args([[4, 8], [8]], [[4, 8], [8]], dtype="TensorList"), "adamw[40x2]fp32"),
        ("aten::add", args([2, 8], [8], []), "add[16]fp32"),
        ("aten::cat", args([[2, 8], [3, 8]], [], dtype="TensorList"), "copy[40]fp32"),
        ("aten::zero_", args([4, 4]), "fill[16]fp32"),
        ("aten::mean", args([4, 4]), "reduce[16]fp32"),
        ("aten::mul", args([4], dtype="double"), "elementwise[8]fp32"),
        ("torch::distributed::reducer::mul_out", args([4, 8]), "copy[32]fp32"),
    ],
)
def test_calls_by_name_and_shape(name: str, given: dict[str, Any], expected: str) -> None:
    assert str(classify(name, given, Scope())) == expected


def test_work_on_a_single_number_is_none() -> None:
    assert classify("aten::mul", args([], []), Scope()) is None
    assert classify("aten::add", args([1], [1]), Scope()) is None


def test_a_dropout_that_drops_nothing_is_none() -> None:
    given = args([8], [], [])
    assert classify("aten::dropout", {**given, "Concrete Inputs": ["", "0.", "True"]}, Scope()) is None
    assert (
        str(classify("aten::dropout", {**given, "Concrete Inputs": ["", "0.1", "True"]}, Scope())) == "dropout[8]fp32"
    )


def test_gradients_of_a_product_by_the_forward_sizes() -> None:
    """The forward product settles which gradient it is; a weight stored the other way round changes nothing."""
    forward = (4, 6, 8)
    for shapes, expected in (
        (([4, 6], [6, 8]), "linear_dgrad[4x6x8]fp32"),
        (([6, 4], [4, 8]), "linear_wgrad[4x6x8]fp32"),
        (([8, 4], [4, 6]), "linear_wgrad[4x6x8]fp32"),
    ):
        assert str(classify("aten::mm", args(*shapes), Scope("AddmmBackward0", forward))) == expected


def test_products_of_groups_of_rows() -> None:
    """Rows of 3 groups: ``y[64, 48] = x[64, 32] @ w[3, 32, 48]``, and its two gradients."""
    for shapes, backward, kind in (
        (([64, 32], [3, 32, 48]), "", "grouped_linear"),
        (([64, 48], [3, 48, 32]), "GroupedMmBackward0", "grouped_linear_dgrad"),
        (([48, 64], [64, 32]), "GroupedMmBackward0", "grouped_linear_wgrad"),
    ):
        assert str(classify("aten::_grouped_mm", args(*shapes, [3]), Scope(backward))) == f"{kind}[3x64x48x32]fp32"


def test_gradients_of_a_square_product_by_strides_then_by_order() -> None:
    """A transposed left operand makes a weight's gradient; without strides the input's gradient comes first."""
    square = args([8, 8], [8, 8])
    scope = Scope("MmBackward0", (8, 8, 8))
    strided = {**square, "Input Strides": [[1, 8], [8, 1]]}
    assert classify("aten::mm", strided, scope).kind == "linear_wgrad"  # type: ignore[union-attr]
    scope = Scope("MmBackward0", (8, 8, 8))
    kinds = [classify("aten::mm", square, scope).kind for _ in range(2)]  # type: ignore[union-attr]
    assert kinds == ["linear_dgrad", "linear_wgrad"]


def test_a_sum_in_backward_is_the_gradient_of_a_bias() -> None:
    given = args([2, 4, 8], [], [], Concrete_Inputs=["", "[0, 1]", "True", ""])
    assert str(classify("aten::sum", given, Scope("AddBackward0"))) == "bias_grad[8x8]fp32"
    assert str(classify("aten::sum", given, Scope())) == "reduce[64]fp32"
    over_batch = args([2, 4, 8], [], [], Concrete_Inputs=["", "[0]", "True", ""])
    assert str(classify("aten::sum", over_batch, Scope("AddBackward0"))) == "reduce[64]fp32"


@pytest.mark.parametrize("name", sorted(call_table()))
def test_a_call_without_shapes_keeps_its_kind(name: str) -> None:
    """Traces recorded without shapes still tell what ran; sizes are then 0."""
    op = classify(name, {}, Scope())
    assert op is not None and op.kind in OP_KINDS and set(op.dims) <= {0, 1}


def test_annotations_name_ops() -> None:
    assert str(annotated_op({"kind": "rms_norm", "dims": "4x8", "dtype": "bf16"})) == "rms_norm[4x8]bf16"
    with pytest.raises(ValueError, match="op kind must be one of"):
        annotated_op({"kind": "swoosh", "dims": "4"})


def test_counting_elements() -> None:
    assert count([2, 3]) == 6 and count([[2, 3], [4]]) == 10 and count([]) == 0


def test_joined_tensors_are_of_the_dtype_of_the_op_before() -> None:
    """Traces tell no dtype of a list of tensors; other lists, as an optimizer's, are taken for fp32."""
    given = {"Input Dims": [[[2, 4], [2, 4]], []], "Input type": ["TensorList", "Scalar"]}
    assert str(classify("aten::cat", given, Scope(), "bf16")) == "copy[16]bf16"
    assert str(classify("aten::cat", given, Scope())) == "copy[16]fp32"
    assert str(classify("aten::_foreach_mul_", given, Scope(), "bf16")) == "elementwise[16]fp32"
