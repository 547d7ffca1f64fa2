"""Matrix products, attention and mixtures of experts; products also in fp8 and tf32.

Dims of products are those of the forward linear (m rows, n outputs, k inputs), also for its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import HarnessError
from .composite import attend
from .input_pool import Call, Inputs, Maker, Pool, Run, Turned, made, shares, taking


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


def _attention(parts: Callable[..., Inputs], lengths: slice, *, backward: bool = False) -> Maker:
    """Attention of ``parts``, or its gradients.

    Its dims are the sizes of the parts, of which two are ``lengths``, and whether it is causal.
    """

    def make(pool: Pool, *dims: int) -> Call:
        *sizes, causal = dims
        q_len, kv_len = sizes[lengths]
        if causal and q_len != kv_len:  # PyTorch's mask begins at the first key, and hides other pairs than half
            raise HarnessError(f"the harness measures causal attention with q_len = kv_len, got {q_len}, {kv_len}")
        if not backward:
            return Call(lambda q, k, v: attend(q, k, v, causal=bool(causal)), lambda: parts(pool, *sizes))
        leaves = [part.detach().requires_grad_() for part in parts(pool, *sizes)]
        with torch.enable_grad():
            y = attend(*leaves, causal=bool(causal))
        return Call(
            lambda grad: torch.autograd.grad(y, leaves, grad, retain_graph=True), lambda: (pool.take(*y.shape),)
        )

    return make


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


def _fp8(*, fast: bool) -> Callable[..., Run]:
    def build(pool: Pool, *dims: int) -> Run:
        if any(dim % 16 for dim in dims):
            told = ", ".join(map(str, dims))
            raise HarnessError(f"products in fp8 need dims that are multiples of 16, got {told}")
        return scaled_product(pool.device, fast=fast)

    return build


# Mixtures of experts, which get equal shares of the rows: one kernel where the device has it, else a loop over them.


def one_kernel(pool: Pool, n: int, k: int) -> bool:
    """Whether the grouped product of bf16 rows of whole 16 bytes exists (Hopper and later)."""
    if pool.device.type != "cuda" or not hasattr(torch, "_grouped_mm"):
        return False
    return pool.dtype == torch.bfloat16 and n % 8 == k % 8 == 0 and torch.cuda.get_device_capability() >= (9, 0)


def _ends(pool: Pool, m: int, groups: int) -> Tensor:
    return torch.tensor(shares(m, groups), device=pool.device).cumsum(0).to(torch.int32)


def _grouped(pool: Pool, groups: int, m: int, wide: int, deep: int) -> Run:
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


def _grouped_wgrad(pool: Pool, groups: int, m: int, n: int, k: int) -> Run:
    """``[groups, n, k]`` from ``grad[m, n]`` and ``x[m, k]``."""
    if one_kernel(pool, n, k):
        ends = _ends(pool, m, groups)
        return lambda grad, x: torch._grouped_mm(grad.t(), x, offs=ends)
    sizes = shares(m, groups)

    def run(grad: Tensor, x: Tensor) -> Tensor:
        weights = x.new_empty(groups, n, k)
        for grads, rows, out in zip(grad.split(sizes), x.split(sizes), weights, strict=True):
            torch.mm(grads.t(), rows, out=out)
        return weights

    return run


def _order(pool: Pool, copies: int, tokens: int) -> Tensor:
    """The token of each copy, ``(copies,)``: all of them as often, in no order."""
    return torch.randperm(copies, device=pool.device) % tokens


def _permute(pool: Pool, copies: int, tokens: int, hidden: int) -> Run:
    order = _order(pool, copies, tokens)
    return lambda x: x.index_select(0, order)


def _unpermute(pool: Pool, copies: int, tokens: int, hidden: int) -> Run:
    order = _order(pool, copies, tokens)
    return lambda x, weight: x.new_zeros(tokens, hidden).index_add_(0, order, x * weight)


def _unpermute_backward(pool: Pool, copies: int, tokens: int, hidden: int) -> Run:
    """Gradients for the copies and their weights."""
    order = _order(pool, copies, tokens)

    def run(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        grads = grad.index_select(0, order)
        return grads * weight, (grads * x).sum(-1)

    return run


MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "linear": taking(F.linear, lambda m, n, k: [(m, k), (n, k)]),
        "linear_dgrad": taking(torch.mm, lambda m, n, k: [(m, n), (n, k)]),
        "linear_wgrad": taking(torch.mm, lambda m, n, k: [Turned((m, n)), (m, k)]),
        "bias_grad": taking(lambda grad: grad.sum(0), lambda rows, hidden: [(rows, hidden)]),
        "batched_matmul": taking(torch.bmm, lambda batch, m, n, k: [(batch, m, k), Turned((batch, n, k))]),
        "attention": _attention(_parts, slice(3, 5)),
        "attention_backward": _attention(_parts, slice(3, 5), backward=True),
        "mla_attention": _attention(_latent_parts, slice(2, 4)),
        "mla_attention_backward": _attention(_latent_parts, slice(2, 4), backward=True),
        "grouped_linear": made(_grouped, lambda groups, m, n, k: [(m, k), Turned((groups, n, k))]),
        "grouped_linear_dgrad": made(
            lambda pool, groups, m, n, k: _grouped(pool, groups, m, k, n),
            lambda groups, m, n, k: [(m, n), (groups, n, k)],
        ),
        "grouped_linear_wgrad": made(_grouped_wgrad, lambda groups, m, n, k: [(m, n), (m, k)]),
        "permute": made(_permute, lambda copies, tokens, hidden: [(tokens, hidden)]),
        "unpermute": made(_unpermute, lambda copies, tokens, hidden: [(copies, hidden), (copies, 1)]),
        "unpermute_backward": made(
            _unpermute_backward, lambda copies, tokens, hidden: [(tokens, hidden), (copies, hidden), (copies, 1)]
        ),
    }
)
_FP8: dict[str, Maker] = {
    "linear": made(_fp8(fast=True), lambda m, n, k: [(m, k), Turned((n, k))]),
    "linear_dgrad": made(_fp8(fast=False), lambda m, n, k: [(m, n), Turned((k, n))]),
    "linear_wgrad": made(_fp8(fast=False), lambda m, n, k: [(n, m), Turned((k, m))]),
}
NARROW_MAKERS: MappingProxyType[str, MappingProxyType[str, Maker]] = MappingProxyType(
    {"fp8": MappingProxyType(_FP8), "tf32": MappingProxyType({kind: MAKERS[kind] for kind in _FP8})}
)
