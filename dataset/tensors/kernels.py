"""Kernels of calls on tensors, from shapes, and those of their gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from stepsight.dataset.kinds.op import OP_KINDS, Op

_NO_GRADIENT = frozenset({"add", "fill", "random", "sort"})  # forward ops without backward ops


def gradients_of(op: Op, inputs: Collection[str], weights: Collection[str]) -> Iterator[Op]:
    """Kernels of an op's backward: gradients of inputs that need them, and of weights."""
    kind, dims = op.kind, op.dims
    if kind in ("linear", "grouped_linear"):
        if inputs:
            yield Op(f"{kind}_dgrad", dims, op.dtype)
        if weights:
            yield Op(f"{kind}_wgrad", dims, op.dtype)
        if len(weights) > 1:
            yield Op("bias_grad", (dims[-3], dims[-2]), op.dtype)
    elif kind == "batched_matmul":
        batch, m, n, k = dims
        yield Op(kind, (batch, m, k, n), op.dtype)
        yield Op(kind, (batch, k, n, m), op.dtype)
    elif kind == "conv":
        yield Op("conv_backward", (*dims, int(bool(inputs))), op.dtype)
    elif f"{kind}_backward" in OP_KINDS:
        yield Op(f"{kind}_backward", dims, op.dtype)
    elif kind not in _NO_GRADIENT:
        yield Op("elementwise" if kind == "reduce" else kind, dims, op.dtype)


def matrix_product(left: Sequence[int], right: Sequence[int], dtype: str, *, transposed: bool = False) -> Op | None:
    """``left[..., m, k] @ right[..., k, n]``, or ``right[n, k]`` if it is transposed; None if a size is 0."""
    if not left or not right or 0 in (*left, *right):
        return None
    if len(right) == 1:
        right = (right[0], 1)
    rows, inner = math.prod(left[:-1]), left[-1]
    columns = right[-2] if transposed else right[-1]
    if len(right) == 2 or math.prod(right[:-2]) == 1:
        return Op("linear", (rows, columns, inner), dtype)
    batch = max(math.prod(left[:-2]), math.prod(right[:-2]))
    return Op("batched_matmul", (batch, left[-2], columns, inner), dtype)


def attention(q: Sequence[int], k: Sequence[int], dtype: str, *, causal: bool) -> Op | None:
    """Fused attention of queries and keys, ``[batch, heads, length, head_dim]``; of three dims, one head."""
    q, k = ((each[0], 1, *each[1:]) if len(each) == 3 else tuple(each) for each in (q, k))
    if len(q) != 4 or len(k) != 4 or 0 in (*q, *k):
        return None
    return Op("attention", (q[0], q[1], k[1], q[2], k[2], q[3], int(causal)), dtype)


def norm(name: str, shape: Sequence[int], hidden: int, dtype: str) -> Op | None:
    """A norm of rows of ``hidden`` numbers."""
    rows = math.prod(shape) // max(hidden, 1)
    if rows * hidden < 2:
        return None
    return Op("rms_norm" if name == "rms_norm" else "layer_norm", (rows, hidden), dtype)


def rows_of(kind: str, shape: Sequence[int], dtype: str) -> Op | None:
    """An op on the rows of a tensor."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape) // max(columns, 1)
    return Op(kind, (rows, columns), dtype) if rows * columns > 1 else None


def streamed(kind: str, shape: Sequence[int], dtype: str) -> Op | None:
    """An op on all elements of a tensor; None if it is one element."""
    numel = math.prod(shape)
    return Op(kind, (numel,), dtype) if numel > 1 else None
