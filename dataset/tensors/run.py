"""Computes a step on all of its ranks together with numpy: the reference that transforms are checked against."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.tensors.calls import Array, TensorCall, compute, cut, joined
from stepsight.dataset.tensors.step import Spec, TensorStep

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
