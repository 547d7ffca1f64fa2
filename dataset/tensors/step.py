"""A model's step on all of its ranks as calls on named tensors, and its backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.model_steps import streamed
from stepsight.dataset.graph.columns import PHASES
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tensors.calls import UNSAVED, Array, Shapes, TensorCall

SUM = "sum"  # how a tensor lies on the ranks of an axis: None whole; (dim, outer) in parts; SUM still to be added up
Spec = None | str | tuple[int, int]
FORWARD, BACKWARD, OPTIMIZER = range(len(PHASES))
Step = TypeVar("Step", bound="TensorStep")


@dataclass(frozen=True)
class TensorStep:
    """A step of a model on all of its ranks.

    Attributes:
        calls: In an order in which they can run.
        shapes: Of all tensors, on one rank.
        inputs: Names of what the user gives besides parameters.
        parameters: Names of what training updates.
        outputs: Names in the file, and of the tensors that hold them; with training also updated parameters
            (``new <name>``) and gradients (``gradient of <name>``).
        constants: Values in the file.
        seeds: Inputs that are gradients of outputs, and those.
        gradients: Of parameters.
        dtype: Of parameters and most activations.
        axes: Names and sizes of the axes that ranks lie on, as transforms added them.
        laid: How inputs, parameters and outputs lie on axes: axis and spec, in the order of the transforms.
        num_micro: Micro-batches.
        num_stages: Pipeline stages.
        precision: Type of floating point instead of that in the file; empty: as there.
        notes: What the user should know.
    """

    calls: tuple[TensorCall, ...]
    shapes: Mapping[str, tuple[int, ...]]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: Mapping[str, str]
    constants: Mapping[str, Array] = field(default_factory=dict)
    seeds: Mapping[str, str] = field(default_factory=dict)
    gradients: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "fp32"
    axes: Mapping[str, int] = field(default_factory=dict)
    laid: Mapping[str, tuple[tuple[str, Spec], ...]] = field(default_factory=dict)
    num_micro: int = 1
    num_stages: int = 1
    precision: str = ""
    notes: tuple[str, ...] = ()

    @property
    def everywhere(self) -> frozenset[str]:
        """Names of what each pipeline stage that reads it has for itself: constants, and parameters that stay."""
        return frozenset([*self.constants, *(() if self.gradients else self.parameters)])

    @property
    def world_size(self) -> int:
        return self.num_stages * math.prod(self.axes.values())


def no_ops(reads: Shapes, writes: Shapes) -> list[Op]:
    """Of a call that only views or names tensors."""
    return []


def add_ops(reads: Shapes, writes: Shapes, dtype: str = "fp32") -> list[Op]:
    """Of an addition."""
    return [op for op in [streamed("add", writes[0], dtype)] if op]


def with_backward(program: Step) -> Step:
    """A step with gradients of all parameters, and AdamW's update of them, after its forward.

    Raises:
        CaptureError: If it has no parameters, or is transformed already.
    """
    if not program.parameters or program.world_size * program.num_micro > 1 or program.gradients:
        raise CaptureError(
            f"a program that is trained must have parameters and not be transformed yet, got {program!r}"
        )
    wanted, shapes = set(program.parameters), dict(program.shapes)
    for call in program.calls:
        if wanted & {*call.reads}:
            wanted |= {*call.writes}
    seeds = {f"gradient of {name}": tensor for name, tensor in program.outputs.items() if tensor in wanted}
    shapes |= {seed: shapes[tensor] for seed, tensor in seeds.items()}
    found, calls, count = {tensor: seed for seed, tensor in seeds.items()}, list(program.calls), itertools.count()

    def add(call: TensorCall, op: str, reads: Sequence[str], made: Sequence[str], **more: Any) -> list[str]:
        names = [f"d{next(count)} {name}" for name in made]
        shapes.update(zip(names, (shapes[name] for name in made), strict=True))
        calls.append(replace(call, op=op, reads=tuple(reads), writes=tuple(names), phase=BACKWARD, **more))
        return names

    for call in reversed(program.calls):
        of_reads = [name in wanted for name in call.reads]
        if not any(of_reads) or not any(name in found for name in call.writes):
            continue
        for name in call.writes:
            if name not in found:
                (found[name],) = add(call, "zeros", [name], [name], settings={}, ops=no_ops)
        saved = 0 if call.op in UNSAVED and all(of_reads) else len(call.reads)
        settings = {"of": call, "saved": saved, "wanted": tuple(of_reads)}
        settings["parameters"] = tuple(name in program.parameters for name in call.reads)
        made = [name for name, is_wanted in zip(call.reads, of_reads, strict=True) if is_wanted]
        reads = [*call.reads[:saved], *(found[name] for name in call.writes)]
        for name, gradient in zip(made, add(call, "vjp", reads, made, settings=settings), strict=True):
            if name in found:
                (gradient,) = add(
                    call, "add", [found[name], gradient], [name], settings={}, ops=partial(add_ops, dtype=program.dtype)
                )
            found[name] = gradient
    gradients = {name: found[name] for name in program.parameters if name in found}
    return _updated(replace(program, calls=tuple(calls), shapes=shapes, seeds=seeds, gradients=gradients))


def _updated(program: Step) -> Step:
    """A step with the optimizer, after all gradients."""
    shapes, calls, gradients = dict(program.shapes), list(program.calls), program.gradients
    first = {name: call for call in reversed(program.calls) for name in call.reads}
    for name, gradient in gradients.items():
        shapes[f"new {name}"] = shapes[name]
        call = TensorCall("adamw", (name, gradient), (f"new {name}",), phase=OPTIMIZER, origin=first[name].origin)
        calls.append(call)
    outputs = {**program.outputs, **{f"new {name}": f"new {name}" for name in gradients}}
    outputs |= {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    inputs = (*program.inputs, *program.seeds)
    return replace(program, calls=tuple(calls), shapes=shapes, inputs=inputs, outputs=outputs)
