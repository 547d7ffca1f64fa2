"""Ops that memory bounds: norms, softmax, embedding and loss; element-wise ops; the optimizer; copies to the host.

Also ops of models that the harness does not have itself: convolutions, batch norms, embedding bags and recurrence.
"""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import HarnessError
from . import composite
from .input_pool import Call, Ids, Maker, Pool, Run, made, shares, taking

_aten = torch.ops.aten


def _layer_norm(pool: Pool, rows: int, hidden: int) -> Run:
    weight, bias = pool.take(hidden), pool.take(hidden)
    return lambda x: F.layer_norm(x, (hidden,), weight, bias, composite.EPSILON)


def _layer_norm_backward(pool: Pool, rows: int, hidden: int) -> Run:
    x, weight, bias = pool.take(rows, hidden), pool.take(hidden), pool.take(hidden)
    _, mean, inverse = torch.native_layer_norm(x, (hidden,), weight, bias, composite.EPSILON)
    backward = _aten.native_layer_norm_backward
    return lambda grad, x: backward(grad, x, (hidden,), mean, inverse, weight, bias, [True, True, True])


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    _, total, top, picked = composite.cross_entropy(logits, targets, 0)
    return (total.log() + top - picked).mean()


def _cross_entropy_backward(pool: Pool, rows: int, vocab: int) -> Run:
    weight = torch.ones((), device=pool.device, dtype=pool.dtype)
    scale = torch.ones(rows, device=pool.device, dtype=pool.dtype)
    return lambda exponent, targets: composite.cross_entropy_backward(exponent, scale, weight, targets, 0)


def _each(function: Run, operands: int = 1) -> Maker:
    """``function`` of so many vectors."""
    return taking(function, lambda numel: [(numel,)] * operands)


def _by_rows(function: Run, *columns: int) -> Maker:
    """``function`` of matrices with rows as wide as ``columns`` times a model's, if that divides their elements."""

    def shapes(numel: int) -> list[tuple[int, int]]:
        widths = (4096, 2048, 1024, 512, 256, 128, 64)
        width = next((each for each in widths if numel % each == 0 and numel >= 8 * each), numel)
        return [(numel // max(width, 1) if width < numel else 1, times * width) for times in columns]

    return taking(function, shapes)


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


def _dropout_backward(pool: Pool, numel: int) -> Run:
    mask = torch.ones(numel, device=pool.device, dtype=torch.bool)
    return lambda grad: _aten.native_dropout_backward(grad, mask, 1.1)


def _cast(x: Tensor) -> Tensor:
    """Cast to fp32, or from it."""
    return x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)


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


def _step(device: torch.device, dtype: torch.dtype, numel: int, tensors: int) -> Run:
    sizes = shares(numel, tensors)
    block = torch.empty(2, numel, device=device, dtype=dtype).uniform_(-0.5, 0.5)
    parameters = [torch.nn.Parameter(part) for part in block[0].split(sizes)]
    for parameter, gradient in zip(parameters, block[1].split(sizes), strict=True):
        parameter.grad = gradient
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True).step


def _to_host(pool: Pool, numel: int) -> Run:
    host = _host(pool, numel)
    return lambda x: host.copy_(x, non_blocking=True)


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


