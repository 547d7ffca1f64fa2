"""Attention as separate kernels agrees with the plain formula, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from stepsight.dataset.harness.models.transformer import BUCKETS, relative_buckets
from stepsight.dataset.harness.ops import composite

BATCH, HEADS, DIM, LENGTH, KV_LENGTH = 2, 3, 4, 5, 7


def _random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)), requires_grad=True)


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float) -> Tensor:
    """Of ``[length, batch, heads, dim]`` each; ``[rows, heads * dim]``."""
    weights = torch.softmax(torch.einsum("qbhd,kbhd->bhqk", q, k) + bias, -1)
    return torch.einsum("bhqk,kbhd->qbhd", weights, v).reshape(q.shape[0] * BATCH, -1)


def _same(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(theirs, inputs, grad, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, grad), expected)


def test_self_attention_with_a_bias() -> None:
    qkv, bias = _random(LENGTH * BATCH, HEADS * 3 * DIM), _random(HEADS, LENGTH, LENGTH)
    parts = qkv.view(LENGTH, BATCH, HEADS, 3, DIM).unbind(3)
    _same(composite.SelfAttention.apply(qkv, bias, BATCH), _plain(*parts, bias), qkv, bias)


def test_cross_attention() -> None:
    q, kv = _random(LENGTH * BATCH, HEADS * DIM), _random(KV_LENGTH * BATCH, HEADS * 2 * DIM)
    parts = q.view(LENGTH, BATCH, HEADS, DIM), *kv.view(KV_LENGTH, BATCH, HEADS, 2, DIM).unbind(3)
    _same(composite.CrossAttention.apply(q, kv, HEADS, BATCH), _plain(*parts, 0.0), q, kv)


def test_relative_bias_looks_up_and_hides_what_comes_later() -> None:
    table, bucket = _random(BUCKETS, HEADS), relative_buckets(LENGTH, causal=True)
    bias = composite.RelativeBias.apply(table, bucket, True)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert bool((bias[:, ~seen] == -torch.inf).all())
    expected = table[bucket].permute(2, 0, 1)
    _same(composite.RelativeBias.apply(table, bucket, False), expected, table)


def test_near_distances_have_a_bucket_each_and_far_ones_share() -> None:
    """Raffel et al. 2019: half of the buckets are exact, the rest logarithmic; two directions where all is seen."""
    causal, both = (relative_buckets(300, causal=causal) for causal in (True, False))
    assert causal[16, :17].flip(0).tolist() == list(range(17))
    assert int(causal[299, 0]) == BUCKETS - 1
    assert int(both[0, 1]) == BUCKETS // 2 + 1
    assert int(both.max()) == BUCKETS - 1


def test_relu_and_geglu_are_pytorchs() -> None:
    x = _random(6, 16)
    gate, up = x.chunk(2, dim=-1)
    _same(composite.ReLU.apply(x), torch.relu(x), x)
    _same(composite.GeGLU.apply(x), torch.nn.functional.gelu(gate, approximate="tanh") * up, x)
