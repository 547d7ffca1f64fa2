"""Kinds that the device's arithmetic bounds: matrix products, convolutions, fused attention and recurrent layers.

Attention comes ordinary, with earlier generations of kernels, and latent (keys wider than values).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from stepsight.dataset.base.files import preset
from stepsight.dataset.kinds.call_dims import CALLS, Args, Dims, DimsOf, attention, literal_of, named_calls, shape_of
from stepsight.dataset.kinds.kind_table import OpKind

_PRODUCT = ("m", "n", "k")  # y[m, n] = x[m, k] @ w[n, k].T; for gradients the sizes are those of the forward product
_GROUPED = ("groups", *_PRODUCT)  # a product for every group of the rows; m counts the rows of all groups


Grid = Callable[..., tuple[int, int, int]]


def _linear(name: str, code: int, grid: Grid, as_base: Callable[..., Dims] | None = None, **more: Any) -> OpKind:
    """A product; ``as_base``: the dims of the forward product of its size, of one that is a gradient."""
    more |= {"base": "linear", "base_dims": as_base} if as_base else {}
    return OpKind(
        name=name,
        family="gemm",
        dim_names=_PRODUCT,
        flops=lambda m, n, k: 2.0 * m * n * k,
        elements=lambda m, n, k: float(m * n + m * k + n * k),
        bound="compute",
        code=code,
        operands=lambda m, n, k: (m * k, n * k, m * n),
        grid=grid,
        aligned=_PRODUCT,
        **more,
    )


def _grouped(name: str, code: int, grid: Grid, base: str, **more: Any) -> OpKind:
    return OpKind(
        name=name,
        family="grouped_gemm",
        dim_names=_GROUPED,
        flops=lambda g, m, n, k: 2.0 * m * n * k,
        elements=lambda g, m, n, k: float(m * n + m * k + g * n * k),
        bound="compute",
        code=code,
        units=lambda g, m, n, k: g,
        operands=lambda g, m, n, k: (m * k, g * n * k, m * n),
        grid=grid,
        aligned=_PRODUCT,
        base=base,
        **more,
    )


_MATRICES = (
    _linear("linear", 0, lambda m, n, k: (1, m, n)),
    _linear("linear_dgrad", 1, lambda m, n, k: (1, m, k), lambda m, n, k: (m, k, n), reads_saved=False),
    _linear("linear_wgrad", 2, lambda m, n, k: (1, n, k), lambda m, n, k: (n, k, m), weight_gradient=True),
    OpKind(
        name="batched_matmul",  # many small products of one shape
        family="batched_gemm",
        dim_names=("batch", *_PRODUCT),
        flops=lambda b, m, n, k: b * (2.0 * m * n * k),
        elements=lambda b, m, n, k: b * float(m * n + m * k + n * k),
        bound="compute",
        code=29,
        units=lambda b, m, n, k: b,
        operands=lambda b, m, n, k: (b * m * k, b * n * k, b * m * n),
        grid=lambda b, m, n, k: (b, m, n),
        aligned=_PRODUCT,
        base="linear",
        base_dims=lambda b, m, n, k: (b * m, n, k),
    ),
    _grouped(
        "grouped_linear",
        39,
        lambda g, m, n, k: (g, -(-m // max(g, 1)), n),
        "linear",
        base_dims=lambda g, m, n, k: (max(m // max(g, 1), 1), n, k),  # one product after another
    ),
    _grouped(
        "grouped_linear_dgrad",
        40,
        lambda g, m, n, k: (g, -(-m // max(g, 1)), k),
        "grouped_linear",
        base_dims=lambda g, m, n, k: (g, m, k, n),
        reads_saved=False,
    ),
    _grouped("grouped_linear_wgrad", 41, lambda g, m, n, k: (g, n, k), "grouped_linear", weight_gradient=True),
)


# ``in_channels``: of one group.  ``spatial``: number of spatial dims.
_DIMS = ("batch", "in_channels", "out_channels", "out_positions", "window", "groups", "in_positions", "spatial")
_TRANSPOSED_AT = 6  # positions after the input, in ``convolution`` and its backward


def _numbers(text: Any) -> list[int]:
    words = str(text).strip("[]() ").split(",")
    return [int(word) for word in words] if all(word.strip().isdigit() for word in words) else []


def _strided(args: Args, index: int, size: list[int], *, transposed: bool) -> int:
    """Positions of the output: those of the input, divided by the stride (multiplied, where transposed)."""
    lists = [_numbers(text) for text in (args.get("Concrete Inputs") or [])[index + 2 :]]
    stride = next((found for found in lists if len(found) in (1, len(size))), [1])
    steps = [max(step, 1) for step in (stride * len(size))[: len(size)]]
    return math.prod(
        length * step if transposed else max(-(-length // step), 1) for length, step in zip(size, steps, strict=True)
    )


def _sizes(index: int, out: int | None = None, transposed: bool = False, kernel: int | None = None) -> DimsOf:
    """Dims of a convolution of input ``index`` with the weight ``kernel`` (the input after it, if None).

    ``out``: input that is shaped as the output; without it, the stride says the output's positions.
    """

    def dims(args: Args) -> Dims:
        image, weight = shape_of(args, index), shape_of(args, index + 1 if kernel is None else kernel)
        if len(image) < 3 or len(weight) != len(image):
            return (0,) * len(_DIMS)
        result = shape_of(args, out) if out is not None else []
        turned = transposed or literal_of(args, index + _TRANSPOSED_AT) == "True"
        positions = math.prod(result[2:]) if result else _strided(args, index, image[2:], transposed=turned)
        if turned:
            groups = max(result[1] // weight[1], 1) if len(result) > 1 else 1
            ins, outs = weight[0] // groups, weight[1] * groups
        else:
            groups = max(image[1] // max(weight[1], 1), 1)
            ins, outs = weight[1], weight[0]
        return image[0], ins, outs, positions, math.prod(weight[2:]), groups, math.prod(image[2:]), len(image) - 2

    return dims


def _gradients(of: DimsOf, mask: int | None = None) -> DimsOf:
    """Dims of a backward; ``mask``: the argument with the wanted gradients, the one of the input first."""

    def dims(args: Args) -> Dims | None:
        forward = of(args)
        return None if forward is None else (*forward, int(mask is None or "[False" not in literal_of(args, mask)))

    return dims


def _flops(*dims: int) -> float:
    b, i, o, p, w, _, q, _ = dims
    return 2.0 * b * i * o * w * min(p, q)


def _elements(*dims: int) -> float:
    b, i, o, p, w, g, q, _ = dims
    return float(b * (g * i * q + o * p) + i * o * w)


def _as_product(*dims: int) -> Dims:
    b, i, o, p, w, _, q, _ = dims
    return b * min(p, q), o, i * w


def _products(of: Callable[..., float]) -> Callable[..., float]:
    """Products of the gradient of the weight and, if the last dim says so, of the input."""
    return lambda *dims: (1.0 + dims[-1]) * of(*dims[:-1])


_CONVOLUTIONS = (
    OpKind(
        name="conv",
        family="conv",
        dim_names=_DIMS,
        flops=_flops,
        elements=_elements,
        units=lambda b, i, o, p, w, g, q, s: float(b * g),
        bound="compute",
        base="linear",
        base_dims=_as_product,
        calls=named_calls(CALLS["conv"], _sizes(0), (CALLS["conv_transposed"], _sizes(0, transposed=True))),
    ),
    OpKind(
        name="conv_backward",
        family="conv",
        dim_names=(*_DIMS, "input_gradient"),
        flags=("input_gradient",),
        flops=_products(_flops),
        elements=_products(_elements),
        units=lambda b, i, o, p, w, g, q, s, d: float(b * g),
        bound="compute",
        base="conv",
        base_dims=lambda b, i, o, p, w, g, q, s, d: (b * (1 + d), i, o, p, w, g, q, s),
        calls=named_calls(
            "convolution_backward",
            _gradients(_sizes(1, out=0), 10),
            (CALLS["conv_backward"], _gradients(_sizes(0, out=1, kernel=2))),
        ),
    ),
)
_ATTENTION = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal")
_LATENT = ("batch", "heads", "q_len", "kv_len", "qk_dim", "v_dim", "causal")  # as many keys as queries

_FORWARD, _BACKWARD = (
    {name: attention(*given) for name, given in calls.items()}
    for calls in preset("trace_names.toml")["attention"].values()
)


def _pairs(q_len: int, kv_len: int, causal: int) -> float:
    """Number of query-key pairs that are computed: a causal mask halves a square score matrix."""
    return q_len * kv_len * (0.5 if causal else 1.0)


def _fused(
    name: str, code: int, q_at: int, flops: Callable[..., float], elements: Callable[..., float], **more: Any
) -> OpKind:
    """Fused attention; ``q_at``: place of the queries' length among the dims, before that of the keys."""
    return OpKind(
        name=name,
        flops=flops,
        elements=elements,
        bound="compute",
        code=code,
        flags=("causal",),
        units=lambda b, h, *others: b * h,
        operands=lambda *dims: (elements(*dims), dims[0] * dims[1] * dims[q_at] * dims[q_at + 1], 0.0),
        keeps_second_operand=True,
        grid=lambda *dims: (dims[0] * dims[1], dims[q_at], 1),  # tiled by queries alone
        **more,
    )


