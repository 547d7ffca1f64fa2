"""Attention of parts of a sequence, one rank after the other, is that of the whole sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stepsight.dataset.harness.ops import composite
from stepsight.dataset.harness.ops.callables import op_call
from stepsight.dataset.harness.ops.context_attention import attend_parts, attend_parts_backward
from stepsight.dataset.harness.ops.input_pool import Pool

RANKS, BATCH, LENGTH, HEADS, KV_HEADS, DIM = 3, 2, 4, 4, 2, 8  # LENGTH: of a rank


def _parts(whole: Tensor) -> Tensor:
    """A front and a back part of ``[batch, sequence, ...]`` for every rank, ``[ranks, batch, LENGTH, ...]``."""
    pieces = whole.chunk(2 * RANKS, dim=1)
    return torch.stack([torch.cat([pieces[rank], pieces[-1 - rank]], 1) for rank in range(RANKS)])


@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_all_ranks_are_the_whole(causal: bool) -> None:
    torch.manual_seed(3)
    sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    q, k, v, grad = (torch.randn(BATCH, RANKS * LENGTH, n, DIM, requires_grad=True) for n in sizes)
    y = composite.attend(q, k, v, causal=causal).view(grad.shape)
    y.backward(grad)
    expected = _parts(y.detach()), _parts(q.grad), _parts(torch.cat([k.grad, v.grad], 2))
    with torch.no_grad():
        queries, keys, above = _parts(q), _parts(torch.cat([k, v], 2)), _parts(grad)
        total = torch.zeros_like(keys)
        for rank in range(RANKS):
            found = attend_parts(queries[rank], keys, rank, causal)
            torch.testing.assert_close(found[0], expected[0][rank])
            grad_q, grads = attend_parts_backward((above[rank], queries[rank], *found), keys, rank, causal)
            torch.testing.assert_close(grad_q, expected[1][rank])
            total += grads
    torch.testing.assert_close(total, expected[2])


def test_a_rank_of_context_parallelism_is_measured_alone() -> None:
    pool = Pool(torch.device("cpu"), "fp32")
    for kind in ("attention", "attention_backward"):
        call = op_call(kind, [BATCH, HEADS, KV_HEADS, LENGTH, RANKS * LENGTH, DIM, 1], pool)
        assert call.run(*call.inputs())[0].shape == (BATCH, LENGTH, HEADS, DIM)
