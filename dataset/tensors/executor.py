"""The reference executor: computes a step on all of its ranks with numpy, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.tensors.calls import POINTWISE, Array, Shape, Shapes, TensorCall
from stepsight.dataset.tensors.ranks import Spec, TensorStep
from stepsight.dataset.tensors.readers import named

_STEP = 1e-30  # along the imaginary axis: a derivative without cancellation
_NORMS = ("softmax", "layer_norm", "rms_norm")


def run(program: TensorStep, values: Mapping[str, Any]) -> dict[str, Array]:
    """Compute the outputs from whole inputs and parameters; a tensor of all ranks has their axes as leading dims."""
    sizes, home = tuple(program.axes.values()), dict[str, int]()
    whole = [(size, None) for size in sizes]
    held = {
        name: _spread(value, [(program.axes[axis], spec) for axis, spec in program.laid.get(name, ())] or whole)
        for name, value in {**program.constants, **_checked(program, values)}.items()
    }
    for call in program.calls:
        away = [name for name in {*call.reads} - program.everywhere if home.setdefault(name, call.stage) != call.stage]
        assert not away, f"{call.op} of stage {call.stage} reads {away} of other stages"
        home |= dict.fromkeys(call.writes, call.settings.get("to", call.stage))
        reads, made = [held[name] for name in call.reads], [program.shapes[name] for name in call.writes]
        with named(f"{call.op} of {call.name!r:.80}"):
            if call.op in ("all_reduce", "join", "piece") and call.settings.get("axis"):
                outputs = [_exchanged(call, reads[0], list(program.axes).index(call.settings["axis"]), len(sizes))]
            else:
                ranks = [compute(call, [each[place] for each in reads], made) for place in np.ndindex(*sizes)]
                outputs = [np.stack(each).reshape(*sizes, *each[0].shape) for each in zip(*ranks, strict=True)]
            for name, value, shape in zip(call.writes, outputs, made, strict=True):
                if value.shape != (*sizes, *shape):
                    raise ValueError(f"{name} has the shape {value.shape[len(sizes) :]}, the file says {shape}")
                held[name] = value
    laid = {name: [spec for _, spec in program.laid.get(name, ())] for name in program.outputs}
    return {name: _assembled(held[tensor], laid[name]) for name, tensor in program.outputs.items()}


def _checked(program: TensorStep, values: Mapping[str, Any]) -> dict[str, Array]:
    """Values of all inputs and parameters as whole arrays of numbers, else ``CaptureError``."""
    given, found = (*program.inputs, *program.parameters), dict[str, Array]()
    missing = sorted(name for name in given if not isinstance(values, Mapping) or name not in values)
    if missing:
        raise CaptureError(f"values must be given of all inputs and parameters by name, got none of {missing[:5]}")
    for name in given:
        shape = list(program.shapes[name])
        for axis, spec in program.laid.get(name, ()):
            if isinstance(spec, tuple):
                shape[spec[0]] *= program.axes[axis]
        try:
            found[name] = value = np.asarray(values[name])
        except (ValueError, TypeError, RuntimeError):  # rows of different lengths, a tensor of a device
            value = np.asarray(None)
        fits = value.dtype.kind in "biuf" and value.shape == tuple(shape)
        if not fits or np.isnan(value).any():
            what = "NaN in it" if fits else f"{value.dtype} of shape {value.shape}"
            raise CaptureError(f"{name!r:.80} must be numbers of shape {tuple(shape)}, got {what:.80}")
    return found


def _spread(value: Any, laid: Sequence[tuple[int, Spec]]) -> Array:
    """A whole tensor on all ranks; ``laid``: sizes of the axes, and how it lies on each."""
    if not laid:
        return np.asarray(value)
    (size, spec), *rest = laid
    parts = [cut(value, spec, size, at) if isinstance(spec, tuple) else value for at in range(size)]
    return np.stack([_spread(part, rest) for part in parts])


def _assembled(value: Array, laid: Sequence[Spec]) -> Array:
    """The whole of what ``_spread`` laid on all ranks."""
    if not laid:
        return value
    parts = [_assembled(part, laid[1:]) for part in value]
    return joined(parts, laid[0]) if isinstance(laid[0], tuple) else parts[0]


def _exchanged(call: TensorCall, value: Array, number: int, axes: int) -> Array:
    """What a collective along axis ``number`` of all axes makes of the ranks' parts."""
    parts = list(np.moveaxis(value, number, 0))
    spec = (call.settings.get("dim", 0) + axes - 1, call.settings.get("outer", 1))
    if call.op == "piece":
        made = [cut(part, spec, len(parts), at) for at, part in enumerate(parts)]
    else:
        made = [joined(parts, spec) if call.op == "join" else np.sum(parts, axis=0)] * len(parts)
    return np.moveaxis(np.stack(made), 0, number)


