"""Ops that can be measured, each made of a pool of inputs and its dims, as the functions that models run.

Matrix products (also in fp8 and tf32), attention and mixtures of experts; what memory bounds: norms, softmax, embedding
and loss, element-wise ops, the optimizer, copies to the host; and ops of models that the harness does not have itself:
convolutions, batch norms, embedding bags and recurrence.

Dims of products are those of the forward linear (m rows, n outputs, k inputs), also for its gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import get_total_norm

from ..base.errors import HarnessError
from ..base.patching import patched
from . import composite, context_attention
from .input_pool import Call, Inputs, Maker, Pool, Run, shares

_aten = torch.ops.aten
Made = tuple[object, ...]  # see ``Maker``


def _attention(pool: Pool, *dims: int, latent: bool = False, backward: bool = False) -> Any:
    """Attention, or its gradients: queries, keys and values ``[batch, length, heads, dim]`` are of one linear, of two
    where lengths differ, and each of its own if they are ``latent``.
    """
    b, heads, *sizes, causal = dims
    kv_heads, q_len, kv_len, dim, v_dim = [heads, *sizes] if latent else [*sizes, sizes[-1]]
    if causal and q_len != kv_len:  # PyTorch's mask begins at the first key, and hides other pairs than half
        size, rest = divmod(kv_len, q_len)
        if rest or q_len % 2 or latent or pool.device.type != "cpu":
            rule = "causal attention with q_len = kv_len, or as one of n ranks of context parallelism on a CPU"
            raise HarnessError(f"the harness measures {rule} (kv_len = n q_len), got {q_len}, {kv_len}")
        first: tuple[Any, ...] = (b, q_len, heads, dim), (size, b, q_len, 2 * kv_heads, dim)
        if not backward:
            return partial(context_attention.attend_parts, place=0, causal=True), *first
        q, keys = (pool.take(*each).clone() for each in first)
        kept = q, *context_attention.attend_parts(q, keys, 0, True)
        return (lambda grad: context_attention.attend_parts_backward((grad, *kept), keys, 0, True)), first[0]

    def parts() -> Inputs:
        if latent:
            return pool.take(b, q_len, heads, dim), pool.take(b, kv_len, heads, dim), pool.take(b, kv_len, heads, v_dim)
        if q_len == kv_len:
            return tuple(pool.take(b, q_len, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=2))
        return pool.take(b, q_len, heads, dim), *pool.take(b, kv_len, 2 * kv_heads, dim).chunk(2, dim=2)

    run = partial(composite.attend, causal=bool(causal))
    if not backward:
        return Call(run, parts)
    return gradients(run, [part.detach().requires_grad_() for part in parts()])


def gradients(run: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Run, torch.Size]:
    """What computes the gradients of a function again and again, and the shape of what it takes."""
    with torch.enable_grad():
        y = run(*leaves)
    return (lambda grad: torch.autograd.grad(y, leaves, grad, retain_graph=True)), y.shape


def precision(dtype: str) -> AbstractContextManager[None]:
    """Matrix products of fp32 numbers in the block are rounded to tf32 if that is the dtype, else they are not."""
    return patched(torch.backends.cuda.matmul, allow_tf32=dtype == "tf32")


def scaled_product(device: torch.device, *, fast: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """``y[m, n] = a[m, k] @ b[k, n]`` in bf16, of fp8 operands of which ``b`` lies by columns."""
    scale = torch.ones((), device=device)
    return partial(torch._scaled_mm, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=fast)


# Mixtures of experts: one kernel where the device has it, else a loop over the experts.


def one_kernel(x: Tensor, wide: int) -> bool:
    """Whether the grouped product of bf16 rows of whole 16 bytes exists (Hopper and later)."""
    if x.device.type != "cuda" or not hasattr(torch, "_grouped_mm"):
        return False
    return (
        x.dtype == torch.bfloat16 and wide % 8 == x.shape[1] % 8 == 0 and torch.cuda.get_device_capability() >= (9, 0)
    )


@lru_cache(maxsize=64)
def _ends(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def grouped(x: Tensor, weights: Tensor | Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """``y[m, wide] = x[m, deep] @ weights[group][deep, wide]``; ``sizes``: rows of each group."""
    wide = weights[0].shape[1]
    if one_kernel(x, wide):
        whole = weights if isinstance(weights, Tensor) else torch.stack(tuple(weights))
        return torch._grouped_mm(x, whole, offs=_ends(tuple(sizes), x.device))
    y = x.new_empty(len(x), wide)
    for rows, matrix, out in zip(x.split(sizes), weights, y.split(sizes), strict=True):
        torch.mm(rows, matrix, out=out)
    return y


def grouped_wgrad(grad: Tensor, x: Tensor, sizes: Sequence[int], scale: float = 1.0) -> Tensor:
    """``[groups, n, k]`` from ``grad[m, n]`` and ``x[m, k]``, times ``scale``."""
    if one_kernel(x, grad.shape[1]):
        whole = torch._grouped_mm(grad.t(), x, offs=_ends(tuple(sizes), x.device))
        return whole if scale == 1.0 else whole.mul_(scale)
    weights = x.new_empty(len(sizes), grad.shape[1], x.shape[1])
    for grads, rows, out in zip(grad.split(sizes), x.split(sizes), weights, strict=True):
        torch.addmm(out, grads.t(), rows, beta=0, alpha=scale, out=out)
    return weights


def _grouped(groups: int, m: int) -> Run:
    return partial(grouped, sizes=shares(m, groups))


def _permute(kind: str, pool: Pool, copies: int, tokens: int, hidden: int) -> tuple[object, ...]:
    """Copies of tokens, all of them as often, in no order; their weighted sums; gradients of these."""
    order = torch.randperm(copies, device=pool.device) % tokens

    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        grads = grad.index_select(0, order)
        return grads * weight, (grads * x).sum(-1)

    copied = (copies, hidden), (copies, 1)
    return {
        "permute": ((lambda x: x.index_select(0, order)), (tokens, hidden)),
        "unpermute": ((lambda x, weight: x.new_zeros(tokens, hidden).index_add_(0, order, x * weight)), *copied),
        "unpermute_backward": (backward, (tokens, hidden), *copied),
    }[kind]


def _layer_norm(pool: Pool, rows: int, hidden: int, *, backward: bool = False) -> Made:
    weight, bias = pool.take(hidden), pool.take(hidden)
    if not backward:
        return (lambda x: F.layer_norm(x, (hidden,), weight, bias, composite.EPSILON)), (rows, hidden)
    x, run = pool.take(rows, hidden), _aten.native_layer_norm_backward
    _, mean, inverse = torch.native_layer_norm(x, (hidden,), weight, bias, composite.EPSILON)
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


def _cross_backward(grad: Tensor, first: Tensor, y: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y, of the first input, which every layer adds to, and of x, which is also the product's input."""
    return grad * first, earlier + grad * y, grad + earlier


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


