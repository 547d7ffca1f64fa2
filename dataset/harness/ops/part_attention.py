"""Attention of a part of a sequence, as context parallelism has it, on a CPU: PyTorch's own has no rule for CPUs there.

A rank of a group of ``n`` has two of ``2 n`` equal parts of a sequence: number ``place`` and number ``2 n - 1 -
place``, so that every rank has the same work under a causal mask (Grattafiori et al. 2024, arXiv:2407.21783).  Queries
and results are ``[batch, length, heads, dim]``, keys with values ``[batch, length, 2 * kv_heads, dim]``, the logarithms
of sums of exponentials, which PyTorch's flash attention also gives, ``[batch, heads, length]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def piece(q: Tensor, kv: Tensor, *, causal: bool = False, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention to these keys alone: what it finds, and the logarithms."""
    found, sums = _flash(q.transpose(1, 2), *_by_head(kv, q.shape[2]), 0.0, causal, attn_mask=mask)
    return found.transpose(1, 2), sums


def piece_backward(
    grad: Tensor, q: Tensor, kv: Tensor, found: Tensor, sums: Tensor, *, causal: bool = False, mask: Any = None
) -> tuple[Tensor, Tensor]:
    """Gradients of ``q`` and ``kv``; ``found`` and ``sums`` may be those of more keys than these."""
    grad, heads, found = (each.transpose(1, 2) for each in (grad, q, found))
    grads = _flash_backward(grad, heads, *_by_head(kv, q.shape[2]), found, sums, 0.0, causal, attn_mask=mask)
    grad_q, grad_k, grad_v = (each.transpose(1, 2) for each in grads)
    if (shared := 2 * q.shape[2] // kv.shape[2]) > 1:
        grad_k, grad_v = (each.unflatten(2, (-1, shared)).sum(3) for each in (grad_k, grad_v))
    return grad_q, torch.cat([grad_k, grad_v], 2)


def _by_head(kv: Tensor, heads: int) -> list[Tensor]:
    """Keys and values, each ``[batch, heads, length, dim]``."""
    shared = 2 * heads // kv.shape[2]
    both = [each.transpose(1, 2) for each in kv.chunk(2, dim=2)]
    return both if shared == 1 else [each.repeat_interleave(shared, 1) for each in both]


def attend_part(q: Tensor, kv: Tensor, place: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of rank ``place`` to whole sequences, which are ``in_order``."""
    found = [piece(q[:, rows], kv[:, :count], mask=mask) for rows, count, mask in _pieces(q, kv, place, causal)]
    return torch.cat([each for each, _ in found], 1), torch.cat([each for _, each in found], 2)


def attend_part_backward(
    grad: Tensor, q: Tensor, kv: Tensor, found: Tensor, sums: Tensor, place: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of ``q`` and ``kv``."""
    grads, grad_kv = list[Tensor](), torch.zeros_like(kv)
    for rows, count, mask in _pieces(q, kv, place, causal):
        own = grad[:, rows], q[:, rows], kv[:, :count], found[:, rows], sums[:, :, rows]
        grad_q, more = piece_backward(*own, mask=mask)
        grads.append(grad_q)
        grad_kv[:, :count] += more
    return torch.cat(grads, 1), grad_kv


def in_order(parts: Tensor, causal: bool) -> Tensor:
    """Whole sequences from ``parts[ranks, batch, length, ...]``; without a mask they may be in any order."""
    if not causal:
        return parts.movedim(0, 1).flatten(1, 2)
    front, back = parts.chunk(2, dim=2)
    return torch.cat([*front, *reversed(back.unbind())], 1)


def by_rank(whole: Tensor, size: int, causal: bool) -> Tensor:
    """The parts of whole sequences: the inverse of ``in_order``."""
    if not causal:
        return whole.unflatten(1, (size, -1)).movedim(1, 0).contiguous()
    parts = whole.unflatten(1, (2 * size, -1))
    return torch.stack([torch.cat([parts[:, rank], parts[:, 2 * size - 1 - rank]], 1) for rank in range(size)])


def _pieces(q: Tensor, kv: Tensor, place: int, causal: bool) -> list[tuple[slice, int, Tensor | None]]:
    """Rows of the rank's queries, how many keys they look back to, and their mask."""
    length, size = q.shape[1], kv.shape[1] // q.shape[1]
    if not causal:
        return [(slice(0, length), kv.shape[1], None)]
    half, found = length // 2, list[tuple[slice, int, Tensor | None]]()
    for first, count in ((0, (place + 1) * half), (half, (2 * size - place) * half)):
        mask = q.new_full((half, count), -torch.inf).triu_(count - half + 1)
        found.append((slice(first, first + half), count, mask))
    return found
