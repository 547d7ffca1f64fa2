"""Matrix products and attention, also in fp8 and tf32.

Dims of products are those of the forward linear (m rows, n outputs, k inputs), also for its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.plan_error import HarnessError
from .composite import attend
from .input_pool import Call, Inputs, Maker, Pool


def _linear(pool: Pool, m: int, n: int, k: int) -> Call:
    return Call(F.linear, lambda: (pool.take(m, k), pool.take(n, k)))


def _dgrad(pool: Pool, m: int, n: int, k: int) -> Call:
    return Call(torch.mm, lambda: (pool.take(m, n), pool.take(n, k)))


def _wgrad(pool: Pool, m: int, n: int, k: int) -> Call:
    return Call(torch.mm, lambda: (pool.take(m, n).t(), pool.take(m, k)))


def _bias_grad(pool: Pool, rows: int, hidden: int) -> Call:
    return Call(lambda grad: grad.sum(0), lambda: (pool.take(rows, hidden),))


def _batched_matmul(pool: Pool, batch: int, m: int, n: int, k: int) -> Call:
    """Batched product as for attention scores: every query with every key."""
    return Call(torch.bmm, lambda: (pool.take(batch, m, k), pool.take(batch, n, k).transpose(1, 2)))


def _parts(pool: Pool, *sizes: int) -> Inputs:
    """Queries, keys and values ``[batch, length, heads, dim]`` of one linear, or of two where lengths differ."""
    b, heads, kv_heads, q_len, kv_len, d = sizes
    if q_len == kv_len:
        q, k, v = pool.take(b, q_len, heads + 2 * kv_heads, d).split([heads, kv_heads, kv_heads], dim=2)
        return q, k, v
    return pool.take(b, q_len, heads, d), *pool.take(b, kv_len, 2 * kv_heads, d).chunk(2, dim=2)


def _latent_parts(pool: Pool, *sizes: int) -> Inputs:
    """Queries, keys and values of latent attention, each of its own."""
    b, heads, q_len, kv_len, qk_dim, v_dim = sizes
    return pool.take(b, q_len, heads, qk_dim), pool.take(b, kv_len, heads, qk_dim), pool.take(b, kv_len, heads, v_dim)


def _attention(pool: Pool, *dims: int) -> Call:
    *sizes, causal = dims
    _check_lengths(sizes[3:5], causal)
    return _forward(lambda: _parts(pool, *sizes), causal)


def _attention_backward(pool: Pool, *dims: int) -> Call:
    *sizes, causal = dims
    _check_lengths(sizes[3:5], causal)
    return _backward(pool, _parts(pool, *sizes), causal)


def _mla_attention(pool: Pool, *dims: int) -> Call:
    *sizes, causal = dims
    _check_lengths(sizes[2:4], causal)
    return _forward(lambda: _latent_parts(pool, *sizes), causal)


def _mla_attention_backward(pool: Pool, *dims: int) -> Call:
    *sizes, causal = dims
    _check_lengths(sizes[2:4], causal)
    return _backward(pool, _latent_parts(pool, *sizes), causal)


def _forward(inputs: Callable[[], Inputs], causal: int) -> Call:
    return Call(lambda q, k, v: attend(q, k, v, causal=bool(causal)), inputs)


def _backward(pool: Pool, inputs: Inputs, causal: int) -> Call:
    parts = [part.detach().requires_grad_() for part in inputs]
    with torch.enable_grad():
        y = attend(*parts, causal=bool(causal))
    return Call(lambda grad: torch.autograd.grad(y, parts, grad, retain_graph=True), lambda: (pool.take(*y.shape),))


def _check_lengths(lengths: Sequence[int], causal: int) -> None:
    """PyTorch's mask of a rectangle begins at its first key, and hides other pairs than half of them."""
    q_len, kv_len = lengths
    if causal and q_len != kv_len:
        raise HarnessError(f"the harness measures causal attention with q_len = kv_len, got {q_len}, {kv_len}")


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Matrix products of fp32 numbers in the block are rounded to tf32 if that is the dtype, else they are not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def scaled_product(device: torch.device, *, fast: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """``y[m, n] = a[m, k] @ b[k, n]`` in bf16, of fp8 operands of which ``b`` lies by columns."""
    scale = torch.ones((), device=device)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return run


def _fp8_linear(pool: Pool, m: int, n: int, k: int) -> Call:
    _check_fp8(m, n, k)
    return Call(scaled_product(pool.device, fast=True), lambda: (pool.take(m, k), pool.take(n, k).t()))


def _fp8_dgrad(pool: Pool, m: int, n: int, k: int) -> Call:
    _check_fp8(m, n, k)
    return Call(scaled_product(pool.device, fast=False), lambda: (pool.take(m, n), pool.take(k, n).t()))


def _fp8_wgrad(pool: Pool, m: int, n: int, k: int) -> Call:
    _check_fp8(m, n, k)
    return Call(scaled_product(pool.device, fast=False), lambda: (pool.take(n, m), pool.take(k, m).t()))


def _check_fp8(*dims: int) -> None:
    if any(dim % 16 for dim in dims):
        raise HarnessError(f"products in fp8 need dims that are multiples of 16, got {', '.join(map(str, dims))}")


MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "linear": _linear,
        "linear_dgrad": _dgrad,
        "linear_wgrad": _wgrad,
        "bias_grad": _bias_grad,
        "batched_matmul": _batched_matmul,
        "attention": _attention,
        "attention_backward": _attention_backward,
        "mla_attention": _mla_attention,
        "mla_attention_backward": _mla_attention_backward,
    }
)
_FP8: dict[str, Maker] = {"linear": _fp8_linear, "linear_dgrad": _fp8_dgrad, "linear_wgrad": _fp8_wgrad}
NARROW_MAKERS: MappingProxyType[str, MappingProxyType[str, Maker]] = MappingProxyType(
    {"fp8": MappingProxyType(_FP8), "tf32": MappingProxyType({kind: MAKERS[kind] for kind in _FP8})}
)
