"""Context parallelism: attention of a rank's part of every sequence to all of it (see ``ops.part_attention``).

Keys and values are gathered before attention, and again before its backward, whose gradients are reduce-scattered
(``all_gather``).  Or they go round the ranks beside the attention to those at hand (``ring``: Liu et al. 2023,
arXiv:2310.01889); backward begins with those that came last and sends the other way round, each with its gradient
behind it, which is home after the last step (as in Transformer Engine).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import annotate
from ..base.collective_calls import Group, all_gather, reduce_scatter
from ..ops import part_attention as attention


def context_attention(qkv: Tensor, heads: int, group: Group, *, causal: bool, ring: bool) -> Tensor:
    """Attention within ``qkv[batch, length, heads + 2 * kv_heads, dim]``: ``[rows, heads * dim]``."""
    found: Tensor = (RingAttention if ring else GatheredAttention).apply(qkv, heads, causal, group)
    return found.reshape(-1, heads * qkv.shape[3])


def _op(kind: str, q: Tensor, kv: Tensor, kv_len: int, causal: bool) -> Any:
    """The annotation of an attention of ``q`` to so many keys."""
    (batch, length, heads, dim), kv_heads = q.shape, kv.shape[-2] // 2
    return annotate.op(kind, (batch, heads, kv_heads, length, kv_len, dim, int(causal)), q.dtype)


def _joined(*gradients: Tensor) -> Tensor:
    """Gradients of queries, and of keys and values, as that of the tensor that holds both."""
    with annotate.op("copy", (sum(each.numel() for each in gradients),), gradients[0].dtype):
        return torch.cat(gradients, 2)


class GatheredAttention(torch.autograd.Function):
    """Attention to keys and values that are gathered before it."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, causal: bool, group: Group) -> Tensor:
        ctx.how = heads, causal, group
        q, parts = GatheredAttention._gathered(qkv, heads, group)
        with _op("attention", q, parts, len(parts) * q.shape[1], causal):
            parts = attention.in_order(parts, causal)
            found, sums = attention.attend_part(q, parts, group.rank(), causal)
        ctx.save_for_backward(qkv, found, sums)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (qkv, found, sums), (heads, causal, group) = ctx.saved_tensors, ctx.how
        q, parts = GatheredAttention._gathered(qkv, heads, group)
        with _op("attention_backward", q, parts, len(parts) * q.shape[1], causal):
            parts = attention.in_order(parts, causal)
            grad_q, parts = attention.attend_part_backward(grad, q, parts, found, sums, group.rank(), causal)
            parts = attention.by_rank(parts, group.size(), causal)
        own = torch.empty_like(parts[0])
        reduce_scatter(own.view(-1), parts.view(-1), group)
        return _joined(grad_q, own), None, None, None

    @staticmethod
    def _gathered(qkv: Tensor, heads: int, group: Group) -> tuple[Tensor, Tensor]:
        """Queries of this rank; keys and values of all ranks, ``[ranks, batch, length, 2 * kv_heads, dim]``."""
        kv = qkv[:, :, heads:].contiguous()
        parts = kv.new_empty(group.size(), *kv.shape)
        all_gather(parts.view(-1), kv.view(-1), group)
        return qkv[:, :, :heads], parts


class RingAttention(torch.autograd.Function):
    """Attention to keys and values that go round."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, causal: bool, group: Group) -> Tensor:
        size, place = group.size(), group.rank()
        q, held = (each.contiguous() for each in qkv.split([heads, qkv.shape[2] - heads], 2))
        for step in range(size):
            arriving = _Exchange(held, group, 1) if step < size - 1 else None
            rows, keys, kv_len, masked = _visible(q, place, (place - step) % size, causal)
            with _op("attention", q, held, kv_len, masked):
                more, more_sums = attention.piece(q[:, rows], held[:, keys], causal=masked)
            if step == 0:
                found, sums = more.contiguous(), more_sums
            else:
                with annotate.op("elementwise", (sums.numel(),), sums.dtype):
                    share = torch.sigmoid(more_sums - sums[:, :, rows]).transpose(1, 2)[..., None]
                    sums[:, :, rows] = torch.logaddexp(sums[:, :, rows], more_sums)
                with annotate.op("add", (found.numel(),), found.dtype):
                    found[:, rows].lerp_(more, share.to(found.dtype))
            held = held if arriving is None else arriving.wait()
        ctx.save_for_backward(q, held, found, sums)  # not ``qkv``, whose own keys and values come round again
        ctx.how = causal, group
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (q, held, found, sums), (causal, group) = ctx.saved_tensors, ctx.how
        size, place = group.size(), group.rank()
        grad_q, grads = q, list[Tensor]()  # of keys and values that are under way, none at first
        for step in range(size):
            others = step < size - 1
            message = [held, *grads] if others else grads
            arriving = _Exchange(torch.stack(message) if len(message) > 1 else message[0][None], group, -1)
            rows, keys, kv_len, masked = _visible(q, place, (place + 1 + step) % size, causal)
            own = grad[:, rows], q[:, rows], held[:, keys], found[:, rows], sums[:, :, rows]
            with _op("attention_backward", q, held, kv_len, masked):
                more_q, more_kv = attention.piece_backward(*own, causal=masked)
                grad_q = grad_q if step else torch.zeros_like(q)
                grad_q[:, rows] += more_q
                total = torch.zeros_like(held)
                total[:, keys] = more_kv
            arrived = arriving.wait()
            if step:
                with annotate.op("add", (total.numel(),), total.dtype):
                    total += arrived[-1]
            held, grads = arrived[0], [total]
        return _joined(grad_q, *grads), None, None, None


def _visible(q: Tensor, own: int, source: int, causal: bool) -> tuple[slice, slice, int, bool]:
    """Which queries of rank ``own`` see which keys of rank ``source``, and the length and mask of the signature.

    Ranks before it have half of their keys in sight of all queries, those behind it all keys in sight of half of them;
    the signature, which is one for all ranks, has the former.
    """
    length, everything = q.shape[1], slice(None)
    if source == own or not causal:
        return everything, everything, length, causal
    half = length // 2
    rows, keys = (everything, slice(half)) if source < own else (slice(half, None), everything)
    return rows, keys, half, False


class _Exchange:
    """A message to the rank ``turn`` places further on, and one from the rank as far behind."""

    def __init__(self, given: Tensor, group: Group, turn: int) -> None:
        self._given, self._got = given, torch.empty_like(given)
        ranks, place = dist.get_process_group_ranks(group), group.rank()
        ahead, behind = (ranks[(place + way) % len(ranks)] for way in (turn, -turn))
        self._works = dist.isend(given, ahead, group=group), dist.irecv(self._got, behind, group=group)

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()  # type: ignore[union-attr]
        return self._got
