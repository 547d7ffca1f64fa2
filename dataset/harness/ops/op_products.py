"""Matrix products, attention and mixtures of experts; products also in fp8 and tf32.

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
from .input_pool import Call, Inputs, Maker, Pool, shares, taking


def _wgrad(pool: Pool, m: int, n: int, k: int) -> Call:
    return Call(torch.mm, lambda: (pool.take(m, n).t(), pool.take(m, k)))


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


def _attention(parts: Callable[..., Inputs], lengths: slice) -> Maker:
    """Attention of ``parts``; its dims are their sizes, of which two are ``lengths``, and whether it is causal."""

    def make(pool: Pool, *dims: int) -> Call:
        *sizes, causal = dims
        _check_lengths(sizes[lengths], causal)
        return Call(lambda q, k, v: attend(q, k, v, causal=bool(causal)), lambda: parts(pool, *sizes))

    return make


def _attention_backward(parts: Callable[..., Inputs], lengths: slice) -> Maker:
    """Gradients of ``_attention``."""

    def make(pool: Pool, *dims: int) -> Call:
        *sizes, causal = dims
        _check_lengths(sizes[lengths], causal)
        leaves = [part.detach().requires_grad_() for part in parts(pool, *sizes)]
        with torch.enable_grad():
            y = attend(*leaves, causal=bool(causal))
        return Call(
            lambda grad: torch.autograd.grad(y, leaves, grad, retain_graph=True), lambda: (pool.take(*y.shape),)
        )

    return make


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


def _fp8(shapes: Callable[..., tuple[tuple[int, int], tuple[int, int]]], *, fast: bool) -> Maker:
    """A product in fp8; ``shapes`` of its operands, of which the second is transposed."""

    def make(pool: Pool, *dims: int) -> Call:
        if any(dim % 16 for dim in dims):
            told = ", ".join(map(str, dims))
            raise HarnessError(f"products in fp8 need dims that are multiples of 16, got {told}")
        left, right = shapes(*dims)
        return Call(scaled_product(pool.device, fast=fast), lambda: (pool.take(*left), pool.take(*right).t()))

    return make


# Mixtures of experts, which get equal shares of the rows: one kernel where the device has it, else a loop over them.


def one_kernel(pool: Pool, n: int, k: int) -> bool:
    """Whether the grouped product of bf16 rows of whole 16 bytes exists (Hopper and later)."""
    if pool.device.type != "cuda" or not hasattr(torch, "_grouped_mm"):
        return False
    return pool.dtype == torch.bfloat16 and n % 8 == k % 8 == 0 and torch.cuda.get_device_capability() >= (9, 0)


def _ends(pool: Pool, m: int, groups: int) -> Tensor:
    return torch.tensor(shares(m, groups), device=pool.device).cumsum(0).to(torch.int32)


def _grouped_linear(pool: Pool, groups: int, m: int, n: int, k: int) -> Call:
    def inputs() -> tuple[Tensor, Tensor]:
        return pool.take(m, k), pool.take(groups, n, k).transpose(1, 2)

    return Call(_grouped(pool, groups, m, n, k), inputs)


def _grouped_dgrad(pool: Pool, groups: int, m: int, n: int, k: int) -> Call:
    return Call(_grouped(pool, groups, m, k, n), lambda: (pool.take(m, n), pool.take(groups, n, k)))


def _grouped(pool: Pool, groups: int, m: int, wide: int, deep: int) -> Callable[[Tensor, Tensor], Tensor]:
    """``y[m, wide] = x[m, deep] @ w[group, deep, wide]``, each row with its group's matrix."""
    if one_kernel(pool, wide, deep):
        ends = _ends(pool, m, groups)
        return lambda x, w: torch._grouped_mm(x, w, offs=ends)
    sizes = shares(m, groups)

    def run(x: Tensor, w: Tensor) -> Tensor:
        y = x.new_empty(m, wide)
        for rows, matrix, out in zip(x.split(sizes), w, y.split(sizes), strict=True):
            torch.mm(rows, matrix, out=out)
        return y

    return run


def _grouped_wgrad(pool: Pool, groups: int, m: int, n: int, k: int) -> Call:
    """``[groups, n, k]`` from ``grad[m, n]`` and ``x[m, k]``."""

    def inputs() -> tuple[Tensor, Tensor]:
        return pool.take(m, n), pool.take(m, k)

    if one_kernel(pool, n, k):
        ends = _ends(pool, m, groups)
        return Call(lambda grad, x: torch._grouped_mm(grad.t(), x, offs=ends), inputs)
    sizes = shares(m, groups)

    def run(grad: Tensor, x: Tensor) -> Tensor:
        weights = x.new_empty(groups, n, k)
        for grads, rows, out in zip(grad.split(sizes), x.split(sizes), weights, strict=True):
            torch.mm(grads.t(), rows, out=out)
        return weights

    return Call(run, inputs)


def _order(pool: Pool, copies: int, tokens: int) -> Tensor:
    """The token of each copy, ``(copies,)``: all of them as often, in no order."""
    return torch.randperm(copies, device=pool.device) % tokens


def _permute(pool: Pool, copies: int, tokens: int, hidden: int) -> Call:
    order = _order(pool, copies, tokens)
    return Call(lambda x: x.index_select(0, order), lambda: (pool.take(tokens, hidden),))


def _unpermute(pool: Pool, copies: int, tokens: int, hidden: int) -> Call:
    order = _order(pool, copies, tokens)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_zeros(tokens, hidden).index_add_(0, order, x * weight)

    return Call(run, lambda: (pool.take(copies, hidden), pool.take(copies, 1)))


def _unpermute_backward(pool: Pool, copies: int, tokens: int, hidden: int) -> Call:
    """Gradients for the copies and their weights."""
    order = _order(pool, copies, tokens)

    def run(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        grads = grad.index_select(0, order)
        return grads * weight, (grads * x).sum(-1)

    return Call(run, lambda: (pool.take(tokens, hidden), pool.take(copies, hidden), pool.take(copies, 1)))


MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "linear": taking(F.linear, lambda m, n, k: [(m, k), (n, k)]),
        "linear_dgrad": taking(torch.mm, lambda m, n, k: [(m, n), (n, k)]),
        "linear_wgrad": _wgrad,
        "bias_grad": taking(lambda grad: grad.sum(0), lambda rows, hidden: [(rows, hidden)]),
        "batched_matmul": _batched_matmul,
        "attention": _attention(_parts, slice(3, 5)),
        "attention_backward": _attention_backward(_parts, slice(3, 5)),
        "mla_attention": _attention(_latent_parts, slice(2, 4)),
        "mla_attention_backward": _attention_backward(_latent_parts, slice(2, 4)),
        "grouped_linear": _grouped_linear,
        "grouped_linear_dgrad": _grouped_dgrad,
        "grouped_linear_wgrad": _grouped_wgrad,
        "permute": _permute,
        "unpermute": _unpermute,
        "unpermute_backward": _unpermute_backward,
    }
)
_FP8: dict[str, Maker] = {
    "linear": _fp8(lambda m, n, k: ((m, k), (n, k)), fast=True),
    "linear_dgrad": _fp8(lambda m, n, k: ((m, n), (k, n)), fast=False),
    "linear_wgrad": _fp8(lambda m, n, k: ((n, m), (k, m)), fast=False),
}
NARROW_MAKERS: MappingProxyType[str, MappingProxyType[str, Maker]] = MappingProxyType(
    {"fp8": MappingProxyType(_FP8), "tf32": MappingProxyType({kind: MAKERS[kind] for kind in _FP8})}
)
