"""Composite ops: fused where a kernel library would fuse them, annotated, forward and backward.

Each op is a pair of plain functions (which event profiling times) and an ``autograd.Function`` that calls
them under an annotation (which the model uses), so that both run the same code, compiled or as it is written.

If a plan requests it, ``torch.compile`` compiles them: one or two kernels instead of one per step.  Each shape is
compiled on its own when it is met first, and has a function of its own: PyTorch counts the shapes of a function, and
beyond eight runs it as it is written, without a word (and the setting of that limit does not reach the thread in which
autograd runs on a GPU).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import annotate
from ..base.errors import HarnessError

EPSILON = 1e-5
BACKEND = "inductor"
Made = TypeVar("Made", bound=Callable[..., Any])


class _Compiling:
    active = False  # for the whole process: threads of autograd call composites too


def composite(function: Made, whole: Any = None) -> Made:
    """A function of tensors and plain numbers that runs compiled once ``enable_compiling`` was called.

    ``whole`` is compiled in its place, if the compiler refuses the written one.
    """
    made: dict[Any, Callable[..., Any]] = {}
    plain: Any = whole or function

    @wraps(function)
    def run(*args: Any) -> Any:
        if not _Compiling.active:
            return function(*args)
        key = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in args)
        if key not in made:
            code = plain.__code__.replace(co_name=f"{plain.__name__}_{len(made)}")
            own = FunctionType(code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
            made[key] = torch.compile(own, dynamic=False, fullgraph=True, backend=BACKEND)
        return made[key](*args)

    return run  # type: ignore[return-value]


def enable_compiling(device: torch.device) -> None:
    """Make composites of this process run compiled from now on; refused if nothing can be compiled here."""
    _Compiling.active = True
    try:
        found = _trial(torch.ones(4, 64, device=device))
        if found.tolist() != [192.0] * 4:
            raise HarnessError(f"got {found.tolist()} for 64 times 3")
    except Exception as error:  # whatever a compiler that is missing or broken raises
        _Compiling.active, why = False, " ".join(str(error).split())
        rule = "compile needs a compiler that works here (gcc or g++, on a GPU also Triton)"
        raise HarnessError(f"{rule}, got {type(error).__name__}: {why:.200}") from None


@composite
def _trial(x: Tensor) -> Tensor:
    return (2 * x + 1).sum(-1)


def function(name: str, ahead: Callable[..., tuple[Tensor, Any, Any]], back: Callable[..., Any]) -> Any:
    """The function of autograd that runs ``ahead`` forward and ``back`` backward.

    ``ahead`` gives the result, the tensors and the other values that ``back`` takes after the result's gradient;
    ``back`` gives the gradient of the first input, or a tuple of those of the first inputs.  The others have none.
    """

    def forward(ctx: Any, *inputs: Any) -> Tensor:
        y, kept, ctx.how = ahead(*inputs)
        ctx.save_for_backward(*kept)
        ctx.count = len(inputs)
        if y is inputs[0]:
            ctx.mark_dirty(y)
        return y

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = back(grad, *ctx.saved_tensors, *ctx.how)
        grads = found if isinstance(found, tuple) else (found,)
        return *grads, *[None] * (ctx.count - len(grads))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


def _annotated(name: str, kind: str, dims: Any, run: Callable[..., tuple[Tensor, ...]], derive: Any) -> Any:
    """The function of autograd of an op, annotated as ``kind`` and ``kind_backward`` with the dims of its first tensor.

    ``run`` gives the result and what its gradient needs; ``derive`` takes the gradient of the result, and that.
    """

    def ahead(*inputs: Tensor) -> tuple[Tensor, Any, Any]:
        with annotate.op(kind, dims(inputs[0]), inputs[0].dtype):
            y, *kept = run(*inputs)
        return y, kept, ()

    def back(grad: Tensor, *kept: Tensor) -> Any:
        with annotate.op(f"{kind}_backward", dims(kept[0]), kept[0].dtype):
            return derive(grad, *kept)

    return function(name, ahead, back)


def conjugate(name: str, ahead: Callable[..., Tensor], back: Callable[..., Tensor]) -> Any:
    """The function of autograd of a tensor and, in both directions, the same others, mostly a group."""
    return function(name, lambda x, *how: (ahead(x, *how), (), how), back)


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    with annotate.op("cast", (x.numel(),), min(x.dtype, dtype, key=lambda each: each.itemsize)):
        return x.to(dtype)


# A conversion between fp32 and 16 bits, with that of its gradient.
Cast = conjugate("Cast", lambda x, dtype, _: _converted(x, dtype), lambda grad, _, before: _converted(grad, before))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in a type; the tensor itself where it has the type."""
    return x if x.dtype == dtype else Cast.apply(x, dtype, x.dtype)


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