def _attention(name: str, code: int, flops: float, passes: float, **more: Any) -> OpKind:
    """Ordinary attention; ``flops`` for each pair and element of a head, ``passes`` over what it reads and writes."""
    return _fused(
        *(name, code, 3),
        lambda b, h, g, q, k, d, c: flops * b * h * d * _pairs(q, k, c),
        lambda b, h, g, q, k, d, c: passes * (b * d * (2.0 * h * q + 2.0 * g * k)),
        family="attention",
        dim_names=_ATTENTION,
        padded="head_dim",
        **more,
    )


def _latent(name: str, code: int, widths: tuple[int, int], passes: float, **more: Any) -> OpKind:
    """Latent attention; ``widths``: number of passes of each pair over the width of keys and of values."""
    keys, values = widths
    return _fused(
        *(name, code, 2),
        lambda b, h, q, k, d, v, c: 2.0 * b * h * (keys * d + values * v) * _pairs(q, k, c),
        lambda b, h, q, k, d, v, c: passes * float(b * h * (d + v) * (q + k)),
        family="latent_attention",
        dim_names=_LATENT,
        **more,
    )


_ATTENTIONS = (
    _attention("attention", 4, 4.0, 1.0, calls=_FORWARD),
    _attention("attention_backward", 5, 10.0, 2.0, base="attention", calls=_BACKWARD),
    _latent(
        *("mla_attention", 30, (1, 1), 1.0),
        base="attention",
        base_dims=lambda b, h, q, k, d, v, c: (b, h, h, q, k, (d + v) // 2, c),
    ),
    _latent("mla_attention_backward", 31, (3, 2), 2.0, base="mla_attention"),
    # Earlier generations, for software that is known to run them.  torch only has the last one.
    _attention("flash1_attention", 47, 4.0, 1.0, base="flash2_attention", in_harness=False),
    _attention("flash1_attention_backward", 48, 10.0, 2.0, base="flash2_attention_backward", in_harness=False),
    _attention("flash2_attention", 49, 4.0, 1.0, base="attention", in_harness=False),
    _attention("flash2_attention_backward", 50, 10.0, 2.0, base="attention_backward", in_harness=False),
)


_RECURRENT = ("steps", "batch", "input", "hidden", "gates")  # gates: outputs of the product of one step


def _recurrent(weight: int, args: Args) -> Dims:
    """Sizes of one recurrent layer in one direction: the input, and two weights in a row."""
    steps, into, back = shape_of(args, 0), shape_of(args, weight), shape_of(args, weight + 1)
    if len(steps) != 3 or len(into) != 2 or len(back) != 2:
        return (0,) * len(_RECURRENT)
    return steps[0], steps[1], steps[2], back[1], into[0]


def _layer_of_steps(name: str, passes: int, **more: Any) -> OpKind:
    """A recurrent layer; ``passes``: of the products, one forward and two backward."""
    return OpKind(
        name=name,
        family="recurrent",
        dim_names=_RECURRENT,
        calls=named_calls(name.replace("recurrent", "mkldnn_rnn_layer"), partial(_recurrent, 1)),
        flops=lambda t, n, i, h, g: 2.0 * passes * t * n * g * (i + h),
        elements=lambda t, n, i, h, g: float(passes * (t * (g * h + n * (i + g + 2 * h)) + g * i)),
        units=lambda t, n, i, h, g: float(t),
        bound="compute",
        **more,
    )


_RECURRENTS = (
    _layer_of_steps("recurrent", 1, base="linear", base_dims=lambda t, n, i, h, g: (t * n, g, i + h)),
    _layer_of_steps("recurrent_backward", 2, base="recurrent"),
)
KINDS = (*_MATRICES, *_CONVOLUTIONS, *_ATTENTIONS, *_RECURRENTS)
