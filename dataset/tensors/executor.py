"""The reference executor: computes a step on all of its ranks with numpy, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.tensors.calls import POINTWISE, Array, Shape, Shapes, TensorCall
from stepsight.dataset.tensors.ranks import Spec, TensorStep

_STEP = 1e-30  # along the imaginary axis: a derivative without cancellation
Place = tuple[int, ...]  # of a rank on the axes


def run(program: TensorStep, values: Mapping[str, Array]) -> dict[str, Array]:
    """Compute the outputs from whole inputs and parameters.

    Raises:
        CaptureError: If a value is missing, or an op is not known.
    """
    given = (*program.inputs, *program.parameters)
    missing = {*given} - {*values}
    if missing:
        raise CaptureError(f"values must be given of all inputs and parameters, got none of {sorted(missing)[:5]}")
    places = list(itertools.product(*(range(size) for size in program.axes.values())))
    axes = {name: number for number, name in enumerate(program.axes)}
    held: dict[Place, dict[str, Array]] = {place: {} for place in places}
    home, everywhere = dict[str, int](), program.everywhere
    for name, value in {**program.constants, **{name: values[name] for name in given}}.items():
        for place in places:
            part = np.asarray(value)
            for axis, spec in program.laid.get(name, ()):
                if isinstance(spec, tuple):
                    part = cut(part, spec, program.axes[axis], place[axes[axis]])
            held[place][name] = part
    for call in program.calls:
        read = {*call.reads} - everywhere
        away = [name for name in read if home.setdefault(name, call.stage) != call.stage]
        assert not away, f"{call.op} of stage {call.stage} reads {away} of other stages"
        home |= dict.fromkeys(call.writes, call.settings.get("to", call.stage))
        for place in places:
            _call(program, call, held, place)
    return {name: _assembled(program, held, axes, (name, tensor)) for name, tensor in program.outputs.items()}


def _call(program: TensorStep, call: TensorCall, held: Mapping[Place, dict[str, Array]], place: Place) -> None:
    """Compute a call on one rank."""
    made = [program.shapes[name] for name in call.writes]
    axis = call.settings.get("axis") if call.op in ("all_reduce", "join", "piece") else None
    if axis:
        number, count = list(program.axes).index(axis), program.axes[axis]
        ranks = [(*place[:number], at, *place[number + 1 :]) for at in range(count)]
        group, spec = (
            [held[rank][call.reads[0]] for rank in ranks],
            (call.settings.get("dim", 0), call.settings.get("outer", 1)),
        )
        if call.op == "piece":
            outputs = [cut(held[place][call.reads[0]], spec, count, place[number])]
        else:
            outputs = [joined(group, spec) if call.op == "join" else np.sum(group, axis=0)]
    else:
        outputs = compute(call, [held[place][name] for name in call.reads], made)
    for name, value, shape in zip(call.writes, outputs, made, strict=True):
        assert value.shape == tuple(shape), f"{call.op} {name}: {value.shape} is not {shape}"
        held[place][name] = value


def _assembled(
    program: TensorStep,
    held: Mapping[Place, Mapping[str, Array]],
    axes: Mapping[str, int],
    names: tuple[str, str],
) -> Array:
    """The whole of an output whose parts the ranks hold."""

    def of(place: dict[str, int], left: Sequence[tuple[str, Spec]]) -> Array:
        if not left:
            return held[tuple(place.get(axis, 0) for axis in axes)][names[1]]
        axis, spec = left[0]
        if spec is None:
            return of(place, left[1:])
        assert isinstance(spec, tuple)
        return joined([of({**place, axis: at}, left[1:]) for at in range(program.axes[axis])], spec)

    return of({}, program.laid.get(names[0], ()))


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
