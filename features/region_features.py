"""Numbers from the framework ops of a region, for models that do not know what is fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.harness.regions.region_record import FrameworkOp, Region

Array = NDArray[np.float64]

_SLOW = {
    "truediv": 4, "exp": 10, "log": 12, "log1p": 14, "expm1": 12, "tanh": 16, "sigmoid": 12, "erf": 14, "sin": 16,
    "cos": 16, "sqrt": 5, "rsqrt": 6, "reciprocal": 4, "pow": 24, "libdevice_tan": 20, "round": 2,
}  # fmt: skip
ATEN_OPS = (
    "placeholder", "add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "where", "exp", "log", "log1p",
    "expm1", "tanh", "sigmoid", "erf", "sin", "cos", "sqrt", "rsqrt", "pow", "reciprocal", "clamp_min", "clamp_max",
    "sum", "mean", "amax", "amin", "var_mean", "prepare_softmax_online", "view", "permute", "expand", "unsqueeze",
    "slice", "clone", "cat", "embedding", "index", "gather", "full", "iota", "convert_element_type", "getitem",
    "compare", "other",
)  # fmt: skip
_ATEN = {name: number for number, name in enumerate(ATEN_OPS)}
_COMPARED = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_not", "bitwise_and", "bitwise_not"}
_VIEWS = {
    "reshape": "view",
    "squeeze": "view",
    "_to_copy": "convert_element_type",
    "iota": "iota",
    "scalar_tensor": "full",
}
_MOVES_NOTHING = {
    "placeholder", "view", "permute", "expand", "unsqueeze", "slice", "getitem", "full", "iota", "select", "squeeze",
}  # fmt: skip

BYTES_PER_S, NUMBERS_PER_S, START_S = 4e10, 6e10, 1e-7  # of one core, for the scale only


@dataclass(frozen=True)
class OpNumbers:
    """Framework ops as arrays.

    Attributes:
        x: ``(n, f)``.
        parts: Seconds of moving, of computing and of starting, ``(n, 3)``.
        key: What kind each is, ``(n,)``.
    """

    x: Array
    parts: Array
    key: NDArray[np.int64]


def op_numbers(region: Region) -> OpNumbers:
    """Arrays of the ops of a region before fusion."""
    ops = region.ops
    return OpNumbers(
        np.array([_op_row(ops, number) for number in range(len(ops))]),
        np.array([_op_parts(ops, number) for number in range(len(ops))]),
        np.array([_aten(op.name) for op in ops], dtype=np.int64),
    )


def _log(value: float) -> float:
    return float(np.log1p(value))


def _aten(name: str) -> int:
    word = name.split(".")[1] if "." in name else name
    word = "compare" if word in _COMPARED else _VIEWS.get(word, word)
    return _ATEN.get(word, _ATEN["other"])


def _numel(op: FrameworkOp) -> int:
    return int(np.prod(op.shape, dtype=np.float64)) if op.shape else 1


def _op_row(ops: Sequence[FrameworkOp], number: int) -> list[float]:
    op = ops[number]
    kinds = [0.0] * len(ATEN_OPS)
    kinds[_aten(op.name)] = 1.0
    read = sum(_numel(ops[each]) * ops[each].element_bytes for each in op.inputs)
    largest = max((_numel(ops[each]) for each in op.inputs), default=0)
    made = _numel(op)
    last = op.shape[-1] if op.shape else 1
    return [
        *kinds, _log(made), _log(largest), _log(read), _log(made * op.element_bytes), _log(last),
        _log(largest / max(made, 1)), float(op.element_bytes), float(op.is_output), float(len(op.inputs)),
        float(len(op.shape)),
    ]  # fmt: skip


def _op_parts(ops: Sequence[FrameworkOp], number: int) -> list[float]:
    op = ops[number]
    if ATEN_OPS[_aten(op.name)] in _MOVES_NOTHING:
        return [0.0, 0.0, START_S / 10]
    read = [ops[each] for each in op.inputs]
    moved = _numel(op) * op.element_bytes + sum(_numel(each) * each.element_bytes for each in read)
    numel = max([_numel(op), *(_numel(each) for each in read)])
    cost = 1 + _SLOW.get(ATEN_OPS[_aten(op.name)], 0)
    return [moved / BYTES_PER_S, numel * cost / NUMBERS_PER_S, START_S]
