"""Matrix products in fp8 and in tf32, of operands that exist already, because quantizing is a separate op.

fp8 is e4m3 times e4m3 with one scale per tensor into bf16.  The kernels want the second operand by columns, so its
transpose is taken where the ordinary product takes it by rows.  Sums are fast in the forward product and exact in those
of gradients, as frameworks for training in fp8 have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from ..plan_error import HarnessError
from . import op_products
from .input_pool import Call, Maker, Pool


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Matrix products of fp32 numbers in the block are rounded to tf32 if that is the dtype, else they are not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def scaled_product(device: torch.device, *, fast: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """``y[m, n] = a[m, k] @ b[k, n]`` in bf16, of fp8 operands of which ``b`` lies by columns."""
    scale = torch.ones((), device=device)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return run


def _linear(pool: Pool, m: int, n: int, k: int) -> Call:
    _check(m, n, k)
    return Call(scaled_product(pool.device, fast=True), lambda: (pool.take(m, k), pool.take(n, k).t()))


def _dgrad(pool: Pool, m: int, n: int, k: int) -> Call:
    _check(m, n, k)
    return Call(scaled_product(pool.device, fast=False), lambda: (pool.take(m, n), pool.take(k, n).t()))


def _wgrad(pool: Pool, m: int, n: int, k: int) -> Call:
    _check(m, n, k)
    return Call(scaled_product(pool.device, fast=False), lambda: (pool.take(n, m), pool.take(k, m).t()))


def _check(*dims: int) -> None:
    if any(dim % 16 for dim in dims):
        raise HarnessError(f"products in fp8 need dims that are multiples of 16, got {', '.join(map(str, dims))}")


_FP8: dict[str, Maker] = {"linear": _linear, "linear_dgrad": _dgrad, "linear_wgrad": _wgrad}
MAKERS: MappingProxyType[str, MappingProxyType[str, Maker]] = MappingProxyType(
    {"fp8": MappingProxyType(_FP8), "tf32": MappingProxyType({kind: op_products.MAKERS[kind] for kind in _FP8})}
)
