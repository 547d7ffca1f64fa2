"""Products of groups of rows, each with its group's matrix: one kernel where the device has it, else a loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def one_kernel(x: Tensor, wide: int) -> bool:
    """Whether the grouped product of bf16 rows of whole 16 bytes exists (Hopper and later)."""
    if x.device.type != "cuda" or not hasattr(torch, "_grouped_mm"):
        return False
    return x.dtype == torch.bfloat16 and wide % 8 == x.shape[1] % 8 == 0 and torch.cuda.get_device_capability() >= (9, 0)


@lru_cache(maxsize=64)
def _ends(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def grouped(x: Tensor, weights: Tensor | Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """``y[m, wide] = x[m, deep] @ weights[group][deep, wide]``; ``sizes``: rows of each group."""
    wide = weights[0].shape[1]
    if one_kernel(x, wide):
        whole = weights if isinstance(weights, Tensor) else torch.stack(tuple(weights))
        return torch._grouped_mm(x, whole, offs=_ends(tuple(sizes), x.device))
    y = x.new_empty(len(x), wide)
    for rows, matrix, out in zip(x.split(sizes), weights, y.split(sizes), strict=True):
        torch.mm(rows, matrix, out=out)
    return y


def grouped_wgrad(grad: Tensor, x: Tensor, sizes: Sequence[int], scale: float = 1.0) -> Tensor:
    """``[groups, n, k]`` from ``grad[m, n]`` and ``x[m, k]``, times ``scale``."""
    if one_kernel(x, grad.shape[1]):
        whole = torch._grouped_mm(grad.t(), x, offs=_ends(tuple(sizes), x.device))
        return whole if scale == 1.0 else whole.mul_(scale)
    weights = x.new_empty(len(sizes), grad.shape[1], x.shape[1])
    for grads, rows, out in zip(grad.split(sizes), x.split(sizes), weights, strict=True):
        torch.addmm(out, grads.t(), rows, beta=0, alpha=scale, out=out)
    return weights
