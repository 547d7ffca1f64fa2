"""Expert and context parallelism for the harness' own Llama, for captured scripts.

Steps are annotated with the op kinds of lowered jobs, as the harness annotates its own models.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepsight.dataset.harness import annotate
from stepsight.dataset.harness.models import torch_dense
from stepsight.dataset.harness.models.torch_parts import Norm, Shape
from stepsight.dataset.harness.ops import composite

_aten = torch.ops.aten


class Copies(torch.autograd.Function):
    """Rows in the order of their experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.dims = len(order), *rows.shape
        with annotate.op("permute", ctx.dims, rows.dtype):
            return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        _, tokens, hidden = ctx.dims
        with annotate.op("unpermute", ctx.dims, gradient.dtype):
            return gradient.new_zeros(tokens, hidden).index_add_(0, order, gradient), None


class Mixed(torch.autograd.Function):
    """Copies weighted and summed by token."""

    @staticmethod
    def forward(ctx: Any, copies: Tensor, weights: Tensor, order: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(copies, weights, order)
        ctx.dims = len(order), tokens, copies.shape[1]
        with annotate.op("unpermute", ctx.dims, copies.dtype):
            return copies.new_zeros(tokens, copies.shape[1]).index_add_(0, order, copies * weights[:, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        copies, weights, order = ctx.saved_tensors
        with annotate.op("unpermute_backward", ctx.dims, gradient.dtype):
            each = gradient.index_select(0, order)
            return each * weights[:, None], (each * copies).sum(-1), None, None


class Exchange(torch.autograd.Function):
    """Send rows to other ranks of a group; gradients are sent back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes = sent, received, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.sizes
        out = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(out, gradient, received, sent, group=group)
        return out, None, None, None


class Chosen(torch.autograd.Function):
    """Router in one function: probabilities, choice, and the load of each expert."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
        with annotate.op("softmax", scores.shape, scores.dtype):
            shares = scores.softmax(-1)
        with annotate.op("reduce", (scores.numel(),), scores.dtype):
            weights, chosen = shares.topk(top, -1)
        with annotate.op("elementwise", (scores.numel(),), scores.dtype):
            load = shares * 1.0
        ctx.save_for_backward(load, chosen)
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        shares, chosen = ctx.saved_tensors
        with annotate.op("elementwise", (shares.numel(),), shares.dtype):
            full = torch.zeros_like(shares).scatter(1, chosen, gradient)
        with annotate.op("softmax_backward", shares.shape, shares.dtype):
            return torch._softmax_backward_data(full, shares, -1, shares.dtype), None


class Experts(nn.Module):
    """The gated MLPs of this rank."""

    def __init__(self, shape: Shape, count: int, ffn: int) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": shape.device, "dtype": shape.dtype}
        self.gate_up = nn.Parameter(torch.empty(count, 2 * ffn, shape.hidden, **made).normal_(0.0, 0.02))
        self.down = nn.Parameter(torch.empty(count, shape.hidden, ffn, **made).normal_(0.0, 0.02))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        both = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        return torch._grouped_mm(composite.SwiGLU.apply(both), self.down.transpose(1, 2), offs=ends)


class ExpertLayer(torch_dense.Layer):
    """A layer with a mixture instead of the MLP.

    Args:
        shape: The rank.
        name: Of the layer.
        model: The ``[model]`` table of the job.
        group: Of the ranks that hold all experts once.
    """

    def __init__(self, shape: Shape, name: str, model: dict[str, Any], group: Any) -> None:
        super().__init__(shape, name)
        del self.up, self.down
        self.top, self.num_experts, self.group = model["experts_per_token"], model["experts"], group
        self.mlp_norm = Norm(shape)
        made: dict[str, Any] = {"device": shape.device, "dtype": shape.dtype}
        self.router = nn.Linear(shape.hidden, self.num_experts, bias=False, **made)
        self.experts = Experts(shape, self.num_experts // group.size(), model["expert_ffn"])

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.out(self._attend(self.qkv(self.attention_norm(x)), rope))
        rows, size = self.mlp_norm(x), self.group.size()
        weights, chosen = Chosen.apply(self.router(rows), self.top)
        with torch.no_grad():
            order = torch.arange(chosen.numel(), device=x.device)  # as many copies as all experts have tokens
            counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
            sent, ends = counts.view(size, -1).sum(1).tolist(), (counts[: self.num_experts // size] * size).cumsum(0)
        copies = Copies.apply(rows, order // self.top)
        copies = self._sorted(Exchange.apply(copies, sent, sent, self.group))
        found = self._sorted(self.experts(copies, ends.to(torch.int32)))
        found = Exchange.apply(found, sent, sent, self.group)
        mixed: Tensor = Mixed.apply(found, weights.flatten(), order // self.top, len(rows))
        return x + mixed

    def _sorted(self, rows: Tensor) -> Tensor:
        """Sort from by sender to by expert, or back; a rank with one expert needs no sorting."""
        local = self.num_experts // self.group.size()
        if local == 1:
            return rows
        return rows.view(self.group.size(), local, -1).transpose(0, 1).reshape(rows.shape)


class RingAttention(torch.autograd.Function):
    """Causal attention of ranks with equal parts of a sequence: keys and values circulate in a ring."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        size, parts = group.size(), []
        here, y = torch.stack((k, v)), q
        for step in range(size):
            arriving, works = pass_on(here, group) if step < size - 1 else (here, [])
            keys, values, causal = (*here, True) if step == 0 else (*half(here), False)
            found = _aten._scaled_dot_product_flash_attention(q, keys, values, 0.0, causal)
            if step == 0:
                y = found[0]
            else:
                with annotate.op("add", (q.numel(),), q.dtype):
                    y = y + found[0]
                with annotate.op("elementwise", (found[1].numel(),), q.dtype):
                    found[1].add_(1.0)
            parts.append(found)
            for work in works:
                work.wait()
            here = arriving
        ctx.save_for_backward(q, k, v, y, *parts[0][:2])
        ctx.group, ctx.parts = group, parts
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, *_ = ctx.saved_tensors
        group, size = ctx.group, ctx.group.size()
        here, dkv = torch.stack((k, v)), torch.empty_like(torch.stack((k, v)))
        for step in range(size):
            first, last = step == 0, step == size - 1
            full = torch.cat((here, dkv)) if not (first or last) else here if first else dkv
            _, works = pass_on(full, group)
            keys, values, causal = (*here, True) if last else (*half(here), False)
            lse, *more = ctx.parts[step][1:8]
            dq, _, _ = _aten._scaled_dot_product_flash_attention_backward(
                gradient, q, keys, values, y, lse, *more[:4], 0.0, causal, *more[4:6]
            )
            for work in works:
                work.wait()
            if not first:
                with annotate.op("add", (2 * k.numel(),), k.dtype):
                    dkv = dkv + 1.0
        return dq, *dkv, None


def half(keys_and_values: Tensor) -> tuple[Tensor, Tensor]:
    """The keys of another rank that a balanced causal mask leaves."""
    k, v = keys_and_values
    return k[:, :, : k.shape[2] // 2], v[:, :, : v.shape[2] // 2]


def pass_on(tensor: Tensor, group: Any) -> tuple[Tensor, list[Any]]:
    """Send a tensor to the next rank of a ring and receive that of the one before."""
    arriving, size, rank = torch.empty_like(tensor), group.size(), group.rank()
    ranks = dist.get_process_group_ranks(group)
    calls = [
        dist.P2POp(dist.isend, tensor, ranks[(rank + 1) % size], group),
        dist.P2POp(dist.irecv, arriving, ranks[(rank - 1) % size], group),
    ]
    return arriving, dist.batch_isend_irecv(calls)


class GatheredAttention(torch.autograd.Function):
    """Causal attention to the keys and values of all ranks, which are gathered first."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        keys, values = gathered(k, v, group)
        found = _aten._scaled_dot_product_flash_attention(q, keys, values, 0.0, True)
        ctx.save_for_backward(q, k, v)
        ctx.group, ctx.found = group, found
        y: Tensor = found[0]
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        keys, values = gathered(k, v, ctx.group)
        y, lse, *more = ctx.found[:8]
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            gradient, q, keys, values, y, lse, *more[:4], 0.0, True, *more[4:6]
        )
        own = torch.empty_like(torch.stack((k, v)))
        dist.reduce_scatter_tensor(own.flatten(), torch.stack((dk, dv)).flatten(), group=ctx.group)
        return dq, *own, None


def gathered(k: Tensor, v: Tensor, group: Any) -> Tensor:
    """Keys and values of all ranks, ``[2, batch, heads, length of all, dim]``."""
    own = torch.stack((k, v))
    everything = own.new_empty(group.size() * own.numel())
    dist.all_gather_into_tensor(everything, own.flatten(), group=group)
    return everything.view(2, *k.shape[:2], -1, k.shape[-1])


class ContextLayer(torch_dense.Layer):
    """A layer whose ranks have parts of each sequence.

    Args:
        shape: The rank.
        name: Of the layer.
        how: ``ring`` or ``all_gather``.
        group: Of the ranks that share sequences.
    """

    def __init__(self, shape: Shape, name: str, how: str, group: Any) -> None:
        super().__init__(shape, name)
        self.attention: Any = RingAttention if how == "ring" else GatheredAttention
        self.group = group

    def _attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        shape = self.shape
        assert rope is not None
        qkv = composite.Rope.apply(qkv, *rope, shape.heads + shape.kv_heads)
        parts = qkv.view(-1, shape.seq_len, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        q, k, v = (part.transpose(1, 2) for part in parts.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=2))
        y: Tensor = self.attention.apply(q, k, v, self.group)
        return y.transpose(1, 2).reshape(-1, shape.heads * shape.head_dim)