def _convolution(pool: Pool, *dims: int) -> Made:
    """A convolution, or its gradients if a further dim tells whether its input has one.

    Windows, strides and padding are the simplest that have such dims.
    """
    batch, ins, outs, positions, window, groups, inside, spatial, *input_gradient = dims
    if min(dims[:8]) < 1 or spatial > 3 or outs % groups:
        raise HarnessError(f"a convolution needs dims >= 1, groups that divide its outputs, got {list(dims[:8])}")
    turned = inside < positions
    small, large = _side(min(inside, positions), spatial), _side(max(inside, positions), spatial)
    stride = [max(round(wide / narrow), 1) for wide, narrow in zip(large, small, strict=True)]
    sides = _side(window, spatial)
    padding = [(side - 1) // 2 for side in sides]
    large = [(n - 1) * step + side - 2 * pad for n, step, side, pad in zip(small, stride, sides, padding, strict=True)]
    image = (batch, groups * ins, *(small if turned else large))
    weight = (groups * ins, outs // groups, *sides) if turned else (outs, ins, *sides)
    how = stride, padding, [1] * spatial, turned, [0] * spatial, groups
    if not input_gradient:
        return (lambda x, weight: _aten.convolution(x, weight, None, *how)), image, weight
    wanted, y = [bool(*input_gradient), True, False], (batch, outs, *(large if turned else small))
    return (lambda grad, x, w: _aten.convolution_backward(grad, x, w, None, *how, wanted)), y, image, weight


def _batch_norm(pool: Pool, positions: int, channels: int, *, backward: bool = False) -> Made:
    weight, bias = pool.take(channels), pool.take(channels)
    if not backward:
        return (lambda x: F.batch_norm(x, None, None, weight, bias, training=True)), (1, channels, positions)
    x = pool.take(1, channels, positions)
    _, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    how = weight, None, None, mean, inverse, True, 1e-5, [True] * 3
    return (lambda grad, x: _aten.native_batch_norm_backward(grad, x, *how)), x.shape, x.shape


def _both_ways(kind: str, maker: Any) -> dict[str, Maker]:
    """An op and its gradients, which are the same maker's."""
    return {kind: maker, f"{kind}_backward": partial(maker, backward=True)}


def _embedding_bag(pool: Pool, *dims: int, backward: bool = False) -> Made:
    indices, hidden, bags, rows = dims
    offsets = torch.arange(bags, device=pool.device) * indices // max(bags, 1)
    if not backward:
        run = partial(F.embedding_bag, offsets=offsets, mode="sum")
        return run, partial(pool.ids, indices, rows), (rows, hidden)
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
    "linear": lambda _, m, n, k: (F.linear, (m, k), (n, k)),
    "linear_dgrad": lambda _, m, n, k: (torch.mm, (m, n), (n, k)),
    "linear_wgrad": lambda pool, m, n, k: (torch.mm, partial(pool.turned, m, n), (m, k)),
    "bias_grad": lambda _, rows, hidden: ((lambda grad: grad.sum(0)), (rows, hidden)),
    "batched_matmul": lambda pool, batch, m, n, k: (torch.bmm, (batch, m, k), partial(pool.turned, batch, n, k)),
    **_both_ways("attention", _attention),
    **_both_ways("mla_attention", partial(_attention, latent=True)),
    "grouped_linear": lambda pool, g, m, n, k: (_grouped(g, m), (m, k), partial(pool.turned, g, n, k)),
    "grouped_linear_dgrad": lambda _, g, m, n, k: (_grouped(g, m), (m, n), (g, n, k)),
    "grouped_linear_wgrad": lambda _, g, m, n, k: (partial(grouped_wgrad, sizes=shares(m, g)), (m, n), (m, k)),
    **{kind: partial(_permute, kind) for kind in ("permute", "unpermute", "unpermute_backward")},
    "embedding": lambda pool, tokens, hidden, vocab: (F.embedding, partial(pool.ids, tokens, vocab), (vocab, hidden)),
    "embedding_backward": lambda pool, tokens, hidden, vocab: (
        (lambda grad, ids: _aten.embedding_dense_backward(grad, ids, vocab, -1, False)),
        (tokens, hidden),
        partial(pool.ids, tokens, vocab),
    ),
    **_both_ways("layer_norm", _layer_norm),
    "rms_norm": lambda _, rows, hidden: (composite.rms_norm, (rows, hidden), (hidden,)),
    "rms_norm_backward": lambda _, rows, n: (composite.rms_norm_backward, (rows, n), (rows, n), (n,), (rows, 1)),
    "softmax": lambda _, *shape: (partial(torch.softmax, dim=-1), shape),
    "softmax_backward": lambda _, *xy: ((lambda g, y: _aten._softmax_backward_data(g, y, -1, y.dtype)), xy, xy),
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
    "cross": _each(lambda first, x, y: first * y + x, 3),
    "cross_backward": _each(_cross_backward, 4),
    **dict.fromkeys(("rope", "rope_backward"), _rope),
    "dropout": _each(lambda x: torch.native_dropout(x, 0.1, True)),
    "dropout_backward": _dropout_backward,
    "add": _each(torch.add, 2),
    "copy": _each(torch.clone),
    "fill": lambda pool, numel: (partial(torch.zeros, numel, device=pool.device, dtype=pool.dtype),),
    "reduce": _by_rows(lambda x: x.sum(0), 1),
    "elementwise": _each(lambda x: x * 0.5),
    "cast": _each(lambda x: x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)),
    "adamw": lambda pool, numel, tensors: (_adamw(pool.device, pool.dtype, numel, tensors),),
    "adamw_host": _adamw_host,
    "grad_norm": lambda _, numel, count: ((lambda *x: get_total_norm(x)), *[(max(1, numel // count),)] * count),
    "to_host": _host_copy,
    "from_host": partial(_host_copy, back=True),
    **dict.fromkeys(("conv", "conv_backward"), _convolution),
    **_both_ways("batch_norm", _batch_norm),
    **_both_ways("embedding_bag", _embedding_bag),
    **_both_ways("recurrent", _recurrent),
}
# Places of a product's own rows, columns and what it sums over, in the dims.
_FP8 = {"linear": (0, 1, 2), "linear_dgrad": (0, 2, 1), "linear_wgrad": (1, 2, 0)}


def _fp8(kind: str, pool: Pool, *dims: int) -> tuple[object, ...]:
    if any(dim % 16 for dim in dims):
        raise HarnessError(f"products in fp8 need dims that are multiples of 16, got {', '.join(map(str, dims))}")
    rows, columns, inner = (dims[place] for place in _FP8[kind])
    return scaled_product(pool.device, fast=kind == "linear"), (rows, inner), partial(pool.turned, columns, inner)


NARROW_MAKERS: dict[str, dict[str, Maker]] = {
    "fp8": {kind: partial(_fp8, kind) for kind in _FP8},
    "tf32": {kind: MAKERS[kind] for kind in _FP8},
}
