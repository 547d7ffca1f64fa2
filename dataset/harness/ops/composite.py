"""Composite ops: fused where a kernel library would fuse them, annotated, forward and backward.

Each op is a pair of plain functions (which event profiling times) and an ``autograd.Function`` that calls
them under an annotation (which the model uses), so that both run the same code, compiled or as it is written.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import annotate
from .compiled import composite, composite_as

EPSILON = 1e-5


class Cast(torch.autograd.Function):
    """A conversion between fp32 and 16 bits, with that of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return _converted(x, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _converted(grad, ctx.dtype), None


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    with annotate.op("cast", (x.numel(),), min(x.dtype, dtype, key=lambda each: each.itemsize)):
        return x.to(dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in a type; the tensor itself where it has the type."""
    if x.dtype == dtype:
        return x
    y: Tensor = Cast.apply(x, dtype)
    return y


@composite
def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``x[rows, hidden]`` over their root mean square, and its inverse ``[rows, 1]``."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = norm.square_().div_(x.shape[-1]).add_(EPSILON).rsqrt_().to(x.dtype)
    return (x * inverse).mul_(weight), inverse


@composite
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients for ``x`` and ``weight``."""
    normed = x * inverse
    grad_weight = (grad * normed).sum(0)
    grad_x = grad * weight
    mean = (grad_x * normed).sum(-1, keepdim=True).div_(x.shape[-1])
    return grad_x.sub_(normed.mul_(mean)).mul_(inverse), grad_weight


class RMSNorm(torch.autograd.Function):
    """``rms_norm`` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with annotate.op("rms_norm", x.shape, x.dtype):
            y, inverse = rms_norm(x, weight)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, inverse = ctx.saved_tensors
        with annotate.op("rms_norm_backward", x.shape, x.dtype):
            return rms_norm_backward(grad, x, weight, inverse)


def rope_tables(seq_len: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, each ``[seq_len, 1, head_dim / 2]``."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequency)[:, None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


@composite
def rope_(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``heads[batch, seq_len, heads, head_dim]`` in place; with ``-sin`` rotate back (the gradient)."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    kept = first * sin
    first.mul_(cos).sub_(second * sin)
    second.mul_(cos).add_(kept)
    return heads


class Rope(torch.autograd.Function):
    """Rotate queries and keys within the fused ``qkv[rows, (heads + 2 * kv_heads) * head_dim]``, in place.

    The linear that made ``qkv`` does not need it for its gradient, and the gradient that attention hands
    back has no other reader, so neither direction copies anything.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.rotated = rotated
        ctx.mark_dirty(qkv)
        _rotate("rope", qkv, cos, sin, rotated)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        _rotate("rope_backward", grad, cos, sin, ctx.rotated)
        return grad, None, None, None


def _rotate(kind: str, qkv: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> None:
    seq_len, head_dim = cos.shape[0], 2 * cos.shape[-1]
    with annotate.op(kind, (qkv.shape[0] * rotated * head_dim,), qkv.dtype):
        heads = qkv.view(-1, seq_len, qkv.shape[1] // head_dim, head_dim)[:, :, :rotated]
        rope_(heads, cos, sin if kind == "rope" else -sin)


@composite
def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up[rows, 2 * ffn]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate) * grad], -1)


@composite_as(_swiglu_backward)
def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient for ``gate_up``."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, dim=-1)
    torch.mul(F.silu(gate), grad, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return out


class SwiGLU(torch.autograd.Function):
    """``swiglu`` with its gradient."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        with annotate.op("swiglu", (gate_up.numel() // 2,), gate_up.dtype):
            return swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        with annotate.op("swiglu_backward", (gate_up.numel() // 2,), gate_up.dtype):
            return swiglu_backward(grad, gate_up)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh approximation."""
    return F.gelu(x, approximate="tanh")


@composite
def geglu(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` of ``gate_up[rows, 2 * ffn]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate).mul_(up)


def _geglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.cat([torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh"), gelu(gate) * grad], -1)


@composite_as(_geglu_backward)
def geglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient for ``gate_up``."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, dim=-1)
    torch.mul(gelu(gate), grad, out=grad_up)
    torch.ops.aten.gelu_backward.grad_input(grad * up, gate, approximate="tanh", grad_input=grad_gate)
    return out


class GeGLU(torch.autograd.Function):
    """``geglu`` with its gradient."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        with annotate.op("geglu", (gate_up.numel() // 2,), gate_up.dtype):
            return geglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        with annotate.op("geglu_backward", (gate_up.numel() // 2,), gate_up.dtype):
            return geglu_backward(grad, gate_up)


def relu_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Gradient where ``y`` is positive."""
    found: Tensor = torch.ops.aten.threshold_backward(grad, y, 0)
    return found


class ReLU(torch.autograd.Function):
    """``relu`` with its gradient, named in traces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with annotate.op("relu", (x.numel(),), x.dtype):
            y = torch.relu(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        with annotate.op("relu_backward", (y.numel(),), y.dtype):
            return relu_backward(grad, y)


@composite
def cross_entropy(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's part of a softmax over a vocabulary of which it holds ``first, first + 1, ...``.

    Returns:
        ``exp(logits - top)`` of ``[rows, vocab]``, its row sums, ``top`` (each row's maximum) and the
        target's logit (0 where another rank holds it), each ``[rows]``.
    """
    top = logits.amax(dim=-1)
    exponent = torch.sub(logits, top[:, None]).exp_()
    local = targets - first
    inside = (local >= 0) & (local < logits.shape[-1])
    picked = logits.gather(1, local.clamp(0, logits.shape[-1] - 1)[:, None]).squeeze(1)
    return exponent, exponent.sum(-1), top, picked * inside


@composite
def cross_entropy_backward(exponent: Tensor, scale: Tensor, weight: Tensor, targets: Tensor, first: int) -> Tensor:
    """Gradient for the logits, in place of ``exponent[rows, vocab]``.

    Args:
        scale: What turns a row of ``exponent`` into probabilities times the loss's gradient, ``[rows]``.
        weight: The loss's gradient over the rows, a scalar.
    """
    local = targets - first
    inside = (local >= 0) & (local < exponent.shape[-1])
    grad = exponent.mul_(scale[:, None])
    return grad.scatter_add_(1, local.clamp(0, grad.shape[-1] - 1)[:, None], (inside * -weight)[:, None].to(grad.dtype))


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention of queries to keys and values, each ``[batch, length, heads, dim]``: ``[rows, heads * v_dim]``."""
    heads, v_dim = q.shape[2], v.shape[3]
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != k.shape[1])
    return y.transpose(1, 2).reshape(-1, heads * v_dim)
