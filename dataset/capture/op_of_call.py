"""The op of a captured framework call: kind, dims and type, from the same table as for traces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stepsight.dataset.kinds import OP_KINDS
from stepsight.dataset.kinds.call_dims import count
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.readers.classify import DTYPES, Scope, call_table, intern_op

_FILLS = frozenset(
    f"aten::{name}"
    for name in (
        "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full",
        "scalar_tensor", "eye",
    )
)  # fmt: skip
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::clone")
_LISTS = ("aten::_foreach_copy_", "aten::_chunk_cat", "fsdp::chunk_cat")  # whose first and last tensors tell types
_CAST = {"bf16": "bf16", "fp16": "fp16"}


def op_of_call(signature: Sequence[Any], scope: Scope) -> tuple[Op | None, bool]:
    """Find the op of a call.

    Args:
        signature: Name, dims, types, strides, literals, and dims, type and number of the outputs (see
            ``harness.capturing.signatures``).
        scope: The autograd evaluation that encloses it.

    Returns:
        The op, None if it moves at most one element or is no work; and whether its kind is known.
    """
    name, dims, types, strides, literals, made = signature
    args: Mapping[str, Any] = MappingProxyType(
        {"Input Dims": dims, "Input type": types, "Input Strides": strides, "Concrete Inputs": literals}
    )
    read = [kind.removeprefix("TensorList ") for kind in types if kind != "Scalar"]
    out_numel, out_type = (math.prod(made[0]), made[1]) if made else (0, "float")
    dtype, weight = DTYPES[read[0] if read else out_type]
    if name in _FILLS:
        return _op("fill", (out_numel,), DTYPES[out_type]), True
    if name in _COPIES and len(read) > 0 and made:
        cast = _cast(read[-1], out_type)
        if cast:
            return _op("cast", (out_numel,), (cast, 1.0)), True
    if name in _LISTS and len(read) > 1 and (cast := _cast(read[0], read[-1])):
        return _op("cast", (count(dims[0]),), (cast, 1.0)), True
    known = call_table().get(name)
    found = None if known is None else known(args, scope)
    if known is not None and found is None:
        return None, True
    if found is None or not _is_whole(found):
        largest = max([*(count(shape) for shape in dims if shape), out_numel])
        return _op("elementwise", (largest,), (dtype, weight)), False
    kind, sizes = found
    if len(sizes) == 1:
        sizes = (max(sizes[0], out_numel if made and made[2] == 1 else 0),)
    return _op(kind, tuple(sizes), (dtype, weight)), True


def _is_whole(found: tuple[str, Sequence[int]]) -> bool:
    kind, dims = found
    return len(dims) == len(OP_KINDS[kind].dim_names) and max(dims) > 0


def _op(kind: str, dims: tuple[int, ...], typed: tuple[str, float]) -> Op | None:
    dtype, weight = typed
    if len(dims) == 1:
        if dims[0] <= 1:
            return None
        dims = (int(dims[0] * weight),)
    return intern_op(kind, dims, dtype)


def _cast(source: str, target: str) -> str:
    """The 16-bit type of a conversion from or to fp32; empty for other conversions."""
    kinds = {DTYPES[source][0], DTYPES[target][0]}
    narrow = kinds & _CAST.keys()
    return narrow.pop() if kinds - narrow == {"fp32"} and narrow else ""
