"""Element-wise ops; dims are the elements of one operand."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from ..plan_error import HarnessError
from . import composite
from .input_pool import Call, Maker, Pool


def _each(function: Callable[..., object], operands: int = 1) -> Maker:
    return lambda pool, numel: Call(function, lambda: tuple(pool.take(numel) for _ in range(operands)))


def _matrix(numel: int) -> tuple[int, int]:
    """A matrix with a number of elements, and rows as wide as a model's if that divides it."""
    for width in (4096, 2048, 1024, 512, 256, 128, 64):
        if numel % width == 0 and numel >= 8 * width:
            return numel // width, width
    return 1, numel


def _gated(function: Callable[[Tensor], Tensor]) -> Maker:
    """``function`` of ``gate_up[rows, 2 * ffn]``."""

    def make(pool: Pool, numel: int) -> Call:
        rows, width = _matrix(numel)
        return Call(function, lambda: (pool.take(rows, 2 * width),))

    return make


def _gated_backward(function: Callable[[Tensor, Tensor], Tensor]) -> Maker:
    def make(pool: Pool, numel: int) -> Call:
        rows, width = _matrix(numel)
        return Call(function, lambda: (pool.take(rows, width), pool.take(rows, 2 * width)))

    return make


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    y: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    return y


def _rope(pool: Pool, numel: int) -> Call:
    """Within a fused qkv of half as many values again, in heads as wide as a model's."""
    width = next((width for width in (64, 32, 16, 8, 4, 2) if numel % width == 0), 0)
    if not width:
        raise HarnessError(f"rope rotates pairs: numel must be even, got {numel}")
    heads = next(heads for heads in (8, 4, 2, 1) if numel // width % heads == 0)
    seq_len = numel // width // heads
    cos, sin = composite.rope_tables(seq_len, width, pool.device, pool.dtype)
    return Call(
        lambda fused: composite.rope_(fused[:, :, :heads], cos, sin),
        lambda: (pool.take(1, seq_len, heads + -(-heads // 2), width),),
    )


def _dropout_backward(pool: Pool, numel: int) -> Call:
    mask = torch.ones(numel, device=pool.device, dtype=torch.bool)
    return Call(lambda grad: torch.ops.aten.native_dropout_backward(grad, mask, 1.1), lambda: (pool.take(numel),))


def _cast(x: Tensor) -> Tensor:
    """Cast to fp32, or from it."""
    return x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)


MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "gelu": _each(composite.gelu),
        "gelu_backward": _each(_gelu_backward, 2),
        "relu": _each(torch.relu),
        "relu_backward": _each(composite.relu_backward, 2),
        "swiglu": _gated(composite.swiglu),
        "swiglu_backward": _gated_backward(composite.swiglu_backward),
        "geglu": _gated(composite.geglu),
        "geglu_backward": _gated_backward(composite.geglu_backward),
        "rope": _rope,
        "rope_backward": _rope,
        "dropout": _each(lambda x: torch.native_dropout(x, 0.1, True)),
        "dropout_backward": _dropout_backward,
        "add": _each(torch.add, 2),
        "copy": _each(torch.clone),
        "fill": lambda pool, numel: Call(lambda: torch.zeros(numel, device=pool.device, dtype=pool.dtype)),
        "reduce": lambda pool, numel: Call(lambda x: x.sum(0), lambda: (pool.take(*_matrix(numel)),)),
        "elementwise": _each(lambda x: x * 0.5),
        "cast": _each(_cast),
    }
)
