"""Matrix products; dims are those of the forward linear (m rows, n outputs, k inputs), also for its gradients."""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.nn.functional as F

from .input_pool import Call, Maker, Pool


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


MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "linear": _linear,
        "linear_dgrad": _dgrad,
        "linear_wgrad": _wgrad,
        "bias_grad": _bias_grad,
        "batched_matmul": _batched_matmul,
    }
)
