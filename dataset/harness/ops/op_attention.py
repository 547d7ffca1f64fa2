"""Fused attention, ordinary and latent (keys wider than values), as ``scaled_dot_product_attention`` has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch

from ..plan_error import HarnessError
from .composite import attend
from .input_pool import Call, Inputs, Maker, Pool


def _parts(pool: Pool, *sizes: int) -> Inputs:
    """Queries, keys and values ``[batch, length, heads, dim]`` of one linear, or of two where lengths differ."""
    b, heads, kv_heads, q_len, kv_len, d = sizes
    if q_len == kv_len:
        q, k, v = pool.take(b, q_len, heads + 2 * kv_heads, d).split([heads, kv_heads, kv_heads], dim=2)
        return q, k, v
    return pool.take(b, q_len, heads, d), *pool.take(b, kv_len, 2 * kv_heads, d).chunk(2, dim=2)


def _latent_parts(pool: Pool, *sizes: int) -> Inputs:
    """Queries, keys and values of latent attention, each of its own."""
    b, heads, q_len, kv_len, qk_dim, v_dim = sizes
    return pool.take(b, q_len, heads, qk_dim), pool.take(b, kv_len, heads, qk_dim), pool.take(b, kv_len, heads, v_dim)


def _attention(pool: Pool, *dims: int) -> Call:
    *sizes, causal = dims
    _check(sizes[3:5], causal)
    return _forward(lambda: _parts(pool, *sizes), causal)


def _attention_backward(pool: Pool, *dims: int) -> Call:
    *sizes, causal = dims
    _check(sizes[3:5], causal)
    return _backward(pool, _parts(pool, *sizes), causal)


def _mla_attention(pool: Pool, *dims: int) -> Call:
    *sizes, causal = dims
    _check(sizes[2:4], causal)
    return _forward(lambda: _latent_parts(pool, *sizes), causal)


def _mla_attention_backward(pool: Pool, *dims: int) -> Call:
    *sizes, causal = dims
    _check(sizes[2:4], causal)
    return _backward(pool, _latent_parts(pool, *sizes), causal)


def _forward(inputs: Callable[[], Inputs], causal: int) -> Call:
    return Call(lambda q, k, v: attend(q, k, v, causal=bool(causal)), inputs)


def _backward(pool: Pool, inputs: Inputs, causal: int) -> Call:
    parts = [part.detach().requires_grad_() for part in inputs]
    with torch.enable_grad():
        y = attend(*parts, causal=bool(causal))
    return Call(lambda grad: torch.autograd.grad(y, parts, grad, retain_graph=True), lambda: (pool.take(*y.shape),))


def _check(lengths: Sequence[int], causal: int) -> None:
    """PyTorch's mask of a rectangle begins at its first key, and hides other pairs than half of them."""
    q_len, kv_len = lengths
    if causal and q_len != kv_len:
        raise HarnessError(f"the harness measures causal attention with q_len = kv_len, got {q_len}, {kv_len}")


MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "attention": _attention,
        "attention_backward": _attention_backward,
        "mla_attention": _mla_attention,
        "mla_attention_backward": _mla_attention_backward,
    }
)
