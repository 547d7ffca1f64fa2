"""Convolutions, batch norms, embedding bags and recurrence: ops of models that the harness does not have itself."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.plan_error import HarnessError
from .input_pool import Call, Maker, Pool


def _side(positions: int, spatial: int) -> list[int]:
    """Split a number of positions into sizes that are as equal as divisors allow."""
    sizes, left = [], positions
    for dims in range(spatial, 1, -1):
        side = max(round(left ** (1 / dims)), 1)
        while left % side:
            side -= 1
        sizes.append(side)
        left //= side
    return [*sizes, left]


class _Convolution:
    """A convolution that has such dims: windows, strides and padding are the simplest that do."""

    def __init__(self, pool: Pool, *dims: int) -> None:
        batch, ins, outs, positions, window, groups, inside, spatial = dims
        if min(dims) < 1 or spatial > 3 or outs % groups:
            raise HarnessError(f"a convolution needs dims >= 1, groups that divide its outputs, got {list(dims)}")
        self.pool, self.turned = pool, inside < positions
        small, large = _side(min(inside, positions), spatial), _side(max(inside, positions), spatial)
        self.stride = [max(round(wide / narrow), 1) for wide, narrow in zip(large, small, strict=True)]
        sides = _side(window, spatial)
        self.padding = [(side - 1) // 2 for side in sides]
        large = [
            (narrow - 1) * step + side - 2 * pad
            for narrow, step, side, pad in zip(small, self.stride, sides, self.padding, strict=True)
        ]
        self.groups = groups
        self.image = (batch, groups * ins, *(small if self.turned else large))
        self.weight = (groups * ins, outs // groups, *sides) if self.turned else (outs, ins, *sides)
        self.made = (batch, outs, *(large if self.turned else small))

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        zeros, ones = [0] * len(self.stride), [1] * len(self.stride)
        y: Tensor = torch.ops.aten.convolution(
            x, weight, None, self.stride, self.padding, ones, self.turned, zeros, self.groups
        )
        return y

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, *, input_gradient: bool) -> Any:
        zeros, ones = [0] * len(self.stride), [1] * len(self.stride)
        return torch.ops.aten.convolution_backward(
            grad, x, weight, None, self.stride, self.padding, ones, self.turned, zeros, self.groups,
            [input_gradient, True, False],
        )  # fmt: skip


def _conv(pool: Pool, *dims: int) -> Call:
    made = _Convolution(pool, *dims)
    return Call(made.run, lambda: (pool.take(*made.image), pool.take(*made.weight)))


def _conv_backward(pool: Pool, *dims: int) -> Call:
    made = _Convolution(pool, *dims[:-1])
    return Call(
        lambda grad, x, weight: made.backward(grad, x, weight, input_gradient=bool(dims[-1])),
        lambda: (pool.take(*made.made), pool.take(*made.image), pool.take(*made.weight)),
    )


def _batch_norm(pool: Pool, positions: int, channels: int) -> Call:
    weight, bias = pool.take(channels), pool.take(channels)
    return Call(
        lambda x: F.batch_norm(x, None, None, weight, bias, training=True),
        lambda: (pool.take(1, channels, positions),),
    )


def _batch_norm_backward(pool: Pool, positions: int, channels: int) -> Call:
    weight, bias = pool.take(channels), pool.take(channels)
    x = pool.take(1, channels, positions)
    _, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    backward = torch.ops.aten.native_batch_norm_backward
    return Call(
        lambda grad, x: backward(grad, x, weight, None, None, mean, inverse, True, 1e-5, [True, True, True]),
        lambda: (pool.take(1, channels, positions), pool.take(1, channels, positions)),
    )


def _offsets(indices: int, bags: int, device: torch.device) -> Tensor:
    return torch.arange(bags, device=device) * indices // max(bags, 1)


def _embedding_bag(pool: Pool, indices: int, hidden: int, bags: int, rows: int) -> Call:
    offsets = _offsets(indices, bags, pool.device)
    return Call(
        lambda ids, table: F.embedding_bag(ids, table, offsets, mode="sum"),
        lambda: (pool.ids(indices, rows), pool.take(rows, hidden)),
    )


def _embedding_bag_backward(pool: Pool, indices: int, hidden: int, bags: int, rows: int) -> Call:
    offsets = _offsets(indices, bags, pool.device)
    ids = pool.ids(indices, rows)
    _, bag_of, size, most = torch.embedding_bag(pool.take(rows, hidden), ids, offsets)
    backward = torch.ops.aten._embedding_bag_dense_backward
    if not bag_of.numel():  # the CPU's forward does not make it for sums
        bag_of = torch.bucketize(torch.arange(indices, device=pool.device), offsets, right=True) - 1
    return Call(
        lambda grad: backward(grad, ids, bag_of, size, most, rows, False, 0, None), lambda: (pool.take(bags, hidden),)
    )


def _layer(pool: Pool, steps: int, batch: int, into: int, hidden: int, gates: int) -> tuple[torch.nn.Module, Tensor]:
    kind = {4 * hidden: torch.nn.LSTM, 3 * hidden: torch.nn.GRU, hidden: torch.nn.RNN}.get(gates)
    if kind is None:
        raise HarnessError(f"gates must be 1, 3 or 4 times hidden, got {gates} and {hidden}")
    return kind(into, hidden).to(pool.device, pool.dtype), pool.take(steps, batch, into)


def _recurrent(pool: Pool, *dims: int) -> Call:
    layer, _ = _layer(pool, *dims)
    return Call(layer, lambda: (pool.take(*dims[:3]),))


def _recurrent_backward(pool: Pool, *dims: int) -> Call:
    layer, x = _layer(pool, *dims)
    wanted = [x.clone().requires_grad_(), *layer.parameters()]
    with torch.enable_grad():
        y = layer(wanted[0])[0]
    return Call(lambda grad: torch.autograd.grad(y, wanted, grad, retain_graph=True), lambda: (pool.take(*y.shape),))


MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "conv": _conv,
        "conv_backward": _conv_backward,
        "batch_norm": _batch_norm,
        "batch_norm_backward": _batch_norm_backward,
        "embedding_bag": _embedding_bag,
        "embedding_bag_backward": _embedding_bag_backward,
        "recurrent": _recurrent,
        "recurrent_backward": _recurrent_backward,
    }
)
