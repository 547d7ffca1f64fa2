"""One op by its signature, made callable: the same functions that the model runs, on inputs from a rotating pool.

Inputs are views into one large block that each call reads at another place, so that weights and activations come from
memory, as in a training step, and making them costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kernels
from .errors import HarnessError
from .model import attention

Inputs = tuple[Tensor, ...]
DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


class Pool:
    """Random numbers to read inputs from, without copying.

    Args:
        device: Where.
        dtype: Of the inputs.
        numel: Least size of the block; it grows to hold an op's inputs twice.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, numel: int = 2**24) -> None:
        self.device, self.dtype = device, dtype
        self._block = self._make(numel)
        self._next = 0

    def _make(self, numel: int) -> Tensor:
        return torch.empty(numel, device=self.device, dtype=self.dtype).uniform_(-0.5, 0.5)

    def take(self, *shape: int) -> Tensor:
        """The next numbers, shaped; call after call they are other ones, until the block is through."""
        numel = 1
        for size in shape:
            numel *= size
        if 2 * numel > self._block.numel():
            self._block, self._next = self._make(2 * numel), 0
        if self._next + numel > self._block.numel():
            self._next = 0
        view = self._block[self._next : self._next + numel].view(shape)
        self._next += -(-numel // 64) * 64
        return view

    def ids(self, count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), device=self.device)


@dataclass(frozen=True)
class Call:
    """One op: ``run(*inputs())`` runs it once; making the inputs is no part of it."""

    run: Callable[..., object]
    inputs: Callable[[], Inputs] = tuple


def op_call(kind: str, dims: list[int], pool: Pool) -> Call:
    """The op of this signature, ready to be called.

    Raises:
        HarnessError: If the harness has no such op.
    """
    make = _MAKERS.get(kind)
    if make is None:
        raise HarnessError(f"op kind must be one of {', '.join(_MAKERS)}, got {kind!r}")
    return make(pool, *dims)


def _linear(pool: Pool, m: int, n: int, k: int) -> Call:
    return Call(F.linear, lambda: (pool.take(m, k), pool.take(n, k)))


def _dgrad(pool: Pool, m: int, n: int, k: int) -> Call:
    # dims are those of the forward linear (m = rows, n = outputs, k = inputs)
    return Call(torch.mm, lambda: (pool.take(m, n), pool.take(n, k)))


def _wgrad(pool: Pool, m: int, n: int, k: int) -> Call:
    return Call(torch.mm, lambda: (pool.take(m, n).t(), pool.take(m, k)))


def _bias_grad(pool: Pool, rows: int, hidden: int) -> Call:
    return Call(lambda grad: grad.sum(0), lambda: (pool.take(rows, hidden),))


def _attention(pool: Pool, b: int, heads: int, kv_heads: int, q_len: int, kv_len: int, d: int, causal: int) -> Call:
    _check_attention(q_len, kv_len, causal)
    return Call(lambda qkv: attention(qkv, heads, kv_heads), lambda: (pool.take(b, q_len, heads + 2 * kv_heads, d),))


def _attention_backward(
    pool: Pool, b: int, heads: int, kv_heads: int, q_len: int, kv_len: int, d: int, causal: int
) -> Call:
    _check_attention(q_len, kv_len, causal)
    fused = pool.take(b, q_len, heads + 2 * kv_heads, d).detach()
    parts = [part.requires_grad_() for part in fused.split([heads, kv_heads, kv_heads], dim=2)]
    q, k, v = (part.transpose(1, 2) for part in parts)
    with torch.enable_grad():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        y = y.transpose(1, 2).reshape(b * q_len, heads * d)
    return Call(lambda grad: torch.autograd.grad(y, parts, grad, retain_graph=True), lambda: (pool.take(*y.shape),))


def _check_attention(q_len: int, kv_len: int, causal: int) -> None:
    if q_len != kv_len or not causal:
        raise HarnessError(
            f"the harness measures causal attention with q_len = kv_len, got {q_len}, {kv_len}, {causal}"
        )


def _embedding(pool: Pool, tokens: int, hidden: int, vocab: int) -> Call:
    return Call(F.embedding, lambda: (pool.ids(tokens, vocab), pool.take(vocab, hidden)))


