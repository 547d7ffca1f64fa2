"""Tensor-parallel communication: the f/g pairs of Megatron-LM (arXiv:1909.08053, arXiv:2205.05198) and the
vocab-parallel embedding and cross-entropy built on them.

Activations are ``[rows, hidden]`` with ``rows = micro_batch * seq_len``.  Sequence parallel shards these rows: every
op between the tensor-parallel regions is row-wise, so any equal partition of the rows will do and none is copied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..base import annotate
from ..base.collective_calls import all_gather, reduce_scatter
from ..ops import composite

Group = dist.ProcessGroup


def _gather_rows(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    output = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    all_gather(output, x, group)
    return output


def _scatter_rows(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    output = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    reduce_scatter(output, x, group)
    return output


class CopyToRegion(torch.autograd.Function):
    """f: identity forward, all-reduce backward (in place: the gradient comes fresh from a linear)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromRegion(torch.autograd.Function):
    """g: all-reduce forward (in place), identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class GatherRows(torch.autograd.Function):
    """Sequence parallel's f: all-gather the rows forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter_rows(grad, ctx.group), None


class ScatterRows(torch.autograd.Function):
    """Sequence parallel's g: reduce-scatter the rows forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_rows(grad, ctx.group), None


class BiasedRowLinear(torch.autograd.Function):
    """A row-parallel linear whose bias, held by every rank, is added once over the group.

    Each rank adds ``bias / size``; the sum over ranks adds it whole, and its gradient is the whole one everywhere.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.t(), beta=1.0 / size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0), None


class VocabEmbedding(torch.autograd.Function):
    """Rows of the embedding that this rank holds; zero where another rank holds the token."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first: int) -> Tensor:
        with annotate.op("embedding", (tokens.numel(), weight.shape[1], weight.shape[0]), weight.dtype):
            local = tokens - first
            outside = ((local < 0) | (local >= weight.shape[0]))[:, None]
            local.clamp_(0, weight.shape[0] - 1)
            ctx.save_for_backward(local, outside)
            ctx.rows = weight.shape[0]
            return F.embedding(local, weight).masked_fill_(outside, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        local, outside = ctx.saved_tensors
        with annotate.op("embedding_backward", (local.numel(), grad.shape[1], ctx.rows), grad.dtype):
            grad = grad.masked_fill(outside, 0.0)
            return None, torch.ops.aten.embedding_dense_backward(grad, local, ctx.rows, -1, False), None


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of ``logits[rows, vocab / size]`` against ``targets[rows]``, times ``scale``.

    With a group, three all-reduces of ``rows`` numbers (maximum, sum, target's logit) join the shards; the arithmetic
    between them is annotated as element-wise.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group | None, scale: float) -> Tensor:
        rows, vocab = logits.shape
        first = 0 if group is None else group.rank() * vocab
        with annotate.op("cross_entropy", (rows, vocab), logits.dtype):
            exponent, total, top, picked = composite.cross_entropy(logits, targets, first)
            if group is None:
                inverse = total.reciprocal()
                loss = (total.log() + top - picked).mean() * scale
        if group is not None:
            highest = top.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            with annotate.op("elementwise", (rows,), logits.dtype):
                shrink = (top - highest).exp_()
                total.mul_(shrink)
            dist.all_reduce(total, group=group)
            dist.all_reduce(picked, group=group)
            with annotate.op("elementwise", (rows,), logits.dtype):
                inverse = shrink.div_(total)
                loss = (total.log() + highest - picked).mean() * scale
        ctx.save_for_backward(exponent, inverse, targets)
        ctx.first, ctx.scale = first, scale
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        exponent, inverse, targets = ctx.saved_tensors
        with annotate.op("cross_entropy_backward", exponent.shape, exponent.dtype):
            weight = grad * (ctx.scale / exponent.shape[0])
            out = composite.cross_entropy_backward(exponent, inverse * weight, weight, targets, ctx.first)
        return out, None, None, None
