"""Matrix products and convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stepsight.dataset.kinds.call_dims import Args, Dims, DimsOf, literal_of, named_calls, shape_of
from stepsight.dataset.kinds.kind_table import OpKind

_PRODUCT = ("m", "n", "k")  # y[m, n] = x[m, k] @ w[n, k].T; for gradients the sizes are those of the forward product
_GROUPED = ("groups", *_PRODUCT)  # a product for every group of the rows; m counts the rows of all groups


def _product_flops(m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k


def _product_elements(m: int, n: int, k: int) -> float:
    return float(m * n + m * k + n * k)


def _linear(name: str, code: int, grid: Callable[..., tuple[int, int, int]], **more: Any) -> OpKind:
    return OpKind(
        name=name,
        family="gemm",
        dim_names=_PRODUCT,
        flops=_product_flops,
        elements=_product_elements,
        bound="compute",
        code=code,
        operands=lambda m, n, k: (m * k, n * k, m * n),
        grid=grid,
        aligned=_PRODUCT,
        **more,
    )


def _rows_of_a_group(groups: int, m: int) -> int:
    return -(-m // max(groups, 1))


def _grouped(name: str, code: int, grid: Callable[..., tuple[int, int, int]], base: str, **more: Any) -> OpKind:
    return OpKind(
        name=name,
        family="grouped_gemm",
        dim_names=_GROUPED,
        flops=lambda g, m, n, k: _product_flops(m, n, k),
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
    _linear(
        "linear_dgrad",
        1,
        lambda m, n, k: (1, m, k),
        base="linear",
        base_dims=lambda m, n, k: (m, k, n),
        reads_saved=False,
    ),
    _linear(
        "linear_wgrad",
        2,
        lambda m, n, k: (1, n, k),
        base="linear",
        base_dims=lambda m, n, k: (n, k, m),
        weight_gradient=True,
    ),
    OpKind(
        name="batched_matmul",  # many small products of one shape
        family="batched_gemm",
        dim_names=("batch", *_PRODUCT),
        flops=lambda b, m, n, k: b * _product_flops(m, n, k),
        elements=lambda b, m, n, k: b * _product_elements(m, n, k),
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
        lambda g, m, n, k: (g, _rows_of_a_group(g, m), n),
        "linear",
        base_dims=lambda g, m, n, k: (max(m // max(g, 1), 1), n, k),  # one product after another
    ),
    _grouped(
        "grouped_linear_dgrad",
        40,
        lambda g, m, n, k: (g, _rows_of_a_group(g, m), k),
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
        calls={
            **named_calls("convolution _convolution conv2d conv1d conv3d", _sizes(0)),
            **named_calls("cudnn_convolution miopen_convolution mkldnn_convolution slow_conv2d_forward", _sizes(0)),
            **named_calls("_conv_depthwise2d cudnn_convolution_add_relu cudnn_convolution_relu", _sizes(0)),
            **named_calls(
                "cudnn_convolution_transpose miopen_convolution_transpose conv_transpose1d conv_transpose2d "
                "conv_transpose3d",
                _sizes(0, transposed=True),
            ),
        },
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
        calls={
            **named_calls("convolution_backward", _gradients(_sizes(1, out=0), 10)),
            **named_calls(
                "cudnn_convolution_backward miopen_convolution_backward", _gradients(_sizes(0, out=1, kernel=2))
            ),
            **named_calls("mkldnn_convolution_backward", _gradients(_sizes(0, out=1, kernel=2))),
        },
    ),
)
KINDS = (*_MATRICES, *_CONVOLUTIONS)
