"""Calls on tensors: which dims of their inputs and outputs belong together, and their kernels, from shapes.

A *layout* splits every dim of a call's tensors into factors, outermost first, each with a label and a size.  A label
that is cut into equal parts in all tensors that have it leaves a call that computes its part: inputs without the label
are needed whole, and outputs without it are sums over the parts.  The layout of a gradient follows from that of its
call, so that one rule serves data, tensor and micro-batch parallelism (``tensor_program``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.kinds.op import OP_KINDS, Op

Array = NDArray[Any]
Shape = Sequence[int]
Shapes = Sequence[Shape]
Factors = tuple[tuple[tuple[Any, int], ...], ...]  # label and size of each factor of each dim of a tensor
_NO_GRADIENT = frozenset({"add", "fill", "random", "sort"})  # forward ops without backward ops


def no_ops(reads: Shapes, writes: Shapes) -> list[Op]:
    """Of a call that only views or names tensors."""
    return []


@dataclass(frozen=True)
class TensorCall:
    """One call of a tensor program."""

    op: str  # a key of POINTWISE or LAYOUTS, vjp (gradients of settings["of"]), or another, of which nothing is known
    # reads, writes: names of tensors
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # what the op takes besides
    name: str = ""  # of the node in the file
    phase: int = 0  # index of PHASES
    micro: int = 0  # micro-batch
    stage: int = 0  # pipeline stage
    origin: int = 0  # number of the call of the file that it comes from
    # signatures of its kernels, from the shapes of what it reads and writes
    ops: Callable[[Shapes, Shapes], list[Op]] = no_ops
    known: bool = True  # whether a kind of op is known for it


@dataclass(frozen=True)
class Layout:
    """Factors of the dims of the tensors that a call reads and writes, and the labels that cannot be cut."""

    reads: tuple[Factors, ...]
    writes: tuple[Factors, ...]
    whole: frozenset[Any] = frozenset()


LayoutOf = Callable[[Mapping[str, Any], Shapes, Shapes], Layout]


def _erf(x: Array) -> Array:
    real: Array = np.vectorize(math.erf, otypes=[float])(x.real)
    return real + 1j * x.imag * 2 / math.sqrt(math.pi) * np.exp(-(x.real**2)) if np.iscomplexobj(x) else real


POINTWISE: Mapping[str, Callable[..., Array]] = MappingProxyType(
    {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power, "neg": np.negative,
        "sqrt": np.sqrt, "exp": np.exp, "log": np.log, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "erf": _erf,
        "reciprocal": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "silu": lambda x: x / (1 + np.exp(-x)), "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
        "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "relu": lambda x: x * (x.real > 0), "abs": lambda x: np.where(x.real < 0, -x, x),
        "where": lambda chosen, one, other: np.asarray(np.where(chosen.real != 0, one, other)),
        "cast": lambda x: 1.0 * x, "zeros": lambda x: 0.0 * x, "all_reduce": lambda x: x, "send": lambda x: x,
    }
)  # fmt: skip
UNSAVED = frozenset(
    ["add", "cast", "reshape", "permute", "split", "concat", "index", "expand"]
)  # backward reads shapes
LINEAR = UNSAVED - {"concat"}  # what is still to be added up passes through them


def _aligned(shape: Shape, rank: int, axis: int = -1, factors: Sequence[tuple[Any, int]] = ()) -> Factors:
    """Dims labelled by their place in ``rank`` dims; ``factors`` are those of dim ``axis``."""
    first = rank - len(shape)
    plain = [((first + place, size),) if size > 1 else () for place, size in enumerate(shape)]
    return tuple(tuple(factors) if place == axis else dim for place, dim in enumerate(plain))


def _pointwise(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    rank = max(map(len, (*reads, *writes)))
    sides = [tuple(_aligned(shape, rank) for shape in side) for side in (reads, writes)]
    return Layout(sides[0], sides[1], frozenset(settings.get("axes", ())))


def _product(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    rank, sides = len(writes[0]), []
    for shape, labels, side in zip(reads, ((rank - 2, "k"), ("k", rank - 1)), ("left", "right"), strict=True):
        ordered = labels[::-1] if settings.get(side) else labels
        last = tuple(((label, size),) for label, size in zip(ordered, shape[-2:], strict=True))
        sides.append(_aligned(shape[:-2], rank - 2) + last)
    return Layout(tuple(sides), (_aligned(writes[0], rank),))


def _permute(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    dims = _aligned(reads[0], len(reads[0]))
    return Layout((dims,), (tuple(map(dims.__getitem__, settings["order"])),))


def _reshape(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    """Factors that both shapes have; from where they have none in common, all is whole."""
    sides = (reads[0], writes[0])
    found: list[list[list[tuple[Any, int]]]] = [[[] for _ in shape] for shape in sides]
    at, rest, label = [0, 0], [1, 1], 0
    while True:
        for side, shape in enumerate(sides):
            while rest[side] == 1 and at[side] < len(shape):
                rest[side] = shape[at[side]]
                at[side] += 1
        size = min(rest)
        if size <= 1 or max(rest) % size:
            break
        for side in range(2):
            found[side][at[side] - 1].append((label, size))
            rest[side] //= size
        label += 1
    whole = set()
    for side, shape in enumerate(sides):
        for place in range(at[side] - (rest[side] > 1), len(shape)):
            taken = math.prod(size for _, size in found[side][place])
            found[side][place].append(((side, place), shape[place] // taken))
            whole.add((side, place))
    old, new = (tuple(tuple(dim) for dim in side) for side in found)
    return Layout((old,), (new,), frozenset(whole))


def _split(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    axis, rank = settings["axis"], len(reads[0])
    if len({shape[axis] for shape in writes}) == 1:
        rest = ("rest", writes[0][axis])
        parts = tuple(_aligned(shape, rank, axis, [rest]) for shape in writes)
        return Layout((_aligned(reads[0], rank, axis, [("part", len(writes)), rest]),), parts, frozenset(["part"]))
    parts = tuple(_aligned(shape, rank, axis, [((axis, at), shape[axis])]) for at, shape in enumerate(writes))
    return Layout((_aligned(reads[0], rank),), parts, frozenset([axis, *((axis, at) for at in range(len(writes)))]))


def _inverse(of: LayoutOf) -> LayoutOf:
    """The layout of a call that undoes another."""

    def layout(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
        found = of(settings, writes, reads)
        return Layout(found.writes, found.reads, found.whole)

    return layout


def _index(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    dims, made, left = _aligned(reads[0], len(reads[0])), [], iter(writes[0])
    whole = {place for place, each in enumerate(settings["index"]) if each != slice(None)}
    for place, each in enumerate(settings["index"]):
        if not isinstance(each, int):
            size = next(left)
            made.append(((("made", place), size),) if place in whole else dims[place])
    return Layout((dims,), (tuple(made),), frozenset([*whole, *(("made", place) for place in whole)]))


def _embedding(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    (rows, width), ids = reads[0], _aligned(reads[1], len(reads[1]))
    return Layout((((("v", rows),), (("h", width),)), ids), ((*ids, (("h", width),)),), frozenset("v"))


def _attention(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    (batch, heads, rows, dim), (_, groups, columns, _), last = reads[0], reads[1], reads[2][-1]
    b, of_head, q, s = (("b", batch),), (("g", groups), ("j", heads // groups)), (("q", rows),), (("s", columns),)
    d, e, whole_mask = (("d", dim),), (("e", last),), (b, of_head, q, s)
    mask = [
        tuple(factors if size > 1 else () for size, factors in zip(shape, whole_mask[-len(shape) :], strict=True))
        for shape in reads[3:]
    ]
    keys, values = (b, (("g", groups),), s, d), (b, (("g", groups),), s, e)
    return Layout(((b, of_head, q, d), keys, values, *mask), ((b, of_head, q, e),), frozenset("jqsde"))


def _reduce(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    dims, axes = _aligned(reads[0], len(reads[0])), settings["reduced"]
    kept = [() if place in axes else dim for place, dim in enumerate(dims)]
    if len(writes[0]) < len(kept):
        kept = [dim for place, dim in enumerate(dims) if place not in axes]
    return Layout((dims,), (tuple(kept),), frozenset(() if settings["how"] == "sum" else axes))


def _join(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    """Parts of a dim within each of ``outer`` rows of it become the whole dim."""
    dim, outer, count, rank = settings["dim"], settings["outer"], settings["count"], len(writes[0])
    first, last = ("outer", outer), ("rest", writes[0][dim] // (outer * count))
    whole = _aligned(writes[0], rank, dim, [first, ("part", count), last])
    return Layout((_aligned(reads[0], rank, dim, [first, last]),) * len(reads), (whole,), frozenset(["part"]))


LAYOUTS: Mapping[str, LayoutOf] = MappingProxyType(
    {
        "product": _product, "permute": _permute, "reshape": _reshape, "split": _split, "concat": _inverse(_split),
        "index": _index, "embedding": _embedding, "attention": _attention, "reduce": _reduce, "join": _join,
        "piece": _inverse(_join), "expand": _pointwise, "softmax": _pointwise, "layer_norm": _pointwise,
        "rms_norm": _pointwise, "adamw": _pointwise,
    }
)  # fmt: skip


def layout_of(call: TensorCall, reads: Shapes, writes: Shapes) -> Layout:
    """The layout of a call whose tensors have these shapes; of an unknown op, in which nothing can be cut."""
    if call.op == "vjp":
        of: TensorCall = call.settings["of"]
        saved, wanted = call.settings["saved"], call.settings["wanted"]
        inputs, made = (reads[:saved], reads[saved:]) if saved else (writes, reads)
        found = layout_of(of, inputs, made)
        gradients = tuple(dims for dims, is_wanted in zip(found.reads, wanted, strict=True) if is_wanted)
        return Layout((*(found.reads if saved else ()), *found.writes), gradients, found.whole)
    if call.op in LAYOUTS or call.op in POINTWISE:
        return LAYOUTS.get(call.op, _pointwise)(call.settings, reads, writes)
    labels = itertools.count()
    plain = [tuple(tuple(((next(labels), size),) for size in shape) for shape in side) for side in (reads, writes)]
    return Layout(plain[0], plain[1], frozenset(range(next(labels))))


def gradients_of(op: Op, inputs: Collection[str], weights: Collection[str]) -> list[Op]:
    """Kernels of an op's backward: gradients of inputs that need them, and of weights."""
    kind, dims = op.kind, op.dims
    found: list[tuple[str, tuple[int, ...]]] = []
    if kind in ("linear", "grouped_linear"):
        found = [(f"{kind}_dgrad", dims)] * bool(inputs) + [(f"{kind}_wgrad", dims)] * bool(weights)
        found += [("bias_grad", dims[-3:-1])] * (len(weights) > 1)
    elif kind == "batched_matmul":
        batch, m, n, k = dims
        found = [(kind, (batch, m, k, n)), (kind, (batch, k, n, m))]
    elif kind == "conv":
        found = [("conv_backward", (*dims, int(bool(inputs))))]
    elif f"{kind}_backward" in OP_KINDS:
        found = [(f"{kind}_backward", dims)]
    elif kind not in _NO_GRADIENT:
        found = [("elementwise" if kind == "reduce" else kind, dims)]
    return [Op(*each, op.dtype) for each in found]


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


def rows_of(kind: str, shape: Sequence[int], dtype: str, columns: int = 0) -> Op | None:
    """An op on the rows of a tensor, or on rows of so many numbers."""
    columns = columns or (shape[-1] if shape else 1)
    rows = math.prod(shape) // max(columns, 1)
    return Op(kind, (rows, columns), dtype) if rows * columns > 1 else None


def streamed(kind: str, shape: Sequence[int], dtype: str) -> Op | None:
    """An op on all elements of a tensor; None if it is one element."""
    numel = math.prod(shape)
    return Op(kind, (numel,), dtype) if numel > 1 else None
