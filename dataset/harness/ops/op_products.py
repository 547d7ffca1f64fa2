"""Matrix products, attention and mixtures of experts; products also in fp8 and tf32.

Dims of products are those of the forward linear (m rows, n outputs, k inputs), also for its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import HarnessError
from .composite import attend
from .input_pool import Call, Inputs, Maker, Pool, Run, shares


def _attention(pool: Pool, *dims: int, latent: bool = False, backward: bool = False) -> Any:
    """Attention, or its gradients: queries, keys and values ``[batch, length, heads, dim]`` are of one linear, of two
    where lengths differ, and each of its own if they are ``latent``.
    """
    b, heads, *sizes, causal = dims
    kv_heads, q_len, kv_len, dim, v_dim = [heads, *sizes] if latent else [*sizes, sizes[-1]]
    if causal and q_len != kv_len:  # PyTorch's mask begins at the first key, and hides other pairs than half
        raise HarnessError(f"the harness measures causal attention with q_len = kv_len, got {q_len}, {kv_len}")

    def parts() -> Inputs:
        if latent:
            return pool.take(b, q_len, heads, dim), pool.take(b, kv_len, heads, dim), pool.take(b, kv_len, heads, v_dim)
        if q_len == kv_len:
            return tuple(pool.take(b, q_len, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=2))
        return pool.take(b, q_len, heads, dim), *pool.take(b, kv_len, 2 * kv_heads, dim).chunk(2, dim=2)

    run = partial(attend, causal=bool(causal))
    if not backward:
        return Call(run, parts)
    return gradients(run, [part.detach().requires_grad_() for part in parts()])


def gradients(run: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Run, torch.Size]:
    """What computes the gradients of a function again and again, and the shape of what it takes."""
    with torch.enable_grad():
        y = run(*leaves)
    return (lambda grad: torch.autograd.grad(y, leaves, grad, retain_graph=True)), y.shape


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
    return partial(torch._scaled_mm, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=fast)


# Mixtures of experts, which get equal shares of the rows: one kernel where the device has it, else a loop over them.


def one_kernel(pool: Pool, n: int, k: int) -> bool:
    """Whether the grouped product of bf16 rows of whole 16 bytes exists (Hopper and later)."""
    if pool.device.type != "cuda" or not hasattr(torch, "_grouped_mm"):
        return False
    return pool.dtype == torch.bfloat16 and n % 8 == k % 8 == 0 and torch.cuda.get_device_capability() >= (9, 0)


def _ends(pool: Pool, sizes: list[int]) -> Tensor:
    return torch.tensor(sizes, device=pool.device).cumsum(0).to(torch.int32)


def _grouped(pool: Pool, groups: int, m: int, wide: int, deep: int) -> Run:
    """``y[m, wide] = x[m, deep] @ w[group, deep, wide]``, each row with its group's matrix."""
    sizes = shares(m, groups)
    if one_kernel(pool, wide, deep):
        return partial(torch._grouped_mm, offs=_ends(pool, sizes))

    def run(x: Tensor, w: Tensor) -> Tensor:
        y = x.new_empty(m, wide)
        for rows, matrix, out in zip(x.split(sizes), w, y.split(sizes), strict=True):
            torch.mm(rows, matrix, out=out)
        return y

    return run


def _grouped_wgrad(pool: Pool, groups: int, m: int, n: int, k: int) -> tuple[Run, tuple[int, int], tuple[int, int]]:
    """``[groups, n, k]`` from ``grad[m, n]`` and ``x[m, k]``."""
    sizes = shares(m, groups)
    ends = _ends(pool, sizes) if one_kernel(pool, n, k) else None

    def run(grad: Tensor, x: Tensor) -> Tensor:
        if ends is not None:
            return torch._grouped_mm(grad.t(), x, offs=ends)
        weights = x.new_empty(groups, n, k)
        for grads, rows, out in zip(grad.split(sizes), x.split(sizes), weights, strict=True):
            torch.mm(grads.t(), rows, out=out)
        return weights

    return run, (m, n), (m, k)


def _permute(kind: str, pool: Pool, copies: int, tokens: int, hidden: int) -> tuple[object, ...]:
    """Copies of tokens, all of them as often, in no order; their weighted sums; gradients of these."""
    order = torch.randperm(copies, device=pool.device) % tokens

    def unpermute(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_zeros(tokens, hidden).index_add_(0, order, x * weight)

    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        grads = grad.index_select(0, order)
        return grads * weight, (grads * x).sum(-1)

    copied = (copies, hidden), (copies, 1)
    return {
        "permute": ((lambda x: x.index_select(0, order)), (tokens, hidden)),
        "unpermute": (unpermute, *copied),
        "unpermute_backward": (backward, (tokens, hidden), *copied),
    }[kind]


MAKERS: dict[str, Maker] = {
    "linear": lambda _, m, n, k: (F.linear, (m, k), (n, k)),
    "linear_dgrad": lambda _, m, n, k: (torch.mm, (m, n), (n, k)),
    "linear_wgrad": lambda pool, m, n, k: (torch.mm, partial(pool.turned, m, n), (m, k)),
    "bias_grad": lambda _, rows, hidden: ((lambda grad: grad.sum(0)), (rows, hidden)),
    "batched_matmul": lambda pool, batch, m, n, k: (torch.bmm, (batch, m, k), partial(pool.turned, batch, n, k)),
    "attention": _attention,
    "attention_backward": partial(_attention, backward=True),
    "mla_attention": partial(_attention, latent=True),
    "mla_attention_backward": partial(_attention, latent=True, backward=True),
    "grouped_linear": lambda pool, groups, m, n, k: (
        _grouped(pool, groups, m, n, k),
        (m, k),
        partial(pool.turned, groups, n, k),
    ),
    "grouped_linear_dgrad": lambda pool, groups, m, n, k: (_grouped(pool, groups, m, k, n), (m, n), (groups, n, k)),
    "grouped_linear_wgrad": _grouped_wgrad,
    **{kind: partial(_permute, kind) for kind in ("permute", "unpermute", "unpermute_backward")},
}
# Places of a product's own rows, columns and what it sums over, in the dims.
_FP8 = {"linear": (0, 1, 2), "linear_dgrad": (0, 2, 1), "linear_wgrad": (1, 2, 0)}


def _fp8(kind: str, pool: Pool, *dims: int) -> tuple[object, ...]:
    if any(dim % 16 for dim in dims):
        raise HarnessError(f"products in fp8 need dims that are multiples of 16, got {', '.join(map(str, dims))}")
    rows, columns, inner = (dims[place] for place in _FP8[kind])
    return scaled_product(pool.device, fast=kind == "linear"), (rows, inner), partial(pool.turned, columns, inner)


NARROW_MAKERS: dict[str, dict[str, Maker]] = {
    "fp8": {kind: partial(_fp8, kind) for kind in _FP8},
    "tf32": {kind: MAKERS[kind] for kind in _FP8},
}
