"""Tensor programs: models that transforms distribute, a reference executor computes, and predictions are made of."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.captured import Captured
from stepsight.dataset.tensors.calls import Array, TensorCall, compute, cut, joined
from stepsight.dataset.tensors.cuts import Cutting, staged
from stepsight.dataset.tensors.model_files import ModelRequest, read_step
from stepsight.dataset.tensors.ranks import Spec, TensorStep, check_counts, rank_of, with_backward


@dataclass(frozen=True, repr=False)
class TensorProgram(TensorStep):
    """A model's step as calls on named tensors, on all of its ranks.

    Every transform gives a program again, so they compose in any order.  ``run`` computes a program with numpy, at
    small sizes, and ``captured`` makes the programs of its ranks, which are predicted, saved and edited.
    """

    @classmethod
    def load(
        cls, path: str | Path, dims: Mapping[str, int] | None = None, *, training: bool = False, precision: str = ""
    ) -> TensorProgram:
        """Read an ONNX file or one of ``torch.export.save``: its forward, or a step of its training.

        Args:
            path: Of the file.
            dims: Sizes of symbolic dimensions by name; else 1 in ONNX, and those of the sample inputs in ``.pt2``.
            training: With gradients of all parameters and their AdamW step.
            precision: fp32, bf16 or fp16 instead of the type in the file.

        Raises:
            CaptureError: If the file is no model, or its shapes are not known.
        """
        step = read_step(ModelRequest(Path(path), dims=dims or {}, precision=precision))
        program = cls(**{each.name: getattr(step, each.name) for each in fields(step)})
        return program.with_training() if training else program

    def __repr__(self) -> str:
        axes = [f"{name} {size}" for name, size in (*self.axes.items(), ("pp", self.num_stages)) if size > 1]
        micro = f", {self.num_micro} micro-batches" if self.num_micro > 1 else ""
        return f"TensorProgram({len(self.calls)} calls on {self.world_size} ranks: {', '.join(axes) or 'one'}{micro})"

    def replicate(self, count: int) -> TensorProgram:
        """Data parallelism: each of ``count`` replicas takes its part of the batch; gradients are all-reduced."""
        check_counts(replicas=count)
        return Cutting(self, count, self._axis("dp"), batch=True).program() if count > 1 else self

    def split(self, count: int) -> TensorProgram:
        """Tensor parallelism: products, and what follows them, are cut into ``count`` parts by columns and rows."""
        check_counts(parts=count)
        return Cutting(self, count, self._axis("tp"), batch=False).program() if count > 1 else self

    def micro_batches(self, count: int) -> TensorProgram:
        """Parts of the batch one after the other on the same rank; gradients are accumulated."""
        check_counts(micro_batches=count)
        if count > 1 < self.num_micro:
            raise CaptureError(f"micro-batches must be cut once, got {count} after {self.num_micro}")
        return replace(Cutting(self, count, "", batch=True).program(), num_micro=count) if count > 1 else self

    def cut(self, stages: int, micro_batches: int = 1) -> TensorProgram:
        """Pipeline parallelism: consecutive calls become ``stages`` of about equal FLOP, which pass tensors on."""
        check_counts(stages=stages)
        program = self.micro_batches(micro_batches)
        if self.num_stages > 1 < stages:
            raise CaptureError(f"stages must be cut once, got {stages} after {self.num_stages}")
        return staged(program, stages) if stages > 1 else program

    def _axis(self, name: str) -> str:
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        return next(each for each in names if each not in self.axes)

    def with_training(self) -> TensorProgram:
        """The program with gradients of all parameters and their AdamW step.

        The file names no loss: the gradients of the outputs are inputs (``gradient of <output>``).
        """
        return with_backward(self)

    def random_values(self, seed: int = 0) -> dict[str, Array]:
        """Values for ``run`` of an untransformed program, small enough for any norm: whole numbers index tables."""
        rng, tables = np.random.default_rng(seed), dict[str, int]()
        for call in self.calls:
            if call.op == "embedding":
                tables[call.reads[1]] = self.shapes[call.reads[0]][0]
        names = (*self.inputs, *self.parameters)
        return {
            name: rng.integers(tables[name], size=self.shapes[name]).astype(float) if name in tables
            else rng.standard_normal(self.shapes[name]) for name in names
        }  # fmt: skip

    def run(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Compute the outputs of all ranks together with numpy, from whole inputs and parameters.

        Raises:
            CaptureError: If a value is missing, or an op is not known.
        """
        return run(self, values)

    def captured(self, devices_per_node: int = 8, name: str = "model") -> Captured:
        """The programs of the first rank of each pipeline stage, and their memory.

        Tensor-parallel ranks are neighbours, then replicas; stages are furthest apart.
        """
        check_counts(devices_per_node=devices_per_node)
        ranks = tuple(rank_of(self, stage, devices_per_node) for stage in range(self.num_stages))
        return Captured(name, self.world_size, devices_per_node, "", ranks)


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
