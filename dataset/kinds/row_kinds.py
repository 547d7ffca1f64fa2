"""Ops on rows: norms, softmax, the gradient of a bias, embedding and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stepsight.dataset.kinds import call_dims
from stepsight.dataset.kinds.call_dims import normed, rows
from stepsight.dataset.kinds.op_kind import Dims, OpKind

_ROWS = ("rows", "hidden")
_SCORES = ("rows", "columns")
_TOKENS = ("tokens", "hidden", "vocab")
_LOGITS = ("rows", "vocab")
_Calls = Mapping[str, Callable[..., Dims | None]]


def _norm(name: str, code: int, flops: float, moved: float, base: str, calls: _Calls) -> OpKind:
    """A norm.

    Args:
        name: Of the kind.
        code: Of the kind.
        flops: FLOP for each element of the input.
        moved: Elements read and written for each element of the input.
        base: See ``OpKind``; empty: what streams.
        calls: See ``OpKind``.
    """
    more: dict[str, Any] = {"base": base} if base else {}
    return OpKind(
        name=name,
        family="norm",
        dim_names=_ROWS,
        flops=lambda r, h: flops * r * h,
        elements=lambda r, h: moved * r * h,
        code=code,
        units=lambda r, h: r,
        streams=True,
        calls=calls,
        **more,
    )


KINDS = (
    OpKind(
        name="bias_grad",
        family="reduce",
        dim_names=_ROWS,
        flops=lambda r, h: float(r * h),
        elements=lambda r, h: float(r * h + h),
        code=3,
    ),
    _norm("layer_norm", 12, 8.0, 2.0, "", {"aten::native_layer_norm": normed(0, 2)}),
    _norm("layer_norm_backward", 13, 14.0, 3.0, "layer_norm", {"aten::native_layer_norm_backward": normed(1, 5)}),
    _norm("rms_norm", 14, 5.0, 2.0, "", {"aten::_fused_rms_norm": normed(0, 2), "aten::rms_norm": normed(0, 2)}),
    _norm("rms_norm_backward", 15, 10.0, 3.0, "rms_norm", {"aten::_fused_rms_norm_backward": normed(1, 4)}),
    OpKind(
        name="softmax",
        family="softmax",
        dim_names=_SCORES,
        flops=lambda r, c: 5.0 * r * c,
        elements=lambda r, c: 2.0 * r * c,
        code=32,
        units=lambda r, c: r,
    ),
    OpKind(
        name="softmax_backward",
        family="softmax",
        dim_names=_SCORES,
        flops=lambda r, c: 4.0 * r * c,
        elements=lambda r, c: 3.0 * r * c,
        code=33,
        units=lambda r, c: r,
        base="softmax",
    ),
    OpKind(
        name="embedding",
        family="embedding",
        dim_names=_TOKENS,
        flops=lambda t, h, v: 0.0,
        elements=lambda t, h, v: 2.0 * t * h,
        code=6,
        units=lambda t, h, v: t,
        calls={"aten::embedding": call_dims.embedding},
    ),
    OpKind(
        name="embedding_backward",  # it also clears the whole table's gradient, so that its base is what streams
        family="embedding",
        dim_names=_TOKENS,
        flops=lambda t, h, v: float(t * h),
        elements=lambda t, h, v: 3.0 * t * h + v * h,
        code=7,
        units=lambda t, h, v: t,
        calls={"aten::embedding_dense_backward": call_dims.embedding_backward},
    ),
    OpKind(
        name="cross_entropy",
        family="loss",
        dim_names=_LOGITS,
        flops=lambda r, v: 5.0 * r * v,
        elements=lambda r, v: 2.0 * r * v,
        code=8,
        units=lambda r, v: r,
        calls={
            "aten::cross_entropy_loss": rows(0),
            "aten::log_softmax": rows(0),
            "aten::_log_softmax": rows(0),
            "aten::nll_loss_nd": rows(0),
            "aten::nll_loss": rows(0),
            "aten::nll_loss_forward": rows(0),
        },
        in_parts=True,
    ),
    OpKind(
        name="cross_entropy_backward",
        family="loss",
        dim_names=_LOGITS,
        flops=lambda r, v: 3.0 * r * v,
        elements=lambda r, v: 2.0 * r * v,
        code=9,
        units=lambda r, v: r,
        base="cross_entropy",
        calls={"aten::nll_loss_backward": rows(1), "aten::_log_softmax_backward_data": rows(0)},
        in_parts=True,
    ),
)
