"""Ops on rows: norms, softmax, embedding, loss."""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from . import composite
from .input_pool import Call, Maker, Pool


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


def _rms_norm(pool: Pool, rows: int, hidden: int) -> Call:
    return Call(composite.rms_norm, lambda: (pool.take(rows, hidden), pool.take(hidden)))


def _rms_norm_backward(pool: Pool, rows: int, hidden: int) -> Call:
    return Call(
        composite.rms_norm_backward,
        lambda: (pool.take(rows, hidden), pool.take(rows, hidden), pool.take(hidden), pool.take(rows, 1)),
    )


def _softmax(pool: Pool, rows: int, columns: int) -> Call:
    return Call(lambda x: torch.softmax(x, -1), lambda: (pool.take(rows, columns),))


def _softmax_backward(pool: Pool, rows: int, columns: int) -> Call:
    backward = torch.ops.aten._softmax_backward_data
    return Call(
        lambda grad, y: backward(grad, y, -1, y.dtype), lambda: (pool.take(rows, columns), pool.take(rows, columns))
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


MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "embedding": _embedding,
        "embedding_backward": _embedding_backward,
        "layer_norm": _layer_norm,
        "layer_norm_backward": _layer_norm_backward,
        "rms_norm": _rms_norm,
        "rms_norm_backward": _rms_norm_backward,
        "softmax": _softmax,
        "softmax_backward": _softmax_backward,
        "cross_entropy": _cross_entropy,
        "cross_entropy_backward": _cross_entropy_backward,
    }
)
