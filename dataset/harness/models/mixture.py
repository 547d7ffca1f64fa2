"""Mixtures of experts: a router sends copies of each token to some of many MLPs, which are gated and without biases.

Every expert takes as many copies (``capacity_factor`` 1): of the tokens that chose it, those with the largest
probabilities, and others with a weight of zero where there are too few (as Megatron-Core with
``moe_pad_expert_input_to_capacity``).  So all messages and products have one size.  With expert parallelism each rank
holds some of the experts: copies travel to them and back in all-to-alls, which are sorted by sender or by expert.
The router's gradient has that of the balancing loss (Fedus et al. 2021, arXiv:2101.03961), which no loss includes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base import annotate
from ..ops import composite
from ..ops.input_pool import shares
from ..ops.op_makers import grouped, grouped_wgrad
from .torch_parts import Group, Shape, full_weight, linear, parameter

BALANCE = 0.01  # weight of the balancing loss


class Mixture(nn.Module):
    """A router and this rank's experts, for ``[rows, hidden]``."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        self.shape, own = shape, shape.experts // shape.ep_size
        first = own * (shape.ep_group.rank() if shape.ep_group is not None else 0)
        self.router = parameter(full_weight(shape, f"{name}.router", shape.experts, shape.hidden))
        sizes = {"up": (2 * shape.expert_ffn, shape.hidden), "down": (shape.hidden, shape.expert_ffn)}
        self.up, self.down = (
            nn.ParameterList(
                parameter(full_weight(shape, f"{name}.expert{number}.{word}", *sizes[word]))
                for number in range(first, first + own)
            )
            for word in sizes
        )

        for each in (*self.up, *self.down) if shape.ep_group is not None else ():
            each.unshared = True

    def forward(self, x: Tensor) -> Tensor:
        shape, group, size = self.shape, self.shape.ep_group, self.shape.ep_size
        scores, own = linear(shape, x, self.router, None), shape.experts // size
        weights, tokens = Choice.apply(scores, shape)
        y: Tensor = Permute.apply(x, tokens, len(x))
        if group is not None:
            y = Exchange.apply(y, group)
            y = Sort.apply(y, size, own) if own > 1 else y
        for matrices, after in ((self.up, composite.SwiGLU.apply), (self.down, None)):
            y = Grouped.apply(y, 1.0 / size, *(composite.cast(each, shape.dtype) for each in matrices))
            y = y if after is None else after(y)
        if group is not None:
            y = Sort.apply(y, own, size) if own > 1 else y
            y = Exchange.apply(y, group)
        found: Tensor = Unpermute.apply(y, weights, tokens, len(x))
        return found