def _convolution(*dims: int) -> tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Arguments of a convolution that has such dims, and shapes of its image, its weight and its result.

    Windows, strides and padding are the simplest that do.
    """
    batch, ins, outs, positions, window, groups, inside, spatial = dims
    if min(dims) < 1 or spatial > 3 or outs % groups:
        raise HarnessError(f"a convolution needs dims >= 1, groups that divide its outputs, got {list(dims)}")
    turned = inside < positions
    small, large = _side(min(inside, positions), spatial), _side(max(inside, positions), spatial)
    stride = [max(round(wide / narrow), 1) for wide, narrow in zip(large, small, strict=True)]
    sides = _side(window, spatial)
    padding = [(side - 1) // 2 for side in sides]
    large = [
        (narrow - 1) * step + side - 2 * pad
        for narrow, step, side, pad in zip(small, stride, sides, padding, strict=True)
    ]
    image = (batch, groups * ins, *(small if turned else large))
    weight = (groups * ins, outs // groups, *sides) if turned else (outs, ins, *sides)
    how = stride, padding, [1] * spatial, turned, [0] * spatial, groups
    return how, image, weight, (batch, outs, *(large if turned else small))


def _conv(pool: Pool, *dims: int) -> Run:
    how = _convolution(*dims)[0]
    return lambda x, weight: _aten.convolution(x, weight, None, *how)


def _conv_backward(pool: Pool, *dims: int) -> Run:
    how, wanted = _convolution(*dims[:-1])[0], [bool(dims[-1]), True, False]
    return lambda grad, x, weight: _aten.convolution_backward(grad, x, weight, None, *how, wanted)


def _batch_norm(pool: Pool, positions: int, channels: int) -> Run:
    weight, bias = pool.take(channels), pool.take(channels)
    return lambda x: F.batch_norm(x, None, None, weight, bias, training=True)


def _batch_norm_backward(pool: Pool, positions: int, channels: int) -> Run:
    weight, bias = pool.take(channels), pool.take(channels)
    x = pool.take(1, channels, positions)
    _, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    backward = _aten.native_batch_norm_backward
    return lambda grad, x: backward(grad, x, weight, None, None, mean, inverse, True, 1e-5, [True, True, True])


def _offsets(indices: int, bags: int, device: torch.device) -> Tensor:
    return torch.arange(bags, device=device) * indices // max(bags, 1)


def _embedding_bag(pool: Pool, indices: int, hidden: int, bags: int, rows: int) -> Run:
    offsets = _offsets(indices, bags, pool.device)
    return lambda ids, table: F.embedding_bag(ids, table, offsets, mode="sum")


def _embedding_bag_backward(pool: Pool, indices: int, hidden: int, bags: int, rows: int) -> Run:
    offsets = _offsets(indices, bags, pool.device)
    ids = pool.ids(indices, rows)
    _, bag_of, size, most = torch.embedding_bag(pool.take(rows, hidden), ids, offsets)
    if not bag_of.numel():  # the CPU's forward does not make it for sums
        bag_of = torch.bucketize(torch.arange(indices, device=pool.device), offsets, right=True) - 1
    backward = _aten._embedding_bag_dense_backward
    return lambda grad: backward(grad, ids, bag_of, size, most, rows, False, 0, None)


def _recurrent(pool: Pool, steps: int, batch: int, into: int, hidden: int, gates: int) -> torch.nn.Module:
    kind = {4 * hidden: torch.nn.LSTM, 3 * hidden: torch.nn.GRU, hidden: torch.nn.RNN}.get(gates)
    if kind is None:
        raise HarnessError(f"gates must be 1, 3 or 4 times hidden, got {gates} and {hidden}")
    return kind(into, hidden).to(pool.device, pool.dtype)


def _recurrent_backward(pool: Pool, *dims: int) -> Call:
    layer = _recurrent(pool, *dims)
    wanted = [pool.take(*dims[:3]).clone().requires_grad_(), *layer.parameters()]
    with torch.enable_grad():
        y = layer(wanted[0])[0]
    return Call(lambda grad: torch.autograd.grad(y, wanted, grad, retain_graph=True), lambda: (pool.take(*y.shape),))


MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "embedding": taking(F.embedding, lambda tokens, hidden, vocab: [Ids(tokens, vocab), (vocab, hidden)]),
        "embedding_backward": made(
            lambda _, tokens, hidden, vocab: (
                lambda grad, ids: _aten.embedding_dense_backward(grad, ids, vocab, -1, False)
            ),
            lambda tokens, hidden, vocab: [(tokens, hidden), Ids(tokens, vocab)],
        ),
        "layer_norm": made(_layer_norm, lambda *shape: [shape]),
        "layer_norm_backward": made(_layer_norm_backward, lambda *shape: [shape, shape]),
        "rms_norm": taking(composite.rms_norm, lambda rows, hidden: [(rows, hidden), (hidden,)]),
        "rms_norm_backward": taking(
            composite.rms_norm_backward,
            lambda rows, hidden: [(rows, hidden), (rows, hidden), (hidden,), (rows, 1)],
        ),
        "softmax": taking(lambda x: torch.softmax(x, -1), lambda *shape: [shape]),
        "softmax_backward": taking(
            lambda grad, y: _aten._softmax_backward_data(grad, y, -1, y.dtype), lambda *shape: [shape, shape]
        ),
        "cross_entropy": taking(_cross_entropy, lambda rows, vocab: [(rows, vocab), Ids(rows, vocab)]),
        "cross_entropy_backward": made(_cross_entropy_backward, lambda rows, vocab: [(rows, vocab), Ids(rows, vocab)]),
        "gelu": _each(composite.gelu),
        "gelu_backward": _each(lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"), 2),
        "relu": _each(torch.relu),
        "relu_backward": _each(composite.relu_backward, 2),
        "swiglu": _by_rows(composite.swiglu, 2),
        "swiglu_backward": _by_rows(composite.swiglu_backward, 1, 2),
        "geglu": _by_rows(composite.geglu, 2),
        "geglu_backward": _by_rows(composite.geglu_backward, 1, 2),
        "rope": _rope,
        "rope_backward": _rope,
        "dropout": _each(lambda x: torch.native_dropout(x, 0.1, True)),
        "dropout_backward": made(_dropout_backward, lambda numel: [(numel,)]),
        "add": _each(torch.add, 2),
        "copy": _each(torch.clone),
        "fill": made(lambda pool, numel: lambda: torch.zeros(numel, device=pool.device, dtype=pool.dtype)),
        "reduce": _by_rows(lambda x: x.sum(0), 1),
        "elementwise": _each(lambda x: x * 0.5),
        "cast": _each(_cast),
        "adamw": made(lambda pool, numel, tensors: _step(pool.device, pool.dtype, numel, tensors)),
        "adamw_host": _adamw_host,
        "grad_norm": taking(
            lambda *grads: torch.nn.utils.get_total_norm(grads),
            lambda numel, tensors: [(max(1, numel // tensors),)] * tensors,
        ),
        "to_host": made(_to_host, lambda numel: [(numel,)]),
        "from_host": _from_host,
        "conv": made(_conv, lambda *dims: _convolution(*dims)[1:3]),
        "conv_backward": made(_conv_backward, lambda *dims: [_convolution(*dims[:-1])[at] for at in (3, 1, 2)]),
        "batch_norm": made(_batch_norm, lambda positions, channels: [(1, channels, positions)]),
        "batch_norm_backward": made(_batch_norm_backward, lambda positions, channels: [(1, channels, positions)] * 2),
        "embedding_bag": made(_embedding_bag, lambda indices, hidden, bags, rows: [Ids(indices, rows), (rows, hidden)]),
        "embedding_bag_backward": made(_embedding_bag_backward, lambda indices, hidden, bags, rows: [(bags, hidden)]),
        "recurrent": made(_recurrent, lambda *dims: [dims[:3]]),
        "recurrent_backward": _recurrent_backward,
    }
)
