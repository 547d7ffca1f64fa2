"""Ops that memory bounds: norms, softmax, embedding and loss; element-wise ops; the optimizer; copies to the host.

Also ops of models that the harness does not have itself: convolutions, batch norms, embedding bags and recurrence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.plan_error import HarnessError
from . import composite
from .input_pool import Call, Maker, Pool, shares, taking


def _embedding(pool: Pool, tokens: int, hidden: int, vocab: int) -> Call:
    return Call(F.embedding, lambda: (pool.ids(tokens, vocab), pool.take(vocab, hidden)))


def _embedding_backward(pool: Pool, tokens: int, hidden: int, vocab: int) -> Call:
    def run(grad: Tensor, ids: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten.embedding_dense_backward(grad, ids, vocab, -1, False)
        return y

    return Call(run, lambda: (pool.take(tokens, hidden), pool.ids(tokens, vocab)))


def _layer_norm(pool: Pool, rows: int, hidden: int) -> Call:
    weight, bias = pool.take(hidden), pool.take(hidden)
    return Call(
        lambda x: F.layer_norm(x, (hidden,), weight, bias, composite.EPSILON), lambda: (pool.take(rows, hidden),)
    )


def _layer_norm_backward(pool: Pool, rows: int, hidden: int) -> Call:
    x, weight, bias = pool.take(rows, hidden), pool.take(hidden), pool.take(hidden)
    _, mean, inverse = torch.native_layer_norm(x, (hidden,), weight, bias, composite.EPSILON)
    backward = torch.ops.aten.native_layer_norm_backward
    return Call(
        lambda grad, x: backward(grad, x, (hidden,), mean, inverse, weight, bias, [True, True, True]),
        lambda: (pool.take(rows, hidden), pool.take(rows, hidden)),
    )


def _cross_entropy(pool: Pool, rows: int, vocab: int) -> Call:
    def run(logits: Tensor, targets: Tensor) -> Tensor:
        _, total, top, picked = composite.cross_entropy(logits, targets, 0)
        return (total.log() + top - picked).mean()

    return Call(run, lambda: (pool.take(rows, vocab), pool.ids(rows, vocab)))


def _cross_entropy_backward(pool: Pool, rows: int, vocab: int) -> Call:
    weight = torch.ones((), device=pool.device, dtype=pool.dtype)
    scale = torch.ones(rows, device=pool.device, dtype=pool.dtype)
    return Call(
        lambda exponent, targets: composite.cross_entropy_backward(exponent, scale, weight, targets, 0),
        lambda: (pool.take(rows, vocab), pool.ids(rows, vocab)),
    )


def _each(function: Callable[..., object], operands: int = 1) -> Maker:
    """``function`` of so many vectors."""
    return taking(function, lambda numel: [(numel,)] * operands)


def _by_rows(function: Callable[..., object], *columns: int) -> Maker:
    """``function`` of matrices with rows as wide as ``columns`` times a model's."""

    def shapes(numel: int) -> list[tuple[int, int]]:
        rows, width = _matrix(numel)
        return [(rows, times * width) for times in columns]

    return taking(function, shapes)


def _softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten._softmax_backward_data(grad, y, -1, y.dtype)
    return found


def _matrix(numel: int) -> tuple[int, int]:
    """A matrix with a number of elements, and rows as wide as a model's if that divides it."""
    for width in (4096, 2048, 1024, 512, 256, 128, 64):
        if numel % width == 0 and numel >= 8 * width:
            return numel // width, width
    return 1, numel


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    y: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    return y


