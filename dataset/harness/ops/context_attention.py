"""Context parallelism on CPUs: attention of a rank's part of every sequence to all of it; PyTorch has no rule for it.

A rank of ``n`` has two of ``2 n`` equal parts of every sequence, number ``place`` and ``2 n - 1 - place``: so all have
the same work under a causal mask.  Keys and values are gathered before attention, and again before its backward,
whose gradients are reduce-scattered (Grattafiori et al. 2024, arXiv:2407.21783).  Or they go round the ranks beside the
attention to those at hand (``ring``: Liu et al. 2023, arXiv:2310.01889); backward begins with those that came last and
sends the other way round, each with its gradient behind it, which is home after the last step (as Transformer Engine).

Queries and results are ``[batch, length, heads, dim]``, keys with values ``[batch, length, 2 * kv_heads, dim]``, and
logarithms of the sums of exponentials ``[batch, heads, length]``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import annotate
from ..base.collective_calls import Group, all_gather, reduce_scatter

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads(q: Tensor, kv: Tensor) -> list[Tensor]:
    """Queries, keys and values, each ``[batch, heads, length, dim]``."""
    q, k, v = (each.transpose(1, 2) for each in (q, *kv.chunk(2, dim=2)))
    shared = q.shape[1] // k.shape[1]
    return [q, k, v] if shared == 1 else [q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)]


def _visible(q: Tensor, place: int, source: int, causal: bool) -> tuple[slice, slice, int, bool]:
    """Which queries of rank ``place`` see which keys of rank ``source``; length and mask of the signature.

    All queries see half of the keys of ranks before it, and half of them all keys of those behind it; the signature,
    which is one for all ranks, is of the former.
    """
    half, everything = q.shape[1] // 2, slice(None)
    if source == place or not causal:
        return everything, everything, q.shape[1], causal
    return (everything, slice(half), half, False) if source < place else (slice(half, None), everything, half, False)


def _op(kind: str, q: Tensor, kv: Tensor, kv_len: int, causal: bool) -> Any:
    (batch, length, heads, dim), kv_heads = q.shape, kv.shape[-2] // 2
    return annotate.op(kind, (batch, heads, kv_heads, length, kv_len, dim, int(causal)), q.dtype)


def _attend(before: Any, q: Tensor, kv: Tensor, place: int, source: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Add the attention to the keys of ``source`` to what was found ``before``: results and logarithms."""
    rows, keys, kv_len, masked = _visible(q, place, source, causal)
    with _op("attention", q, kv, kv_len, masked):
        more, more_sums = _flash(*_heads(q[:, rows], kv[:, keys]), 0.0, masked)
    if before is None:
        return more.transpose(1, 2), more_sums
    found, sums = before
    with annotate.op("elementwise", (sums.numel(),), sums.dtype):
        share = torch.sigmoid(more_sums - sums[:, :, rows]).transpose(1, 2)[..., None]
        sums[:, :, rows] = torch.logaddexp(sums[:, :, rows], more_sums)
    with annotate.op("add", (found.numel(),), found.dtype):
        found[:, rows].lerp_(more.transpose(1, 2), share.to(found.dtype))
    return found, sums


def _attend_backward(kept: Any, grad_q: Tensor, kv: Tensor, place: int, source: int, causal: bool) -> Tensor:
    """The gradient of ``kv``, from ``kept``: gradient, queries, results and logarithms; add to that of queries."""
    (grad, q, found, sums), (rows, keys, kv_len, masked) = kept, _visible(kept[1], place, source, causal)
    with _op("attention_backward", q, kv, kv_len, masked):
        above, below = (each[:, rows].transpose(1, 2) for each in (grad, found))
        grads = _flash_backward(above, *_heads(q[:, rows], kv[:, keys]), below, sums[:, :, rows], 0.0, masked)
        more_q, *more_kv = (each.transpose(1, 2) for each in grads)
        grad_q[:, rows] += more_q
        total = torch.zeros_like(kv)
        for into, each in zip(total[:, keys].chunk(2, dim=2), more_kv, strict=True):
            into += each.unflatten(2, (into.shape[2], -1)).sum(3) if into.shape[2] < each.shape[2] else each
    return total


def attend_parts(q: Tensor, parts: Tensor, place: int, causal: bool) -> Any:
    """Attention to keys and values of all ranks, ``[ranks, ...]``: results and logarithms."""
    state, size = None, len(parts)
    with _op("attention", q, parts, size * q.shape[1], causal):
        for source in ((place + turn) % size for turn in range(size)):
            state = _attend(state, q, parts[source], place, source, causal)
    return state


def attend_parts_backward(kept: Any, parts: Tensor, place: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Gradients of ``q`` and ``parts``; ``kept`` as in ``_attend_backward``."""
    q, size = kept[1], len(parts)
    with _op("attention_backward", q, parts, size * q.shape[1], causal):
        grad_q, grads = torch.zeros_like(q), torch.empty_like(parts)
        for source in range(size):
            grads[source] = _attend_backward(kept, grad_q, parts[source], place, source, causal)
    return grad_q, grads


class ContextAttention(torch.autograd.Function):
    """Attention within ``qkv[batch, length, heads + 2 * kv_heads, dim]``."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, group: Group, causal: bool, ring: bool) -> Tensor:
        size, place = group.size(), group.rank()
        state: Any = None
        q, kv = (each.contiguous() for each in qkv.split([heads, qkv.shape[2] - heads], 2))
        if not ring:
            state = attend_parts(q, _gathered(kv, group), place, causal)
        for step in range(size if ring else 0):
            arriving = _Exchange(kv[None], group, 1) if step < size - 1 else None
            state = _attend(state, q, kv, place, (place - step) % size, causal)
            kv = kv if arriving is None else arriving.wait()[0]
        found, sums = state
        ctx.save_for_backward(q, found, sums, kv)  # not ``qkv``: the ring ends with the keys of another rank
        ctx.how = group, causal, ring
        return found.contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (q, found, sums, kv), (group, causal, ring) = ctx.saved_tensors, ctx.how
        size, place, kept = group.size(), group.rank(), (grad, q, found, sums)
        if not ring:
            grad_q, parts = attend_parts_backward(kept, _gathered(kv, group), place, causal)
            total = torch.empty_like(kv)
            reduce_scatter(total.view(-1), parts.view(-1), group)
        else:
            grad_q, totals = torch.zeros_like(grad), list[Tensor]()  # of keys and values under way, none at first
            for step in range(size):
                message = [kv, *totals] if step < size - 1 else totals
                arriving = _Exchange(torch.stack(message) if len(message) > 1 else message[0][None], group, -1)
                total = _attend_backward(kept, grad_q, kv, place, (place + 1 + step) % size, causal)
                kv, *others = arriving.wait()
                if step:
                    with annotate.op("add", (total.numel(),), total.dtype):
                        total += others[0] if others else kv
                totals = [total]
        with annotate.op("copy", (grad_q.numel() + total.numel(),), grad.dtype):
            return torch.cat([grad_q, total], 2), None, None, None, None


def _gathered(kv: Tensor, group: Group) -> Tensor:
    parts = kv.new_empty(group.size(), *kv.shape)
    all_gather(parts.view(-1), kv.view(-1), group)
    return parts


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