def cut(value: Array, spec: tuple[int, int], count: int, at: int) -> Array:
    """Part ``at`` of ``count`` of a dim within each of ``outer`` rows of it; ``spec``: dim and outer."""
    dim, outer = spec
    rows = value.reshape(*value.shape[:dim], outer, count, -1, *value.shape[dim + 1 :])
    part: Array = rows.take(at, axis=dim + 1).reshape(*value.shape[:dim], -1, *value.shape[dim + 1 :])
    return part


def joined(parts: Sequence[Array], spec: tuple[int, int]) -> Array:
    """The whole of which ``cut`` made the parts."""
    (dim, outer), first = spec, parts[0].shape
    rows = [part.reshape(*first[:dim], outer, -1, *first[dim + 1 :]) for part in parts]
    return np.stack(rows, axis=dim + 1).reshape(*first[:dim], -1, *first[dim + 1 :])


# By op, from its settings, what it reads and the shapes of what it writes.
_COMPUTE: Mapping[str, Callable[[Any, Sequence[Array], Shapes], Any]] = {
    "adamw": lambda given, values, made: (  # the first step: both moments begin at 0
        values[0] - 1e-3 * (values[1] / (np.abs(values[1]) + 1e-8) + 0.01 * values[0])
    ),
    "product": lambda given, values, made: np.matmul(*_turned(given, values)),
    "attention": lambda given, values, made: _attended(given, values)[0],
    "reduce": lambda given, values, made: getattr(np, given["how"])(values[0], axis=given["reduced"]).reshape(made[0]),
    "reshape": lambda given, values, made: values[0].reshape(made[0]),
    "permute": lambda given, values, made: values[0].transpose(given["order"]),
    "concat": lambda given, values, made: np.concatenate(values, axis=given["axis"]),
    "index": lambda given, values, made: values[0][tuple(given["index"])],
    "expand": lambda given, values, made: np.broadcast_to(values[0], made[0]),
    "embedding": lambda given, values, made: values[0][values[1].astype(np.int64)],
    "join": lambda given, values, made: joined(values, (given["dim"], given["outer"])),
    "piece": lambda given, values, made: cut(values[0], (given["dim"], given["outer"]), given["count"], given["at"]),
    "softmax": lambda given, values, made: _normed("softmax", given, values)[0],
    "layer_norm": lambda given, values, made: _normed("layer_norm", given, values)[0],
    "rms_norm": lambda given, values, made: _normed("rms_norm", given, values)[0],
}


def compute(call: TensorCall, values: Sequence[Array], made: Shapes) -> list[Array]:
    """What a call writes, of the shapes ``made``; raises ``CaptureError`` if it is not known."""
    settings = call.settings
    if call.op == "vjp":
        of, saved = settings["of"], settings["saved"]
        shapes = [value.shape for value in values[:saved]] if saved else made
        every = _gradients(of, values[:saved], values[saved:], shapes)
        return [each for each, wanted in zip(every, settings["wanted"], strict=True) if wanted]
    if call.op == "split":
        sizes = [shape[settings["axis"]] for shape in made]
        return np.split(values[0], np.cumsum(sizes)[:-1], axis=settings["axis"])
    if call.op in POINTWISE:
        return [np.asarray(POINTWISE[call.op](*values))]
    if call.op not in _COMPUTE:
        raise CaptureError(f"the reference executor must know every op, got {call.op!r:.80} ({call.name!r:.80})")
    return [np.asarray(_COMPUTE[call.op](settings, values, made))]