def _embedding_backward(pool: Pool, tokens: int, hidden: int, vocab: int) -> Call:
    def run(grad: Tensor, ids: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten.embedding_dense_backward(grad, ids, vocab, -1, False)
        return y

    return Call(run, lambda: (pool.take(tokens, hidden), pool.ids(tokens, vocab)))


def _layer_norm(pool: Pool, rows: int, hidden: int) -> Call:
    weight, bias = pool.take(hidden), pool.take(hidden)
    return Call(lambda x: F.layer_norm(x, (hidden,), weight, bias, kernels.EPSILON), lambda: (pool.take(rows, hidden),))


def _layer_norm_backward(pool: Pool, rows: int, hidden: int) -> Call:
    x, weight, bias = pool.take(rows, hidden), pool.take(hidden), pool.take(hidden)
    _, mean, inverse = torch.native_layer_norm(x, (hidden,), weight, bias, kernels.EPSILON)
    backward = torch.ops.aten.native_layer_norm_backward
    return Call(
        lambda grad, x: backward(grad, x, (hidden,), mean, inverse, weight, bias, [True, True, True]),
        lambda: (pool.take(rows, hidden), pool.take(rows, hidden)),
    )


def _rms_norm(pool: Pool, rows: int, hidden: int) -> Call:
    return Call(kernels.rms_norm, lambda: (pool.take(rows, hidden), pool.take(hidden)))


def _rms_norm_backward(pool: Pool, rows: int, hidden: int) -> Call:
    return Call(
        kernels.rms_norm_backward,
        lambda: (pool.take(rows, hidden), pool.take(rows, hidden), pool.take(hidden), pool.take(rows, 1)),
    )


def _gelu(pool: Pool, numel: int) -> Call:
    return Call(lambda x: F.gelu(x, approximate="tanh"), lambda: (pool.take(numel),))


def _gelu_backward(pool: Pool, numel: int) -> Call:
    backward = torch.ops.aten.gelu_backward
    return Call(lambda grad, x: backward(grad, x, approximate="tanh"), lambda: (pool.take(numel), pool.take(numel)))


def _rows(numel: int) -> tuple[int, int]:
    """A matrix of so many elements whose rows are as wide as a model's, where it divides."""
    for width in (4096, 2048, 1024, 512, 256, 128, 64):
        if numel % width == 0 and numel >= 8 * width:
            return numel // width, width
    return 1, numel


def _swiglu(pool: Pool, numel: int) -> Call:
    rows, width = _rows(numel)
    return Call(kernels.swiglu, lambda: (pool.take(rows, 2 * width),))


def _swiglu_backward(pool: Pool, numel: int) -> Call:
    rows, width = _rows(numel)
    return Call(kernels.swiglu_backward, lambda: (pool.take(rows, width), pool.take(rows, 2 * width)))


def _rope(pool: Pool, numel: int) -> Call:
    """Within a fused qkv of half as many values again, in heads as wide as a model's."""
    width = next((width for width in (64, 32, 16, 8, 4, 2) if numel % width == 0), 0)
    if not width:
        raise HarnessError(f"rope rotates pairs: numel must be even, got {numel}")
    heads = next(heads for heads in (8, 4, 2, 1) if numel // width % heads == 0)
    seq_len = numel // width // heads
    cos, sin = kernels.rope_tables(seq_len, width, pool.device, pool.dtype)
    return Call(
        lambda fused: kernels.rope_(fused[:, :, :heads], cos, sin),
        lambda: (pool.take(1, seq_len, heads + -(-heads // 2), width),),
    )


def _cross_entropy(pool: Pool, rows: int, vocab: int) -> Call:
    def run(logits: Tensor, targets: Tensor) -> Tensor:
        _, total, top, picked = kernels.cross_entropy(logits, targets, 0)
        return (total.log() + top - picked).mean()

    return Call(run, lambda: (pool.take(rows, vocab), pool.ids(rows, vocab)))


def _cross_entropy_backward(pool: Pool, rows: int, vocab: int) -> Call:
    weight = torch.ones((), device=pool.device, dtype=pool.dtype)
    scale = torch.ones(rows, device=pool.device, dtype=pool.dtype)
    return Call(
        lambda exponent, targets: kernels.cross_entropy_backward(exponent, scale, weight, targets, 0),
        lambda: (pool.take(rows, vocab), pool.ids(rows, vocab)),
    )


def _adamw(pool: Pool, numel: int, tensors: int) -> Call:
    each, more = divmod(numel, tensors)
    sizes = [each + (index < more) for index in range(tensors)]
    block = torch.zeros(2, numel, device=pool.device, dtype=pool.dtype)
    parameters = [torch.nn.Parameter(part) for part in block[0].split(sizes)]
    for parameter, gradient in zip(parameters, block[1].split(sizes), strict=True):
        parameter.grad = gradient
    return Call(torch.optim.AdamW(parameters, lr=1e-4, fused=True).step)


def _grad_norm(pool: Pool, numel: int, tensors: int) -> Call:
    each = max(1, numel // tensors)
    return Call(
        lambda *grads: torch.nn.utils.get_total_norm(grads), lambda: tuple(pool.take(each) for _ in range(tensors))
    )


def _dropout_backward(pool: Pool, numel: int) -> Call:
    mask = torch.ones(numel, device=pool.device, dtype=torch.bool)
    return Call(lambda grad: torch.ops.aten.native_dropout_backward(grad, mask, 1.1), lambda: (pool.take(numel),))


def _elementwise(function: Callable[..., object], operands: int = 1) -> Callable[..., Call]:
    return lambda pool, numel: Call(function, lambda: tuple(pool.take(numel) for _ in range(operands)))


_MAKERS: MappingProxyType[str, Callable[..., Call]] = MappingProxyType(
    {
        "linear": _linear,
        "linear_dgrad": _dgrad,
        "linear_wgrad": _wgrad,
        "bias_grad": _bias_grad,
        "attention": _attention,
        "attention_backward": _attention_backward,
        "embedding": _embedding,
        "embedding_backward": _embedding_backward,
        "layer_norm": _layer_norm,
        "layer_norm_backward": _layer_norm_backward,
        "rms_norm": _rms_norm,
        "rms_norm_backward": _rms_norm_backward,
        "gelu": _gelu,
        "gelu_backward": _gelu_backward,
        "swiglu": _swiglu,
        "swiglu_backward": _swiglu_backward,
        "rope": _rope,
        "rope_backward": _rope,
        "cross_entropy": _cross_entropy,
        "cross_entropy_backward": _cross_entropy_backward,
        "adamw": _adamw,
        "grad_norm": _grad_norm,
        "dropout": _elementwise(lambda x: torch.native_dropout(x, 0.1, True)),
        "dropout_backward": _dropout_backward,
        "add": _elementwise(torch.add, 2),
        "copy": _elementwise(torch.clone),
        "fill": lambda pool, numel: Call(lambda: torch.zeros(numel, device=pool.device, dtype=pool.dtype)),
        "reduce": lambda pool, numel: Call(lambda x: x.sum(0), lambda: (pool.take(*_rows(numel)),)),
        "elementwise": _elementwise(lambda x: x * 0.5),
    }
)
