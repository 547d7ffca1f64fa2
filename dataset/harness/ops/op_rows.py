"""Ops that memory bounds: norms, softmax, embedding and loss; element-wise ops; the optimizer; copies to the host.

Also ops of models that the harness does not have itself: convolutions, batch norms, embedding bags and recurrence.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import HarnessError
from . import composite
from .input_pool import Call, Maker, Pool, Run, shares
from .op_products import gradients

_aten = torch.ops.aten
Made = tuple[object, ...]  # see ``Maker``


def _layer_norm(pool: Pool, rows: int, hidden: int) -> Made:
    weight, bias = pool.take(hidden), pool.take(hidden)
    return (lambda x: F.layer_norm(x, (hidden,), weight, bias, composite.EPSILON)), (rows, hidden)


def _layer_norm_backward(pool: Pool, rows: int, hidden: int) -> Made:
    x, weight, bias = pool.take(rows, hidden), pool.take(hidden), pool.take(hidden)
    _, mean, inverse = torch.native_layer_norm(x, (hidden,), weight, bias, composite.EPSILON)
    run = _aten.native_layer_norm_backward
    return (lambda grad, x: run(grad, x, (hidden,), mean, inverse, weight, bias, [True] * 3)), x.shape, x.shape


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    _, total, top, picked = composite.cross_entropy(logits, targets, 0)
    return (total.log() + top - picked).mean()


def _cross_entropy_backward(pool: Pool, rows: int, vocab: int) -> Made:
    scale = torch.ones(rows, device=pool.device, dtype=pool.dtype)
    run = composite.cross_entropy_backward
    return (lambda exp, targets: run(exp, scale, scale[0], targets, 0)), (rows, vocab), partial(pool.ids, rows, vocab)


def _each(function: Run, operands: int = 1) -> Maker:
    """``function`` of so many vectors."""
    return lambda pool, numel: (function, *[(numel,)] * operands)


def _by_rows(function: Run, *columns: int) -> Maker:
    """``function`` of matrices with rows as wide as ``columns`` times a model's, if that divides their elements."""

    def make(pool: Pool, numel: int) -> Made:
        widths = (4096, 2048, 1024, 512, 256, 128, 64)
        width = next((each for each in widths if numel % each == 0 and numel >= 8 * each), numel)
        return function, *((numel // max(width, 1) if width < numel else 1, times * width) for times in columns)

    return make


def _rope(pool: Pool, numel: int) -> Made:
    """Within a fused qkv of half as many values again, in heads as wide as a model's."""
    width = next((width for width in (64, 32, 16, 8, 4, 2) if numel % width == 0), 0)
    if not width:
        raise HarnessError(f"rope rotates pairs: numel must be even, got {numel}")
    heads = next(heads for heads in (8, 4, 2, 1) if numel // width % heads == 0)
    seq_len = numel // width // heads
    tables = composite.rope_tables(seq_len, width, pool.device, pool.dtype)
    return (lambda qkv: composite.rope_(qkv[:, :, :heads], *tables)), (1, seq_len, heads + -(-heads // 2), width)


def _dropout_backward(pool: Pool, numel: int) -> Made:
    mask = torch.ones(numel, device=pool.device, dtype=torch.bool)
    return (lambda grad: _aten.native_dropout_backward(grad, mask, 1.1)), (numel,)


def _cast(x: Tensor) -> Tensor:
    """Cast to fp32, or from it."""
    return x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)


def _adamw_host(pool: Pool, numel: int, tensors: int) -> Call:
    """AdamW on the host: with this rank's share of the cores beside a GPU, otherwise with the rank's own cores."""
    step = _adamw(torch.device("cpu"), pool.dtype, numel, tensors)
    if pool.device.type == "cpu":
        return Call(step, on_host=True)
    threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        step()
        torch.set_num_threads(before)

    return Call(run, on_host=True)


def _adamw(device: torch.device, dtype: torch.dtype, numel: int, tensors: int) -> Run:
    sizes = shares(numel, tensors)
    block = torch.empty(2, numel, device=device, dtype=dtype).uniform_(-0.5, 0.5)
    parameters = [torch.nn.Parameter(part) for part in block[0].split(sizes)]
    for parameter, gradient in zip(parameters, block[1].split(sizes), strict=True):
        parameter.grad = gradient
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True).step


def _host_copy(pool: Pool, numel: int, *, back: bool = False) -> Made:
    """A copy from the device to the host, or ``back``; on a CPU within its memory."""
    on_gpu = pool.device.type == "cuda"
    host = torch.empty(numel, dtype=pool.dtype, pin_memory=on_gpu)
    if not (on_gpu and back):
        return (lambda x: host.copy_(x, non_blocking=True)), (numel,)
    here = host.copy_(pool.take(numel)).to(pool.device)
    return (lambda: here.copy_(host, non_blocking=True),)


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


def _convolution(dims: tuple[int, ...]) -> tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
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
    large = [(n - 1) * step + side - 2 * pad for n, step, side, pad in zip(small, stride, sides, padding, strict=True)]
    image = (batch, groups * ins, *(small if turned else large))
    weight = (groups * ins, outs // groups, *sides) if turned else (outs, ins, *sides)
    how = stride, padding, [1] * spatial, turned, [0] * spatial, groups
    return how, image, weight, (batch, outs, *(large if turned else small))


def _conv(pool: Pool, *dims: int) -> Made:
    how, image, weight, _ = _convolution(dims)
    return (lambda x, weight: _aten.convolution(x, weight, None, *how)), image, weight


def _conv_backward(pool: Pool, *dims: int) -> Made:
    (how, image, weight, y), wanted = _convolution(dims[:-1]), [bool(dims[-1]), True, False]
    return (lambda grad, x, w: _aten.convolution_backward(grad, x, w, None, *how, wanted)), y, image, weight


def _batch_norm(pool: Pool, positions: int, channels: int) -> Made:
    weight, bias = pool.take(channels), pool.take(channels)
    return (lambda x: F.batch_norm(x, None, None, weight, bias, training=True)), (1, channels, positions)


def _batch_norm_backward(pool: Pool, positions: int, channels: int) -> Made:
    x, weight, bias = pool.take(1, channels, positions), pool.take(channels), pool.take(channels)
    _, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    how = weight, None, None, mean, inverse, True, 1e-5, [True] * 3
    return (lambda grad, x: _aten.native_batch_norm_backward(grad, x, *how)), x.shape, x.shape


def _embedding_bag(pool: Pool, indices: int, hidden: int, bags: int, rows: int) -> Made:
    offsets = torch.arange(bags, device=pool.device) * indices // max(bags, 1)
    run = partial(F.embedding_bag, offsets=offsets, mode="sum")
    return run, partial(pool.ids, indices, rows), (rows, hidden)


def _embedding_bag_backward(pool: Pool, indices: int, hidden: int, bags: int, rows: int) -> Made:
    offsets = torch.arange(bags, device=pool.device) * indices // max(bags, 1)
    ids = pool.ids(indices, rows)
    _, bag_of, size, most = torch.embedding_bag(pool.take(rows, hidden), ids, offsets)
    if not bag_of.numel():  # the CPU's forward does not make it for sums
        bag_of = torch.bucketize(torch.arange(indices, device=pool.device), offsets, right=True) - 1
    how = ids, bag_of, size, most, rows, False, 0, None
    return (lambda grad: _aten._embedding_bag_dense_backward(grad, *how)), (bags, hidden)


def _recurrent(pool: Pool, *dims: int, backward: bool = False) -> Made:
    steps, batch, into, hidden, gates = dims
    kind = {4 * hidden: torch.nn.LSTM, 3 * hidden: torch.nn.GRU, hidden: torch.nn.RNN}.get(gates)
    if kind is None:
        raise HarnessError(f"gates must be 1, 3 or 4 times hidden, got {gates} and {hidden}")
    layer = kind(into, hidden).to(pool.device, pool.dtype)
    if not backward:
        return layer, (steps, batch, into)
    x = pool.take(steps, batch, into).clone().requires_grad_()
    return gradients(lambda x, *_: layer(x)[0], [x, *layer.parameters()])


MAKERS: dict[str, Maker] = {
    "embedding": lambda pool, tokens, hidden, vocab: (F.embedding, partial(pool.ids, tokens, vocab), (vocab, hidden)),
    "embedding_backward": lambda pool, tokens, hidden, vocab: (
        (lambda grad, ids: _aten.embedding_dense_backward(grad, ids, vocab, -1, False)),
        (tokens, hidden),
        partial(pool.ids, tokens, vocab),
    ),
    "layer_norm": _layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm": lambda _, rows, hidden: (composite.rms_norm, (rows, hidden), (hidden,)),
    "rms_norm_backward": lambda _, rows, hidden: (
        composite.rms_norm_backward,
        (rows, hidden),
        (rows, hidden),
        (hidden,),
        (rows, 1),
    ),
    "softmax": lambda _, *shape: (partial(torch.softmax, dim=-1), shape),
    "softmax_backward": lambda _, *shape: (
        (lambda grad, y: _aten._softmax_backward_data(grad, y, -1, y.dtype)),
        shape,
        shape,
    ),
    "cross_entropy": lambda pool, rows, vocab: (_cross_entropy, (rows, vocab), partial(pool.ids, rows, vocab)),
    "cross_entropy_backward": _cross_entropy_backward,
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
    "dropout_backward": _dropout_backward,
    "add": _each(torch.add, 2),
    "copy": _each(torch.clone),
    "fill": lambda pool, numel: (partial(torch.zeros, numel, device=pool.device, dtype=pool.dtype),),
    "reduce": _by_rows(lambda x: x.sum(0), 1),
    "elementwise": _each(lambda x: x * 0.5),
    "cast": _each(_cast),
    "adamw": lambda pool, numel, tensors: (_adamw(pool.device, pool.dtype, numel, tensors),),
    "adamw_host": _adamw_host,
    "grad_norm": lambda _, numel, tensors: (
        (lambda *grads: torch.nn.utils.get_total_norm(grads)),
        *[(max(1, numel // tensors),)] * tensors,
    ),
    "to_host": _host_copy,
    "from_host": partial(_host_copy, back=True),
    "conv": _conv,
    "conv_backward": _conv_backward,
    "batch_norm": _batch_norm,
    "batch_norm_backward": _batch_norm_backward,
    "embedding_bag": _embedding_bag,
    "embedding_bag_backward": _embedding_bag_backward,
    "recurrent": _recurrent,
    "recurrent_backward": partial(_recurrent, backward=True),
}
