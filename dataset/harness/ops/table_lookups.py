"""Lookups in several embedding tables in one call: FBGEMM's where it is installed, else PyTorch's.

Indices hold as many different rows as the op's dims say, scattered over tables of four times as many rows.
"""

from __future__ import annotations

import warnings
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .input_pool import Call, Maker, Pool

try:
    with warnings.catch_warnings(action="ignore"):
        from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
except (ImportError, OSError):  # FBGEMM's libraries are of one release of PyTorch each
    training = None

_SPREAD, _SETS = 4, 4  # rows of a table for each that is looked up; sets of indices that calls take in turn
_RATE, _EPSILON = 1e-4, 1e-8


def _indices(pool: Pool, indices: int, bags: int, distinct: int, tables: int) -> tuple[Tensor, Tensor]:
    """Row numbers table by table, and where each sum begins."""
    each, sums, rows = max(indices // tables, 1), max(bags // tables, 1), _table_rows(distinct, tables)
    found = []
    for _ in range(tables):
        used = torch.randperm(rows, device=pool.device)[: min(rows // _SPREAD, each)]
        ids = torch.cat([used, used[pool.ids(each - len(used), len(used))]])
        found.append(ids[torch.randperm(each, device=pool.device)])
    offsets = torch.arange(tables * sums + 1, device=pool.device) * (tables * each) // (tables * sums)
    return torch.cat(found), offsets


def _table_rows(distinct: int, tables: int) -> int:
    return _SPREAD * max(distinct // tables, 1)


def _fused(pool: Pool, rows: int, hidden: int, tables: int, stateful: bool) -> Any:
    """FBGEMM's module, which steps the optimizer in its backward."""
    on_gpu = pool.device.type == "cuda"
    place = common.EmbeddingLocation.DEVICE if on_gpu else common.EmbeddingLocation.HOST
    device = training.ComputeDevice.CUDA if on_gpu else training.ComputeDevice.CPU
    kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD if stateful else EmbOptimType.EXACT_SGD
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, hidden, place, device)] * tables, optimizer=kind, learning_rate=_RATE, device=pool.device
    )


class _Plain:
    """PyTorch's lookups in one table that stands for all, and the step of the rows that were looked up."""

    def __init__(self, pool: Pool, rows: int, hidden: int) -> None:
        self.table = torch.randn(rows, hidden, device=pool.device).requires_grad_()
        self.state = torch.zeros(rows, device=pool.device)

    def __call__(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return F.embedding_bag(ids, self.table, offsets[:-1], mode="sum", sparse=True)

    def step(self) -> None:
        grad, self.table.grad = self.table.grad, None
        assert grad is not None
        rows, values = grad.coalesce().indices()[0], grad.coalesce().values()
        self.state[rows] += values.square().mean(1)
        scale = _RATE / (self.state[rows].sqrt() + _EPSILON)
        with torch.no_grad():
            self.table.index_add_(0, rows, values * scale[:, None], alpha=-1.0)


def _lookup(pool: Pool, *dims: int) -> Call:
    """Lookups; with the elements of an optimizer's state as a further dim, their backward and its step."""
    indices, hidden, bags, distinct, tables, *states = dims
    turns = cycle([_indices(pool, indices, bags, distinct, tables) for _ in range(_SETS)])
    rows, grad = _table_rows(distinct, tables), list[Tensor]()
    fits = training is not None and hidden % 4 == 0
    look = _fused(pool, rows, hidden, tables, states != [0]) if fits else _Plain(pool, rows * tables, hidden)
    if not states:
        return Call(look, lambda: next(turns), fresh=True)

    def forward() -> tuple[Tensor]:
        with torch.enable_grad():
            return (look(*next(turns)),)

    def backward(out: Tensor) -> None:
        if not grad:
            grad.append(torch.ones_like(out))
        out.backward(grad[0])
        if isinstance(look, _Plain):
            look.step()

    return Call(backward, forward)


MAKERS: dict[str, Maker] = {"table_lookup": _lookup, "table_lookup_backward": _lookup}
