"""Fused kernels that CUDA has and the CPU composes of others: the fused ones are recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_aten = torch.ops.aten
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_library = torch.library.Library("aten", "IMPL")


class _RMSNorm(torch.autograd.Function):
    """``_fused_rms_norm`` with its backward, as autograd has it for CUDA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            y, rstd = _aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape = shape
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, rstd

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        x, rstd, weight = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        dx, dweight = _aten._fused_rms_norm_backward.default(gradient.contiguous(), x, ctx.shape, rstd, weight, needed)
        return dx, None, dweight, None


def _differentiable_rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    return _RMSNorm.apply(x, shape, weight, eps)


def _fake_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    sizes = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(sizes, dtype=torch.float32)


def _fake_rms_norm_backward(
    gradient: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, needed: list[bool]
) -> Any:
    dweight = torch.empty_like(weight) if weight is not None and needed[1] else None
    return torch.empty_like(x) if needed[0] else None, dweight


def _fake_grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Of any type, as the kernels take them; PyTorch's own rule of shapes refuses all but bf16."""
    rows, columns = a.shape[-2], b.shape[-1]
    groups = [offs.shape[0]] if offs is not None and a.dim() == b.dim() == 2 else list(a.shape[:1])
    shape = [*groups, rows, columns] if a.dim() == b.dim() else [rows, columns]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


# Shapes of what they return, asked for within the mode.
FAKE: dict[Any, Any] = {
    _aten._grouped_mm.default: _fake_grouped_mm,
    _aten._fused_rms_norm.default: _fake_rms_norm,
    _aten._fused_rms_norm_backward.default: _fake_rms_norm_backward,
}


def install() -> None:
    """Register the fused kernels on the CPU with autograd."""
    _library.impl("_fused_rms_norm", _differentiable_rms_norm, "AutogradCPU")


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``torch.nn.functional.rms_norm`` by the fused kernel."""
    normed: Tensor = _aten._fused_rms_norm.default(x, list(shape), weight, eps)[0]
    return normed


def attention(func: Any, args: Any, kwargs: Any) -> Tensor:
    """``scaled_dot_product_attention``: dropout is within the device's kernel.

    DTensors, as context parallelism makes them, take the device's flash kernel, which DTensor knows.
    """
    named = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs, "dropout_p": 0.0}
    q, k, v = (named.pop(name) for name in _ATTENTION[:3])
    if type(q) is DTensor and named.get("attn_mask") is None:
        causal, scale = named.get("is_causal", False), named.get("scale")
        y: Tensor = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[0]
        return y
    found: Tensor = func(q, k, v, **named)
    return found


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.dropout`` by the fused kernel."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x