class Choice(torch.autograd.Function):
    """From ``scores[tokens, experts]`` to each expert's tokens, ``[experts * capacity]``, and their weights."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        rows, experts = scores.shape
        most, main = rows * shape.experts_per_token // experts, shape.main_dtype
        with annotate.op("softmax", (rows, experts), main):
            probabilities = torch.softmax(scores, -1, dtype=main)
        with annotate.op("elementwise", (rows * experts,), main):
            chosen = probabilities.topk(shape.experts_per_token, -1)
            kept = torch.zeros_like(probabilities).scatter_(1, chosen.indices, chosen.values)
            weights, tokens = kept.topk(most, 0)
            weights, tokens = weights.t().flatten(), tokens.t().flatten()
        with annotate.op("reduce", (rows * experts,), main):
            load = (kept > 0).sum(0, dtype=main)
        ctx.save_for_backward(probabilities, tokens, load)
        ctx.dtype = scores.dtype
        ctx.balance = BALANCE * shape.loss_share * experts / (rows * rows * shape.experts_per_token)
        ctx.mark_non_differentiable(tokens)
        return weights, tokens

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        probabilities, tokens, load = ctx.saved_tensors
        rows, experts = probabilities.shape
        with annotate.op("elementwise", (rows * experts,), probabilities.dtype):
            grads = (load * ctx.balance).repeat(rows, 1)
            column = torch.arange(experts, device=grad.device).repeat_interleave(len(tokens) // experts)
            grads.view(-1).index_add_(0, tokens * experts + column, grad)
        with annotate.op("softmax_backward", (rows, experts), probabilities.dtype):
            return torch.ops.aten._softmax_backward_data(grads, probabilities, -1, grads.dtype).to(ctx.dtype), None


def _copies(x: Tensor, tokens: Tensor, _: int) -> Tensor:
    with _copy(len(tokens) * x.shape[1], x):
        return x.index_select(0, tokens)


def _sums(copies: Tensor, tokens: Tensor, rows: int) -> Tensor:
    with _copy(copies.numel(), copies):
        return copies.new_zeros(rows, copies.shape[1]).index_add_(0, tokens, copies)


def _sorted(y: Tensor, outer: int, inner: int) -> Tensor:
    """Equal blocks of rows, ``[outer, inner]`` of them, in the order ``[inner, outer]``."""
    with _copy(y.numel(), y):
        return y.unflatten(0, (outer, inner, -1)).transpose(0, 1).reshape(y.shape)


def _all_to_all(x: Tensor, group: Group) -> Tensor:
    output, x = torch.empty_like(x), x.contiguous()
    dist.all_to_all_single(output, x, group=group)
    return output


def _copy(numel: int, x: Tensor) -> Any:
    return annotate.op("copy", (numel,), x.dtype)


Permute = composite.conjugate("Permute", _copies, _sums)  # copies of tokens, in the order of their experts
Sort = composite.conjugate("Sort", _sorted, lambda grad, outer, inner: _sorted(grad, inner, outer))
Exchange = composite.conjugate("Exchange", _all_to_all, _all_to_all)


def _weighted_sums(y: Tensor, weights: Tensor, tokens: Tensor, rows: int) -> tuple[Tensor, Any, Any]:
    with _copy(y.numel(), y):
        sums = y.new_zeros(rows, y.shape[1]).index_add_(0, tokens, y * weights[:, None].to(y.dtype))
    return sums, (y, weights, tokens), ()


def _weighted_sums_backward(grad: Tensor, y: Tensor, weights: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    with _copy(y.numel(), y):
        grad = grad.index_select(0, tokens)
        grad_weights = (grad * y).sum(-1, dtype=weights.dtype)
        return grad.mul_(weights[:, None].to(grad.dtype)), grad_weights


Unpermute = composite.function("Unpermute", _weighted_sums, _weighted_sums_backward)  # of each token's copies


def _product_op(kind: str, x: Tensor, weights: Sequence[Tensor]) -> Any:
    groups, (n, k) = len(weights), weights[0].shape
    dims, kind = ((groups, len(x), n, k), kind) if groups > 1 else ((len(x), n, k), kind.removeprefix("grouped_"))
    return annotate.op(kind, dims, x.dtype)


def _products(x: Tensor, scale: float, *weights: Tensor) -> tuple[Tensor, Any, Any]:
    with _product_op("grouped_linear", x, weights):
        y = grouped(x, [w.t() for w in weights], shares(len(x), len(weights)))
    return y, (x, *weights), (scale,)


def _products_backward(grad: Tensor, x: Tensor, *kept: Any) -> tuple[Any, ...]:
    *weights, scale = kept
    grad, sizes = grad.contiguous(), shares(len(x), len(weights))
    with _product_op("grouped_linear_wgrad", x, weights):
        grads = grouped_wgrad(grad, x, sizes, scale)
    with _product_op("grouped_linear_dgrad", x, weights):
        return grouped(grad, weights, sizes), None, *grads


# ``x @ w.T`` of equal groups of rows with a matrix each, whose gradients are multiplied by ``scale``: an expert gets
# the gradients of all ranks' tokens, whose losses the ranks average.
Grouped = composite.function("Grouped", _products, _products_backward)
