"""Ops that memory bounds: norms, softmax, embedding and loss; element-wise ops; the optimizer; copies to the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MappingProxyType

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
    }
)