def _turned(settings: Mapping[str, Any], pair: Sequence[Array]) -> list[Array]:
    """Operands of a product, transposed where it says so."""
    return [v.swapaxes(-1, -2) if settings.get(side) else v for v, side in zip(pair, ("left", "right"), strict=True)]


def _summed(value: Array, shape: Shape) -> Array:
    """The sum over the dims in which a tensor of a shape was broadcast."""
    first = value.ndim - len(shape)
    of_one = (first + place for place, size in enumerate(shape) if size == 1)
    return np.asarray(value.sum(axis=(*range(first), *of_one))).reshape(shape)


def _normed(op: str, settings: Mapping[str, Any], values: Sequence[Array]) -> tuple[Array, Array, Array]:
    """A softmax or norm; its part without weights, and what that was divided by."""
    x, axes = values[0], tuple(settings["axes"])
    if op == "softmax":
        risen = np.exp(x - x.max(axis=axes, keepdims=True))
        return risen / risen.sum(axis=axes, keepdims=True), risen, x
    centred = x - x.mean(axis=axes, keepdims=True) if op == "layer_norm" else x
    scale = np.sqrt((centred**2).mean(axis=axes, keepdims=True) + settings["epsilon"])
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
    dy, settings = given[0], call.settings
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
        left, right = _turned(settings, values)
        pair = _turned(settings, (dy @ right.swapaxes(-1, -2), left.swapaxes(-1, -2) @ dy))
        return [_summed(each, shape) for each, shape in zip(pair, shapes, strict=True)]
    if call.op == "attention":
        _, weights, k, v, scale = _attended(settings, values)
        raised = dy @ v.swapaxes(-1, -2)
        scores = scale * weights * (raised - (raised * weights).sum(axis=-1, keepdims=True))
        pair = [scores.swapaxes(-1, -2) @ values[0], weights.swapaxes(-1, -2) @ dy]
        heads = (each.reshape(*of[:2], -1, *of[2:]).sum(axis=2) for each, of in zip(pair, shapes[1:], strict=False))
        return [scores @ k, *heads, *(np.zeros(shape) for shape in shapes[3:])]
    if call.op == "reduce":
        kept = [1 if place in settings["reduced"] else size for place, size in enumerate(shapes[0])]
        part = math.prod(kept) / math.prod(shapes[0]) if settings["how"] == "mean" else 1.0
        return [np.broadcast_to(part * dy.reshape(kept), shapes[0])]
    if call.op not in _NORMS:
        return _moved_gradients(call, values, given, shapes)
    (out, plain_out, divisor), axes = _normed(call.op, settings, values), tuple(settings["axes"])
    if call.op == "softmax":
        return [out * (dy - (dy * out).sum(axis=axes, keepdims=True))]
    inner = dy * values[1] if len(values) > 1 else dy
    mean = inner.mean(axis=axes, keepdims=True) if call.op == "layer_norm" else 0.0
    dx = (inner - mean - plain_out * (inner * plain_out).mean(axis=axes, keepdims=True)) / divisor
    return [dx, *(_summed(each, value.shape) for each, value in zip((dy * plain_out, dy), values[1:], strict=False))]


def _moved_gradients(call: TensorCall, values: Sequence[Array], given: Sequence[Array], shapes: Shapes) -> list[Array]:
    """Gradients of a call that only moves elements: where each went to is found by moving their numbers."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])

    def parts(flat: Array) -> list[Array]:
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]

    numbers = parts(np.arange(ends[-1]))
    if call.op == "embedding":
        numbers[1] = values[1]
    moved = compute(call, numbers, [each.shape for each in given])
    where = np.concatenate([each.ravel() for each in moved]).astype(np.int64)
    return parts(np.bincount(where, np.concatenate([each.ravel() for each in given]), minlength=int(ends[-1])))
