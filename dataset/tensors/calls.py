"""Calls on tensors: which dims of their inputs and outputs belong together, and what they compute (numpy, float64).

A *layout* splits every dim of a call's tensors into factors, outermost first, each with a label and a size.  A label
that is cut into equal parts in all tensors that have it leaves a call that computes its part: inputs without the label
are needed whole, and outputs without it are sums over the parts.  The layout of a gradient follows from that of its
call, so that one rule serves data, tensor and micro-batch parallelism (``tensor_program``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.kinds.op import Op

Array = NDArray[Any]
Shape = Sequence[int]
Shapes = Sequence[Shape]
Factors = tuple[tuple[tuple[Any, int], ...], ...]  # label and size of each factor of each dim of a tensor
_STEP = 1e-30  # along the imaginary axis: a derivative without cancellation


@dataclass(frozen=True)
class TensorCall:
    """One call of a tensor program.

    Attributes:
        op: A key of ``POINTWISE`` or ``LAYOUTS``, ``vjp`` (gradients of ``settings["of"]``), or another, of which
            nothing is known.
        reads, writes: Names of tensors.
        settings: What the op takes besides.
        name: Of the node in the file.
        phase: Index of ``PHASES``.
        micro: Micro-batch.
        stage: Pipeline stage.
        origin: Number of the call of the file that it comes from.
        ops: Signatures of its kernels, from the shapes of what it reads and writes.
        known: Whether a kind of op is known for it.
    """

    op: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    phase: int = 0
    micro: int = 0
    stage: int = 0
    origin: int = 0
    ops: Callable[[Shapes, Shapes], list[Op]] = lambda reads, writes: []
    known: bool = True


@dataclass(frozen=True)
class Layout:
    """Factors of the dims of the tensors that a call reads and writes, and the labels that cannot be cut."""

    reads: tuple[Factors, ...]
    writes: tuple[Factors, ...]
    whole: frozenset[Any] = frozenset()


def _erf(x: Array) -> Array:
    real: Array = np.vectorize(math.erf, otypes=[float])(x.real)
    return real + 1j * x.imag * 2 / math.sqrt(math.pi) * np.exp(-(x.real**2)) if np.iscomplexobj(x) else real


def _where(chosen: Array, one: Array, other: Array) -> Array:
    return np.where(chosen.real != 0, one, other)


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


POINTWISE: Mapping[str, Callable[..., Array]] = MappingProxyType(
    {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power, "neg": np.negative,
        "sqrt": np.sqrt, "exp": np.exp, "log": np.log, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "erf": _erf,
        "reciprocal": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "silu": lambda x: x / (1 + np.exp(-x)), "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
        "gelu_tanh": _gelu_tanh, "relu": lambda x: x * (x.real > 0), "abs": lambda x: np.where(x.real < 0, -x, x),
        "where": _where, "cast": lambda x: 1.0 * x, "zeros": lambda x: 0.0 * x,
        "all_reduce": lambda x: x, "send": lambda x: x,
    }
)  # fmt: skip
UNSAVED = frozenset(
    ["add", "cast", "reshape", "permute", "split", "concat", "index", "expand"]
)  # backward reads shapes
LINEAR = UNSAVED - {"concat"}  # what is still to be added up passes through them


def _aligned(shape: Shape, rank: int) -> Factors:
    first = rank - len(shape)
    return tuple(((first + place, size),) if size > 1 else () for place, size in enumerate(shape))


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
    return Layout((dims,), (tuple(dims[place] for place in settings["order"]),))


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
    equal = len({shape[axis] for shape in writes}) == 1

    def dims(shape: Shape, of_axis: tuple[tuple[Any, int], ...]) -> Factors:
        return tuple(of_axis if place == axis else dim for place, dim in enumerate(_aligned(shape, rank)))

    if equal:
        rest = ("rest", writes[0][axis])
        parts = tuple(dims(shape, (rest,)) for shape in writes)
        return Layout((dims(reads[0], (("part", len(writes)), rest)),), parts, frozenset(["part"]))
    parts = tuple(dims(shape, (((axis, number), shape[axis]),)) for number, shape in enumerate(writes))
    whole = frozenset([axis, *((axis, number) for number in range(len(writes)))])
    return Layout((_aligned(reads[0], rank),), parts, whole)


def _concat(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    found = _split(settings, writes, reads)
    return Layout(found.writes, found.reads, found.whole)


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
    return Layout(((((("v"), rows),), (("h", width),)), ids), ((*ids, (("h", width),)),), frozenset("v"))


def _attention(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    (batch, heads, rows, dim), (_, groups, columns, _), last = reads[0], reads[1], reads[2][-1]
    b, of_head, q, s = (("b", batch),), (("g", groups), ("j", heads // groups)), (("q", rows),), (("s", columns),)
    keys = tuple((b, (("g", groups),), s, ((label, size),)) for label, size in (("d", dim), ("e", last)))
    whole_mask = (b, of_head, q, s)
    mask = [
        tuple(factors if size > 1 else () for size, factors in zip(shape, whole_mask[-len(shape) :], strict=True))
        for shape in reads[3:]
    ]
    asked = (b, of_head, q, (("d", dim),))
    return Layout((asked, *keys, *mask), ((b, of_head, q, (("e", last),)),), frozenset("jqsde"))


def _reduce(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    dims, axes = _aligned(reads[0], len(reads[0])), settings["reduced"]
    kept = [() if place in axes else dim for place, dim in enumerate(dims)]
    if len(writes[0]) < len(kept):
        kept = [dim for place, dim in enumerate(dims) if place not in axes]
    return Layout((dims,), (tuple(kept),), frozenset(() if settings["how"] == "sum" else axes))


def _join(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    """Parts of a dim within each of ``outer`` rows of it become the whole dim."""
    dim, outer, count = settings["dim"], settings["outer"], settings["count"]
    rest = writes[0][dim] // (outer * count)
    sides = []
    for shape, factors in (
        (reads[0], (("outer", outer), ("rest", rest))),
        (writes[0], (("outer", outer), ("part", count), ("rest", rest))),
    ):
        sides.append(tuple(factors if place == dim else each for place, each in enumerate(_aligned(shape, len(shape)))))
    return Layout((sides[0],) * len(reads), (sides[1],), frozenset(["part"]))


def _piece(settings: Mapping[str, Any], reads: Shapes, writes: Shapes) -> Layout:
    found = _join(settings, writes, reads)
    return Layout(found.writes, found.reads, found.whole)


LAYOUTS: Mapping[str, Callable[[Mapping[str, Any], Shapes, Shapes], Layout]] = MappingProxyType(
    {
        "product": _product, "permute": _permute, "reshape": _reshape, "split": _split, "concat": _concat,
        "index": _index, "embedding": _embedding, "attention": _attention, "reduce": _reduce, "join": _join,
        "piece": _piece, "expand": _pointwise, "softmax": _pointwise, "layer_norm": _pointwise,
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
    sides = [
        tuple(tuple(((side, number, place, size), size) for place, size in enumerate(shape)) for number, shape in each)
        for side, each in enumerate((enumerate(reads), enumerate(writes)))
    ]
    plain = [tuple(tuple((factor,) for factor in dims) for dims in side) for side in sides]
    return Layout(plain[0], plain[1], frozenset(label for side in sides for dims in side for label, _ in dims))


def cut(value: Array, spec: tuple[int, int], count: int, at: int) -> Array:
    """Part ``at`` of ``count`` of a dim within each of ``outer`` rows of it; ``spec``: dim and outer."""
    dim, outer = spec
    shape = (*value.shape[:dim], outer, count, -1, *value.shape[dim + 1 :])
    part: Array = value.reshape(shape).take(at, axis=dim + 1)
    return part.reshape(*value.shape[:dim], -1, *value.shape[dim + 1 :])


def joined(parts: Sequence[Array], spec: tuple[int, int]) -> Array:
    """The whole of which ``cut`` made the parts."""
    dim, outer = spec
    first = parts[0].shape
    rows = [part.reshape(*first[:dim], outer, -1, *first[dim + 1 :]) for part in parts]
    return np.stack(rows, axis=dim + 1).reshape(*first[:dim], -1, *first[dim + 1 :])


def compute(call: TensorCall, values: Sequence[Array], made: Shapes) -> list[Array]:
    """What a call writes, of the shapes ``made``; raises ``CaptureError`` if it is not known."""
    settings = call.settings
    if call.op == "vjp":
        of, saved = settings["of"], settings["saved"]
        shapes = [value.shape for value in values[:saved]] if saved else made
        every = _gradients(of, values[:saved], values[saved:], shapes)
        return [each for each, wanted in zip(every, settings["wanted"], strict=True) if wanted]
    if call.op in POINTWISE:
        return [np.asarray(POINTWISE[call.op](*values))]
    if call.op == "adamw":  # the first step: both moments begin at 0
        weight, gradient = values
        return [weight - 1e-3 * (gradient / (np.abs(gradient) + 1e-8) + 0.01 * weight)]
    if call.op == "product":
        left, right = (
            _turned(value, settings.get(side)) for value, side in zip(values, ("left", "right"), strict=True)
        )
        return [left @ right]
    if call.op == "split":
        sizes = [shape[settings["axis"]] for shape in made]
        return np.split(values[0], np.cumsum(sizes)[:-1], axis=settings["axis"])
    if call.op in ("softmax", "layer_norm", "rms_norm"):
        return [_normed(call, values)[0]]
    if call.op == "attention":
        return [_attended(settings, values)[0]]
    if call.op == "reduce":
        kept = {"axis": tuple(settings["reduced"])}
        return [np.asarray(getattr(np, settings["how"])(values[0], **kept)).reshape(made[0])]
    plain: dict[str, Callable[[], Array]] = {
        "reshape": lambda: values[0].reshape(made[0]),
        "permute": lambda: values[0].transpose(settings["order"]),
        "concat": lambda: np.concatenate(values, axis=settings["axis"]),
        "index": lambda: values[0][tuple(settings["index"])],
        "expand": lambda: np.broadcast_to(values[0], made[0]),
        "embedding": lambda: values[0][values[1].astype(np.int64)],
        "join": lambda: joined(values, (settings["dim"], settings["outer"])),
        "piece": lambda: cut(values[0], (settings["dim"], settings["outer"]), settings["count"], settings["at"]),
    }
    if call.op not in plain:
        raise CaptureError(f"the reference executor must know every op, got {call.op!r:.80} ({call.name!r:.80})")
    return [plain[call.op]()]


def _turned(value: Array, is_turned: Any) -> Array:
    return value.swapaxes(-1, -2) if is_turned else value


def _summed(value: Array, shape: Shape) -> Array:
    """The sum over the dims in which a tensor of a shape was broadcast."""
    kept: Array = value.sum(axis=tuple(range(value.ndim - len(shape))))
    kept = kept.sum(axis=tuple(place for place, size in enumerate(shape) if size == 1), keepdims=True)
    return kept.reshape(shape)


def _normed(call: TensorCall, values: Sequence[Array]) -> tuple[Array, Array, Array]:
    """A softmax or norm; its part without weights, and what that was divided by."""
    x, axes = values[0], tuple(call.settings["axes"])
    if call.op == "softmax":
        risen = np.exp(x - x.max(axis=axes, keepdims=True))
        return risen / risen.sum(axis=axes, keepdims=True), risen, x
    centred = x - x.mean(axis=axes, keepdims=True) if call.op == "layer_norm" else x
    scale = np.sqrt((centred**2).mean(axis=axes, keepdims=True) + call.settings["epsilon"])
    plain = centred / scale
    out = plain * values[1] if len(values) > 1 else plain
    return out + values[2] if len(values) > 2 else out, plain, scale


def _attended(settings: Mapping[str, Any], values: Sequence[Array]) -> tuple[Array, Array, Array, Array, float]:
    """Attention; its weights, keys and values of every head, and the scale."""
    q, k, v = values[:3]
    k, v = (np.repeat(each, q.shape[1] // each.shape[1], axis=1) for each in (k, v))
    scale = settings.get("scale") or 1 / math.sqrt(q.shape[-1])
    scores = scale * q @ k.swapaxes(-1, -2)
    for mask in values[3:]:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if settings.get("causal"):
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ v, weights, k, v, scale


def _gradients(call: TensorCall, values: Sequence[Array], given: Sequence[Array], shapes: Shapes) -> list[Array]:
    """Gradients of all that a call reads, from those of what it writes; ``shapes``: of what it reads."""
    dy = given[0]
    if call.op in ("add", "cast"):
        return [_summed(dy, shape) for shape in shapes]
    if call.op in POINTWISE:
        plain: list[Array] = [value.astype(complex) for value in values]
        found = []
        for place, value in enumerate(plain):
            moved = POINTWISE[call.op](*plain[:place], value + 1j * _STEP, *plain[place + 1 :])
            found.append(_summed(dy * moved.imag / _STEP, value.shape))
        return found
    if call.op == "product":
        turned = [bool(call.settings.get(side)) for side in ("left", "right")]
        left, right = (_turned(value, swap) for value, swap in zip(values, turned, strict=True))
        pair = (dy @ right.swapaxes(-1, -2), left.swapaxes(-1, -2) @ dy)
        return [_summed(_turned(each, t), shape) for each, t, shape in zip(pair, turned, shapes, strict=True)]
    if call.op in ("softmax", "layer_norm", "rms_norm"):
        return _normed_gradients(call, values, dy)
    if call.op == "attention":
        _, weights, k, v, scale = _attended(call.settings, values)
        raised = dy @ v.swapaxes(-1, -2)
        scores = scale * weights * (raised - (raised * weights).sum(axis=-1, keepdims=True))
        pair = (scores.swapaxes(-1, -2) @ values[0], weights.swapaxes(-1, -2) @ dy)
        heads = [
            each.reshape(*shape[:2], -1, *shape[2:]).sum(axis=2) for each, shape in zip(pair, shapes[1:], strict=False)
        ]
        return [scores @ k, *heads, *(np.zeros(shape) for shape in shapes[3:])]
    if call.op == "reduce":
        kept = [1 if place in call.settings["reduced"] else size for place, size in enumerate(shapes[0])]
        part = math.prod(kept) / math.prod(shapes[0]) if call.settings["how"] == "mean" else 1.0
        return [np.broadcast_to(part * dy.reshape(kept), shapes[0])]
    return _moved_gradients(call, values, given, shapes)


def _normed_gradients(call: TensorCall, values: Sequence[Array], dy: Array) -> list[Array]:
    out, plain, scale = _normed(call, values)
    axes = tuple(call.settings["axes"])
    if call.op == "softmax":
        return [out * (dy - (dy * out).sum(axis=axes, keepdims=True))]
    inner = dy * values[1] if len(values) > 1 else dy
    inner_mean = inner.mean(axis=axes, keepdims=True) if call.op == "layer_norm" else 0.0
    dx = (inner - inner_mean - plain * (inner * plain).mean(axis=axes, keepdims=True)) / scale
    return [dx, *(_summed(each, value.shape) for each, value in zip((dy * plain, dy), values[1:], strict=False))]


def _moved_gradients(call: TensorCall, values: Sequence[Array], given: Sequence[Array], shapes: Shapes) -> list[Array]:
    """Gradients of a call that only moves elements: where each went to is found by moving their numbers."""
    sizes = [math.prod(shape) for shape in shapes]
    first = np.cumsum([0, *sizes])
    numbers: list[Array] = [np.arange(a, a + n).reshape(s) for a, n, s in zip(first, sizes, shapes, strict=False)]
    if call.op == "embedding":
        numbers[1] = values[1]
    moved = compute(call, numbers, [each.shape for each in given])
    where = np.concatenate([each.ravel() for each in moved]).astype(np.int64)
    total = np.bincount(where, np.concatenate([each.ravel() for each in given]), minlength=int(first[-1]))
    return [total[a : a + n].reshape(s) for a, n, s in zip(first, sizes, shapes, strict=False)]
