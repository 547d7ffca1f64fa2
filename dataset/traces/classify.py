"""Names and shapes of framework calls to op signatures.

One table from a call's name to what it is, most of it from the records of kinds (``OpKind.calls``).  A call that is in
the table stands for everything it calls; a call that is not stands aside for classified calls within it, and counts as
``elementwise`` if there are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.files import preset
from stepsight.dataset.kinds import kinds_version
from stepsight.dataset.kinds.kind_table import Args
from stepsight.dataset.kinds.op import OP_KINDS, Op
from stepsight.dataset.kinds.op_kinds import all_shapes, count, largest, literal_of, shape_of

Signature = tuple[str, tuple[int, ...]]  # kind, dims

NAMES: Mapping[str, Any] = preset("trace_names.toml")
DTYPES = {name: (str(dtype), float(weight)) for name, (dtype, weight) in NAMES["types"].items()}  # of the profiler
ELEMENT_BYTES: Mapping[str, int] = NAMES["element_bytes"]  # by the profiler's names, and those of NCCL's records


@dataclass(slots=True)
class Scope:
    """What encloses a call."""

    backward: str = ""  # name of the autograd node being evaluated, "" in forward
    forward_dims: tuple[int, ...] = ()  # ``(m, n, k)`` of the forward product that this backward belongs to, if known
    products: int = 0  # matrix products seen so far in this backward


def _product(first: int) -> Callable[[Args, Scope], Signature]:
    """A matrix product whose left operand is input ``first``: forward, gradient of the input or of the weight."""

    def classify_product(args: Args, scope: Scope) -> Signature:
        left, right = shape_of(args, first), shape_of(args, first + 1)
        if len(left) < 2 or len(right) < 2:
            return "linear", (0, 0, 0)
        batch = math.prod(left[:-2])
        rows, inner, columns = left[-2], left[-1], right[-1]
        if not scope.backward:
            return "linear", (batch * rows, columns, inner)
        scope.products += 1
        if _is_weight_gradient(args, scope, first, (rows, inner, columns)):
            # (n, R) x (R, k); a weight stored as (k, n) swaps the outer two
            out, into = rows, columns
            if len(scope.forward_dims) == 3 and scope.forward_dims[1:] == (columns, rows) and rows != columns:
                out, into = columns, rows
            return "linear_wgrad", (batch * inner, out, into)
        return "linear_dgrad", (batch * rows, inner, columns)

    return classify_product


def _grouped_product(args: Args, scope: Scope) -> Signature:
    """A product of each group of rows with its own matrix; of two matrices it is the gradient of the weights."""
    left, right, ends = (shape_of(args, index) for index in range(3))
    if len(left) == len(right) == 2 and len(ends) == 1:
        return "grouped_linear_wgrad", (ends[0], left[1], left[0], right[1])
    if len(left) != 2 or len(right) != 3:
        return "grouped_linear", (0, 0, 0, 0)
    groups, inner, columns = right
    if scope.backward:
        return "grouped_linear_dgrad", (groups, left[0], inner, columns)
    return "grouped_linear", (groups, left[0], columns, inner)


def _is_weight_gradient(args: Args, scope: Scope, first: int, sizes: tuple[int, int, int]) -> bool:
    rows, inner, columns = sizes
    if len(scope.forward_dims) == 3:
        m, n, k = scope.forward_dims
        is_weight, is_input = inner == m and {rows, columns} == {n, k}, (rows, inner, columns) == (m, n, k)
        if is_weight != is_input:
            return is_weight
    strides = args.get("Input Strides") or []
    left = strides[first] if first < len(strides) else []
    if len(left) >= 2 and rows > 1 and inner > 1:
        return bool(left[-2] == 1)
    return scope.products == 2


def _sum(args: Args, scope: Scope) -> Signature:
    """In backward, a sum over all dimensions but the last is the gradient of a bias."""
    shape, over = shape_of(args, 0), literal_of(args, 1)
    if scope.backward and len(shape) >= 2 and over == str(list(range(len(shape) - 1))):
        return "bias_grad", (math.prod(shape[:-1]), shape[-1])
    return "reduce", (count(shape),)


Classify = Callable[[Args, Scope], Signature | None]

# Calls that are one kind or another, as their arguments and their scope say; all others are in the kinds' records.
_BY_SCOPE: Mapping[str, Classify] = MappingProxyType(
    {
        "aten::mm": _product(0),
        "aten::bmm": _product(0),
        "aten::addmm": _product(1),
        "aten::baddbmm": _product(1),
        "aten::_grouped_mm": _grouped_product,
        "aten::sum": _sum,
    }
)


_JOINS = ("aten::cat", "aten::stack")


def depends_on_scope(name: str) -> bool:
    """Whether what a call is depends on what encloses it or is before it."""
    return name in _BY_SCOPE or name in _JOINS


def call_table() -> Mapping[str, Classify]:
    """What each known call is, by its name."""
    return _call_table(kinds_version())


@cached(4)
def _call_table(version: tuple[int, int]) -> Mapping[str, Classify]:
    def as_kind(kind: str, dims_of: Callable[[Args], tuple[int, ...] | None]) -> Classify:
        return lambda args, scope: None if (dims := dims_of(args)) is None else (kind, dims)

    table = {name: as_kind(kind.name, dims) for kind in OP_KINDS.values() for name, dims in kind.calls.items()}
    return MappingProxyType({**table, **_BY_SCOPE})


@cached(100_000)
def intern_op(kind: str, dims: tuple[int, ...], dtype: str) -> Op:
    """The op of that signature; equal signatures share one object."""
    return Op(kind, dims, dtype)


def classify(name: str, args: Args, scope: Scope, before: str = "fp32") -> Op | None:
    """Signature of a call that is in ``call_table``; None if it moves at most one element or is no work.

    ``before``: dtype of the op before it.  Traces do not tell that of a list of tensors; those that are joined come
    from just there.
    """
    signature = call_table()[name](args, scope)
    return None if signature is None else _weigh(signature, args, before if name in _JOINS else "fp32")


def classify_unknown(args: Args) -> Op | None:
    """A call of no known kind: ``elementwise`` over its largest input, or None if that is a scalar."""
    return _weigh(("elementwise", largest(args)), args)


def _weigh(signature: Signature, args: Args, of_list: str = "fp32") -> Op | None:
    kind, dims = signature
    typed = next((name for name in args.get("Input type") or () if name in DTYPES or name == "TensorList"), "")
    dtype, weight = DTYPES.get(typed, (of_list, 1.0))
    if len(dims) == 1:
        if dims[0] <= 1 and all_shapes(args):
            return None
        dims = (int(dims[0] * weight),)
    return intern_op(kind, dims, dtype)


def parse_annotation(name: str) -> dict[str, str]:
    """``stepsight::op kind=add dims=8`` to its keys and values."""
    return dict(part.split("=", 1) for part in name.split(" ")[1:] if "=" in part)


def annotated_op(values: Mapping[str, str]) -> Op:
    """The op that ``stepsight::op kind=… dims=4x8 dtype=…`` names."""
    kind, dims = values["kind"], tuple(int(part) for part in values["dims"].split("x"))
    if kind not in OP_KINDS:
        raise ValueError(f"op kind must be one of {', '.join(OP_KINDS)}, got {kind!r:.80}")
    return intern_op(kind, dims, values.get("dtype", "fp32"))
