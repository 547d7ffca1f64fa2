"""Mixtures of experts: rows to their experts and back, and one product for each expert's rows.

Experts get equal shares of the rows.  Products are one kernel where the device has it (``torch._grouped_mm``), else a
loop over the experts that writes into one result.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from .input_pool import Call, Maker, Pool, shares


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

    return Call(_by_rows(pool, groups, m, n, k), inputs)


def _grouped_dgrad(pool: Pool, groups: int, m: int, n: int, k: int) -> Call:
    return Call(_by_rows(pool, groups, m, k, n), lambda: (pool.take(m, n), pool.take(groups, n, k)))


def _by_rows(pool: Pool, groups: int, m: int, wide: int, deep: int) -> Callable[[Tensor, Tensor], Tensor]:
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
        "grouped_linear": _grouped_linear,
        "grouped_linear_dgrad": _grouped_dgrad,
        "grouped_linear_wgrad": _grouped_wgrad,
        "permute": _permute,
        "unpermute": _unpermute,
        "unpermute_backward": _unpermute_backward,
    }
)