def _normed(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y, inverse = rms_norm(x, weight)
    return y, x, weight, inverse


RMSNorm = _annotated("RMSNorm", "rms_norm", lambda x: x.shape, _normed, rms_norm_backward)


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


def _rotate(kind: str, qkv: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    seq_len, head_dim = cos.shape[0], 2 * cos.shape[-1]
    with annotate.op(kind, (qkv.shape[0] * rotated * head_dim,), qkv.dtype):
        heads = qkv.view(-1, seq_len, qkv.shape[1] // head_dim, head_dim)[:, :, :rotated]
        rope_(heads, cos, sin if kind == "rope" else -sin)  # a negation outside would be an op of its own
    return qkv


# Rotate queries and keys within the fused ``qkv[rows, (heads + 2 * kv_heads) * head_dim]``, in place: the linear that
# made ``qkv`` does not need it for its gradient, and the gradient that attention hands back has no other reader.
Rope = conjugate("Rope", partial(_rotate, "rope"), partial(_rotate, "rope_backward"))


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def _gated(name: str, activation: Callable[[Tensor], Tensor], derivative: Any, **options: Any) -> tuple[Any, Any, Any]:
    """``activation(gate) * up`` of ``gate_up[rows, 2 * ffn]``, its gradient by ATen, and the function of autograd."""

    def forward(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate).mul_(up)

    def joined(grad: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.cat([derivative(grad * up, gate, **options), activation(gate) * grad], -1)

    def backward(grad: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(activation(gate), grad, out=grad_up)
        derivative.grad_input(grad * up, gate, grad_input=grad_gate, **options)
        return out

    run, derive = composite(forward), composite(backward, joined)
    function = _annotated(name, name.lower(), lambda x: (x.numel() // 2,), lambda x: (run(x), x), derive)
    return run, derive, function


swiglu, swiglu_backward, SwiGLU = _gated("SwiGLU", F.silu, torch.ops.aten.silu_backward)
geglu, geglu_backward, GeGLU = _gated("GeGLU", gelu, torch.ops.aten.gelu_backward, approximate="tanh")


def relu_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Gradient where ``y`` is positive."""
    return torch.ops.aten.threshold_backward(grad, y, 0)


ReLU = _annotated("ReLU", "relu", lambda x: (x.numel(),), lambda x: (torch.relu(x),) * 2, relu_backward)


@composite
def cross_entropy(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's part of a softmax over a vocabulary of which it holds ``first, first + 1, ...``.

    ``exp(logits - top)`` of ``[rows, vocab]``, its row sums, ``top`` (each row's maximum) and the target's logit (0
    where another rank holds it), each ``[rows]``.
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

    ``scale[rows]`` turns rows into probabilities times the loss's gradient; ``weight`` is that over the rows, a scalar.
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


def _self_attend(qkv: Tensor, bias: Tensor, batch: int) -> tuple[Tensor, Any, Any]:
    q, k, v = _matrices(qkv, bias.shape[0], batch, 3)
    found, weights = _attend(q, k, v, bias)
    return found.view(qkv.shape[0], -1), (qkv, weights), (batch,)


def _self_attend_backward(grad: Tensor, qkv: Tensor, weights: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    q, k, v = _matrices(qkv, weights.shape[0] // batch, batch, 3)
    grad_scores, grad_v = _weights_backward(grad, weights, v)
    with annotate.op("reduce", (grad_scores.numel(),), grad_scores.dtype):
        grad_bias = grad_scores.view(batch, -1, *grad_scores.shape[1:]).sum(0)
    grad_q = _product(grad_scores, k)
    grad_k = _product(grad_scores.transpose(1, 2), q)
    joined = torch.stack([part.transpose(0, 1) for part in (grad_q, grad_k, grad_v)], dim=2)
    return joined.view(qkv.shape), grad_bias


# Self-attention of ``qkv[length * batch, heads * 3 * dim]`` with a ``bias[heads, length, length]``.
SelfAttention = function("SelfAttention", _self_attend, _self_attend_backward)


def _cross_attend(q: Tensor, kv: Tensor, heads: int, batch: int) -> tuple[Tensor, Any, Any]:
    (queries,), (k, v) = _matrices(q, heads, batch, 1), _matrices(kv, heads, batch, 2)
    found, weights = _attend(queries, k, v, None)
    return found.view(q.shape), (q, kv, weights), (heads, batch)


def _cross_attend_backward(
    grad: Tensor, q: Tensor, kv: Tensor, weights: Tensor, heads: int, batch: int
) -> tuple[Tensor, Tensor]:
    (queries,), (k, v) = _matrices(q, heads, batch, 1), _matrices(kv, heads, batch, 2)
    grad_q, grad_kv = torch.empty_like(q), torch.empty_like(kv)
    (grad_queries,), (grad_k, grad_v) = _matrices(grad_q, heads, batch, 1), _matrices(grad_kv, heads, batch, 2)
    grad_scores, _ = _weights_backward(grad, weights, v, grad_v)
    _product(grad_scores, k, grad_queries)
    _product(grad_scores.transpose(1, 2), queries, grad_k)
    return grad_q, grad_kv


# Cross-attention of ``q[length * batch, heads * dim]`` to ``kv[kv_length * batch, heads * 2 * dim]``.
CrossAttention = function("CrossAttention", _cross_attend, _cross_attend_backward)


def _bias(table: Tensor, bucket: Tensor, causal: bool) -> tuple[Tensor, Any, Any]:
    with annotate.op("embedding", (bucket.numel(), table.shape[1], table.shape[0]), table.dtype):
        bias = F.embedding(bucket, table).permute(2, 0, 1).contiguous()
        if causal:
            bias.masked_fill_(torch.ones_like(bucket, dtype=torch.bool).triu_(1), -torch.inf)
    return bias, (bucket,), table.shape[:1]


def _bias_backward(grad: Tensor, bucket: Tensor, buckets: int) -> Tensor:
    with annotate.op("embedding_backward", (bucket.numel(), grad.shape[0], buckets), grad.dtype):
        rows = grad.permute(1, 2, 0).reshape(-1, grad.shape[0])
        return torch.ops.aten.embedding_dense_backward(rows, bucket.view(-1), buckets, -1, False)


# Rows of ``table[buckets, heads]`` for ``bucket[length, length]`` as ``[heads, length, length]``.
RelativeBias = function("RelativeBias", _bias, _bias_backward)


def _matrices(rows: Tensor, heads: int, batch: int, parts: int) -> tuple[Tensor, ...]:
    """``rows[length * batch, heads * parts * dim]`` as ``parts`` times ``[batch * heads, length, dim]``, not copied."""
    length, dim = rows.shape[0] // batch, rows.shape[1] // (heads * parts)
    return tuple(part.transpose(0, 1) for part in rows.view(length, batch * heads, parts, dim).unbind(2))


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """``left[batch, m, k] @ right[batch, k, n]``."""
    dims = (left.shape[0], left.shape[1], right.shape[2], left.shape[2])
    with annotate.op("batched_matmul", dims, left.dtype):
        return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """What each head finds, ``[length, heads, dim]``, and its weights, ``[heads, length, kv_length]``."""
    weights = _product(q, k.transpose(1, 2))
    if bias is not None:
        with annotate.op("add", (weights.numel(),), weights.dtype):
            weights.view(-1, *bias.shape).add_(bias)
    with annotate.op("softmax", (weights.shape[0] * weights.shape[1], weights.shape[2]), weights.dtype):
        weights = torch.softmax(weights, -1)
    found = q.new_empty(q.shape[1], q.shape[0], v.shape[2])
    _product(weights, v, found.transpose(0, 1))
    return found, weights


def _weights_backward(grad: Tensor, weights: Tensor, v: Tensor, grad_v: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of the scores and of the values from that of what the heads found, ``[rows, heads * dim]``."""
    heads, length, _ = weights.shape
    grad = grad.reshape(length, heads, -1).transpose(0, 1)
    grad_weights = _product(grad, v.transpose(1, 2))
    grad_v = _product(weights.transpose(1, 2), grad, grad_v)
    with annotate.op("softmax_backward", (heads * length, weights.shape[2]), weights.dtype):
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    return grad_scores, grad_v
