"""Ops on rows: norms, softmax, the gradient of a bias, embedding and loss."""

from __future__ import annotations

from typing import Any

from stepsight.dataset.kinds.call_dims import embedding, embedding_backward, named_calls, normed, rows
from stepsight.dataset.kinds.kind_table import OpKind

_ROWS = ("rows", "hidden")
_SCORES = ("rows", "columns")
_LOGITS = ("rows", "vocab")
_TOKENS = ("tokens", "hidden", "vocab")


def _on_rows(
    name: str, family: str, dim_names: tuple[str, str], code: int, flops: float, moved: float, **more: Any
) -> OpKind:
    """A kind on rows; ``flops`` and ``moved``: FLOP, and elements read and written, per element of the input."""
    return OpKind(
        name=name,
        family=family,
        dim_names=dim_names,
        flops=lambda r, h: flops * r * h,
        elements=lambda r, h: moved * r * h,
        code=code,
        units=lambda r, h: r,
        streams=family == "norm",
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
    _on_rows("layer_norm", "norm", _ROWS, 12, 8.0, 2.0, calls=named_calls("native_layer_norm", normed(0, 2))),
    _on_rows(
        *("layer_norm_backward", "norm", _ROWS, 13, 14.0, 3.0),
        base="layer_norm",
        calls=named_calls("native_layer_norm_backward", normed(1, 5)),
    ),
    _on_rows("rms_norm", "norm", _ROWS, 14, 5.0, 2.0, calls=named_calls("_fused_rms_norm rms_norm", normed(0, 2))),
    _on_rows(
        *("rms_norm_backward", "norm", _ROWS, 15, 10.0, 3.0),
        base="rms_norm",
        calls=named_calls("_fused_rms_norm_backward", normed(1, 4)),
    ),
    _on_rows("softmax", "softmax", _SCORES, 32, 5.0, 2.0),
    _on_rows("softmax_backward", "softmax", _SCORES, 33, 4.0, 3.0, base="softmax"),
    OpKind(
        name="embedding",
        family="embedding",
        dim_names=_TOKENS,
        flops=lambda t, h, v: 0.0,
        elements=lambda t, h, v: 2.0 * t * h,
        code=6,
        units=lambda t, h, v: t,
        calls=named_calls("embedding", embedding),
    ),
    OpKind(
        name="embedding_backward",  # it also clears the whole table's gradient, so that its base is what streams
        family="embedding",
        dim_names=_TOKENS,
        flops=lambda t, h, v: float(t * h),
        elements=lambda t, h, v: 3.0 * t * h + v * h,
        code=7,
        units=lambda t, h, v: t,
        calls=named_calls("embedding_dense_backward", embedding_backward),
    ),
    _on_rows(
        *("cross_entropy", "loss", _LOGITS, 8, 5.0, 2.0),
        calls=named_calls("cross_entropy_loss log_softmax _log_softmax nll_loss_nd nll_loss nll_loss_forward", rows(0)),
        in_parts=True,
    ),
    _on_rows(
        *("cross_entropy_backward", "loss", _LOGITS, 9, 3.0, 2.0),
        base="cross_entropy",
        calls={**named_calls("nll_loss_backward", rows(1)), **named_calls("_log_softmax_backward_data", rows(0))},
        in_parts=True,
    ),
)