def _rope(pool: Pool, numel: int) -> Call:
    """Within a fused qkv of half as many values again, in heads as wide as a model's."""
    width = next((width for width in (64, 32, 16, 8, 4, 2) if numel % width == 0), 0)
    if not width:
        raise HarnessError(f"rope rotates pairs: numel must be even, got {numel}")
    heads = next(heads for heads in (8, 4, 2, 1) if numel // width % heads == 0)
    seq_len = numel // width // heads
    cos, sin = composite.rope_tables(seq_len, width, pool.device, pool.dtype)
    return Call(
        lambda fused: composite.rope_(fused[:, :, :heads], cos, sin),
        lambda: (pool.take(1, seq_len, heads + -(-heads // 2), width),),
    )


def _dropout_backward(pool: Pool, numel: int) -> Call:
    mask = torch.ones(numel, device=pool.device, dtype=torch.bool)
    return Call(lambda grad: torch.ops.aten.native_dropout_backward(grad, mask, 1.1), lambda: (pool.take(numel),))


def _cast(x: Tensor) -> Tensor:
    """Cast to fp32, or from it."""
    return x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)


def _adamw(pool: Pool, numel: int, tensors: int) -> Call:
    return Call(_step(pool.device, pool.dtype, numel, tensors))


def _adamw_host(pool: Pool, numel: int, tensors: int) -> Call:
    """AdamW on the host: with this rank's share of the cores beside a GPU, otherwise with the rank's own cores."""
    step = _step(torch.device("cpu"), pool.dtype, numel, tensors)
    if pool.device.type == "cpu":
        return Call(step, on_host=True)
    threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        step()
        torch.set_num_threads(before)

    return Call(run, on_host=True)


def _step(device: torch.device, dtype: torch.dtype, numel: int, tensors: int) -> Callable[[], object]:
    sizes = shares(numel, tensors)
    block = torch.empty(2, numel, device=device, dtype=dtype).uniform_(-0.5, 0.5)
    parameters = [torch.nn.Parameter(part) for part in block[0].split(sizes)]
    for parameter, gradient in zip(parameters, block[1].split(sizes), strict=True):
        parameter.grad = gradient
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True).step


def _grad_norm(pool: Pool, numel: int, tensors: int) -> Call:
    each = max(1, numel // tensors)
    return Call(
        lambda *grads: torch.nn.utils.get_total_norm(grads), lambda: tuple(pool.take(each) for _ in range(tensors))
    )


def _to_host(pool: Pool, numel: int) -> Call:
    host = _host(pool, numel)
    return Call(lambda x: host.copy_(x, non_blocking=True), lambda: (pool.take(numel),))


def _from_host(pool: Pool, numel: int) -> Call:
    here = torch.empty(numel, device=pool.device, dtype=pool.dtype)
    if pool.device.type == "cpu":
        return Call(here.copy_, lambda: (pool.take(numel),))
    host = _host(pool, numel)
    host.copy_(pool.take(numel))
    return Call(lambda: here.copy_(host, non_blocking=True))


def _host(pool: Pool, numel: int) -> Tensor:
    return torch.empty(numel, dtype=pool.dtype, pin_memory=pool.device.type == "cuda")


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
        "embedding": _embedding,
        "embedding_backward": _embedding_backward,
        "layer_norm": _layer_norm,
        "layer_norm_backward": _layer_norm_backward,
        "rms_norm": taking(composite.rms_norm, lambda rows, hidden: [(rows, hidden), (hidden,)]),
        "rms_norm_backward": taking(
            composite.rms_norm_backward,
            lambda rows, hidden: [(rows, hidden), (rows, hidden), (hidden,), (rows, 1)],
        ),
        "softmax": taking(lambda x: torch.softmax(x, -1), lambda *shape: [shape]),
        "softmax_backward": taking(_softmax_backward, lambda *shape: [shape, shape]),
        "cross_entropy": _cross_entropy,
        "cross_entropy_backward": _cross_entropy_backward,
        "gelu": _each(composite.gelu),
        "gelu_backward": _each(_gelu_backward, 2),
        "relu": _each(torch.relu),
        "relu_backward": _each(composite.relu_backward, 2),
        "swiglu": _by_rows(composite.swiglu, 2),
        "swiglu_backward": _by_rows(composite.swiglu_backward, 1, 2),
        "geglu": _by_rows(composite.geglu, 2),
        "geglu_backward": _by_rows(composite.geglu_backward, 1, 2),
        "rope": _rope,
        "rope_backward": _rope,
        "dropout": _each(lambda x: torch.native_dropout(x, 0.1, True)),
        "dropout_backward": _dropout_backward,
        "add": _each(torch.add, 2),
        "copy": _each(torch.clone),
        "fill": lambda pool, numel: Call(lambda: torch.zeros(numel, device=pool.device, dtype=pool.dtype)),
        "reduce": _by_rows(lambda x: x.sum(0), 1),
        "elementwise": _each(lambda x: x * 0.5),
        "cast": _each(_cast),
        "adamw": _adamw,
        "adamw_host": _adamw_host,
        "grad_norm": _grad_norm,
        "to_host": _to_host,
        "from_host": _from_host,
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
