"""Matrix products: of a linear and for its gradients, of groups of rows, and many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepsight.dataset.kinds.op_kind import OpKind

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


KINDS = (
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
