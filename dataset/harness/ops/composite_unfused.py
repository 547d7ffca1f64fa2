"""Attention as separate kernels that keep the scores, with a learned bias: what T5 needs.

Each part is annotated as the op that it is; matrices are ``[heads of all sequences, length, dim]`` views of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import annotate


class SelfAttention(torch.autograd.Function):
    """Self-attention of ``qkv[length * batch, heads * 3 * dim]`` with a ``bias[heads, length, length]``."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor, batch: int) -> Tensor:
        q, k, v = _matrices(qkv, bias.shape[0], batch, 3)
        found, weights = _attend(q, k, v, bias)
        ctx.save_for_backward(qkv, weights)
        ctx.batch = batch
        return found.view(qkv.shape[0], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        qkv, weights = ctx.saved_tensors
        q, k, v = _matrices(qkv, weights.shape[0] // ctx.batch, ctx.batch, 3)
        grad_scores, grad_v = _weights_backward(grad, weights, v)
        with annotate.op("reduce", (grad_scores.numel(),), grad_scores.dtype):
            grad_bias = grad_scores.view(ctx.batch, -1, *grad_scores.shape[1:]).sum(0)
        grad_q = _product(grad_scores, k)
        grad_k = _product(grad_scores.transpose(1, 2), q)
        joined = torch.stack([part.transpose(0, 1) for part in (grad_q, grad_k, grad_v)], dim=2)
        return joined.view(qkv.shape), grad_bias, None


class CrossAttention(torch.autograd.Function):
    """Cross-attention of ``q[length * batch, heads * dim]`` to ``kv[kv_length * batch, heads * 2 * dim]``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, heads: int, batch: int) -> Tensor:
        (queries,), (k, v) = _matrices(q, heads, batch, 1), _matrices(kv, heads, batch, 2)
        found, weights = _attend(queries, k, v, None)
        ctx.save_for_backward(q, kv, weights)
        ctx.heads, ctx.batch = heads, batch
        return found.view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, weights = ctx.saved_tensors
        heads, batch = ctx.heads, ctx.batch
        (queries,), (k, v) = _matrices(q, heads, batch, 1), _matrices(kv, heads, batch, 2)
        grad_q, grad_kv = torch.empty_like(q), torch.empty_like(kv)
        (grad_queries,), (grad_k, grad_v) = _matrices(grad_q, heads, batch, 1), _matrices(grad_kv, heads, batch, 2)
        grad_scores, _ = _weights_backward(grad, weights, v, grad_v)
        _product(grad_scores, k, grad_queries)
        _product(grad_scores.transpose(1, 2), queries, grad_k)
        return grad_q, grad_kv, None, None


class RelativeBias(torch.autograd.Function):
    """Rows of ``table[buckets, heads]`` for ``bucket[length, length]`` as ``[heads, length, length]``."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, bucket: Tensor, causal: bool) -> Tensor:
        ctx.save_for_backward(bucket)
        ctx.buckets = table.shape[0]
        with annotate.op("embedding", (bucket.numel(), table.shape[1], table.shape[0]), table.dtype):
            bias = F.embedding(bucket, table).permute(2, 0, 1).contiguous()
            if causal:
                length = bucket.shape[0]
                hidden = torch.ones(length, length, dtype=torch.bool, device=table.device).triu_(1)
                bias.masked_fill_(hidden, -torch.inf)
        return bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (bucket,) = ctx.saved_tensors
        with annotate.op("embedding_backward", (bucket.numel(), grad.shape[0], ctx.buckets), grad.dtype):
            rows = grad.permute(1, 2, 0).reshape(-1, grad.shape[0])
            return torch.ops.aten.embedding_dense_backward(rows, bucket.view(-1), ctx.buckets, -1, False), None, None


def _matrices(rows: Tensor, heads: int, batch: int, parts: int) -> tuple[Tensor, ...]:
    """``rows[length * batch, heads * parts * dim]`` as ``parts`` times ``[batch * heads, length, dim]``, not copied."""
    length, dim = rows.shape[0] // batch, rows.shape[1] // (heads * parts)
    return tuple(part.transpose(0, 1) for part in rows.view(length, batch * heads, parts, dim).unbind(2))


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """``left[batch, m, k] @ right[batch, k, n]``."""
    dims = (left.shape[0], left.shape[1], right.shape[2], left.shape[2])
    with annotate.op("batched_matmul", dims, left.dtype):
        return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """What each head finds, ``[length, heads, dim]``, and its weights, ``[heads, length, kv_length]``."""
    weights = _product(q, k.transpose(1, 2))
    if bias is not None:
        with annotate.op("add", (weights.numel(),), weights.dtype):
            weights.view(-1, *bias.shape).add_(bias)
    with annotate.op("softmax", (weights.shape[0] * weights.shape[1], weights.shape[2]), weights.dtype):
        weights = torch.softmax(weights, -1)
    found = q.new_empty(q.shape[1], q.shape[0], v.shape[2])
    _product(weights, v, found.transpose(0, 1))
    return found, weights


def _weights_backward(grad: Tensor, weights: Tensor, v: Tensor, grad_v: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of the scores and of the values from that of what the heads found, ``[rows, heads * dim]``."""
    heads, length, _ = weights.shape
    grad = grad.reshape(length, heads, -1).transpose(0, 1)
    grad_weights = _product(grad, v.transpose(1, 2))
    grad_v = _product(weights.transpose(1, 2), grad, grad_v)
    with annotate.op("softmax_backward", (heads * length, weights.shape[2]), weights.dtype):
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    return grad_scores, grad_v
