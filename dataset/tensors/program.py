"""Tensor programs: models that transforms distribute, and predictions are made of.

The reference executor computes a step on all of its ranks with numpy, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.captured import Captured
from stepsight.dataset.job.job import Job, JobLike
from stepsight.dataset.kinds.op import MOST_SIZE, check_sizes
from stepsight.dataset.tensors import ranks
from stepsight.dataset.tensors.calls import POINTWISE, Array, Shape, Shapes, TensorCall
from stepsight.dataset.tensors.cuts import Cutting, staged
from stepsight.dataset.tensors.exported_reader import open_exported
from stepsight.dataset.tensors.job_reader import JobReader
from stepsight.dataset.tensors.onnx_reader import open_onnx
from stepsight.dataset.tensors.readers import named

READERS = MappingProxyType({".onnx": open_onnx, ".pt2": open_exported})


def is_model(path: Path) -> bool:
    """Whether a file is a model by its name."""
    return path.suffix.lower() in READERS


def read_step(path: Path, dims: Mapping[str, int] | None, precision: str, *, whole: bool = True) -> ranks.TensorStep:
    """Read the forward of a model, as ``TensorProgram.load``; ``whole``: a shape that is not known is an error."""
    if not is_model(path) or not path.is_file():
        raise CaptureError(f"a model must be a file .onnx or .pt2, got {str(path)!r:.200}")
    if precision not in ("", *ranks.PRECISIONS):
        raise CaptureError(f"precision must be one of {', '.join(ranks.PRECISIONS)}, got {precision!r:.40}")
    ranks.check_counts(2**31, **(dims or {}))
    with named(str(path)):
        reader = READERS[path.suffix.lower()](path, dims or {})
        step = reader.read()
        step = replace(step, precision=precision, dtype=precision or step.dtype)
        for name, shape in step.shapes.items():
            if not all(0 <= size <= MOST_SIZE for size in shape):
                raise ValueError(f"sizes of a tensor must lie from 0 to {MOST_SIZE}, got {shape} of {name!r:.80}")
        check_sizes((op for call in step.calls for op in ranks.ops_of(step, call)), "a model")
    for name, node in list(reader.unshaped.items())[:1]:
        if whole:
            raise CaptureError(f"shapes of all tensors must be known, got none of {name!r:.80} of {node!r:.80}")
        more = f"shapes from {node:.80} on are not known: {len(reader.unshaped)} tensors are taken as single numbers"
        step = replace(step, notes=(*step.notes, more))
    if whole and not step.outputs:
        raise CaptureError(f"a tensor program must compute its outputs, got {len(step.calls)} calls")
    return step


@dataclass(frozen=True, repr=False)
class TensorProgram(ranks.TensorStep):
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
        program = cls(**vars(read_step(Path(path), dims, precision)))
        return program.with_training() if training else program

    @classmethod
    def of_job(cls, job: JobLike, *, training: bool = False) -> TensorProgram:
        """The model of a job with its whole global batch on one device; transforms place it, in any order.

        Args:
            job: As in ``predict``: a ``Job``, its tables or a job file; its own strategy does not count.
            training: With gradients of all parameters and their AdamW step.

        Raises:
            CaptureError: If the model is no dense decoder, or its precision is none of those of tensor programs.
        """
        found = Job.of(job)
        if found.batch.precision not in ranks.PRECISIONS:
            told = f"precision must be one of {', '.join(ranks.PRECISIONS)}, got {found.batch.precision}"
            raise CaptureError(f"{told}: change batch.precision of the job")
        step = JobReader(found).read()
        program = cls(**vars(replace(step, precision=found.batch.precision, dtype=found.batch.precision)))
        return program.with_training() if training else program

    def __repr__(self) -> str:
        axes = [f"{name} {size}" for name, size in (*self.axes.items(), ("pp", self.num_stages)) if size > 1]
        micro = f", {self.num_micro} micro-batches" if self.num_micro > 1 else ""
        return f"TensorProgram({len(self.calls)} calls on {self.world_size} ranks: {', '.join(axes) or 'one'}{micro})"

    def replicate(self, count: int) -> TensorProgram:
        """Data parallelism: each of ``count`` replicas takes its part of the batch; gradients are all-reduced."""
        ranks.check_counts(replicas=count)
        return self._cut(count, "dp", batch=True)

    def split(self, count: int) -> TensorProgram:
        """Tensor parallelism: products, and what follows them, are cut into ``count`` parts by columns and rows."""
        ranks.check_counts(parts=count)
        return self._cut(count, "tp", batch=False)

    def _cut(self, count: int, axis: str, *, batch: bool) -> TensorProgram:
        names = (axis, *(f"{axis}_{number}" for number in range(2, len(self.axes) + 2)))
        axis = next(each for each in names if each not in self.axes)
        return Cutting(self, count, axis, batch=batch).program() if count > 1 else self

    def micro_batches(self, count: int) -> TensorProgram:
        """Parts of the batch one after the other on the same rank; gradients are accumulated."""
        ranks.check_counts(micro_batches=count)
        if count > 1 < self.num_micro:
            raise CaptureError(f"micro-batches must be cut once, got {count} after {self.num_micro}")
        return replace(self._cut(count, "", batch=True), num_micro=count) if count > 1 else self

    def cut(self, stages: int, micro_batches: int = 1) -> TensorProgram:
        """Pipeline parallelism: consecutive calls become ``stages`` of about equal FLOP, which pass tensors on."""
        ranks.check_counts(stages=stages)
        program = self.micro_batches(micro_batches)
        if self.num_stages > 1 < stages:
            raise CaptureError(f"stages must be cut once, got {stages} after {self.num_stages}")
        return staged(program, stages) if stages > 1 else program

    def with_training(self) -> TensorProgram:
        """The program with gradients of all parameters and their AdamW step.

        The file names no loss: the gradients of the outputs are inputs (``gradient of <output>``).
        """
        return ranks.with_backward(self)

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
            CaptureError: If a value is missing or is not numbers of its shape, or an op is not known.
        """
        # A tensor of all ranks has their axes as leading dims.
        sizes, home = tuple(self.axes.values()), dict[str, int]()
        whole = [(size, None) for size in sizes]
        held = {
            name: _spread(value, [(self.axes[axis], spec) for axis, spec in self.laid.get(name, ())] or whole)
            for name, value in {**self.constants, **_checked(self, values)}.items()
        }
        for call in self.calls:
            away = [name for name in {*call.reads} - self.everywhere if home.setdefault(name, call.stage) != call.stage]
            assert not away, f"{call.op} of stage {call.stage} reads {away} of other stages"
            home |= dict.fromkeys(call.writes, call.settings.get("to", call.stage))
            reads, made = [held[name] for name in call.reads], [self.shapes[name] for name in call.writes]
            with named(f"{call.op} of {call.name!r:.80}"):
                if call.op in ("all_reduce", "join", "piece") and call.settings.get("axis"):
                    outputs = [_exchanged(call, reads[0], list(self.axes).index(call.settings["axis"]), len(sizes))]
                else:
                    each_rank = [compute(call, [each[place] for each in reads], made) for place in np.ndindex(*sizes)]
                    stacked = map(np.stack, zip(*each_rank, strict=True))
                    outputs = [each.reshape((*sizes, *each.shape[1:])) for each in stacked]
                for name, value, shape in zip(call.writes, outputs, made, strict=True):
                    if value.shape != (*sizes, *shape):
                        raise ValueError(f"{name} has the shape {value.shape[len(sizes) :]}, the file says {shape}")
                    held[name] = value
        laid = {name: [spec for _, spec in self.laid.get(name, ())] for name in self.outputs}
        return {name: _assembled(held[tensor], laid[name]) for name, tensor in self.outputs.items()}

    def captured(self, devices_per_node: int = 8, name: str = "model") -> Captured:
        """The programs of the first rank of each pipeline stage, and their memory.

        Tensor-parallel ranks are neighbours, then replicas; stages are furthest apart.
        """
        ranks.check_counts(devices_per_node=devices_per_node)
        programs = tuple(ranks.rank_of(self, stage, devices_per_node) for stage in range(self.num_stages))
        return Captured(name, self.world_size, devices_per_node, "", programs)


def read_model(
    path: Path, replicas: int = 1, local_size: int = 8, *,
    training: bool = False, dims: Mapping[str, int] | None = None, precision: str = "",
) -> Captured:  # fmt: skip
    """Read a model as one step of one of its replicas; raises ``CaptureError`` if the file is no model.

    Args:
        path, training, dims, precision: As of ``TensorProgram.load``.
        replicas: Data-parallel ranks, each with a batch as large as the file's.
        local_size: Ranks of a node.
    """
    ranks.check_counts(2**20, **{"world size": replicas, "devices per node": local_size})
    step = read_step(path, dims, precision, whole=False)
    if not any(ranks.ops_of(step, call) for call in step.calls):
        raise CaptureError(f"{path} must compute something, got no op")
    with named(str(path)):
        step = ranks.with_replicas(ranks.with_backward(step) if training else step, replicas)
        rank = ranks.rank_of(step, 0, local_size)
    name = f"{path.name} ({'training' if training else 'inference'})"
    return Captured(name, replicas, local_size, path.suffix[1:], (rank,))


_STEP = 1e-30  # along the imaginary axis: a derivative without cancellation
_NORMS = ("softmax", "layer_norm", "rms_norm")


def _checked(program: ranks.TensorStep, values: Mapping[str, Any]) -> dict[str, Array]:
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


def _spread(value: Any, laid: Sequence[tuple[int, ranks.Spec]]) -> Array:
    """A whole tensor on all ranks; ``laid``: sizes of the axes, and how it lies on each."""
    if not laid:
        return np.asarray(value)
    (size, spec), *rest = laid
    parts = [cut(value, spec, size, at) if isinstance(spec, tuple) else value for at in range(size)]
    return np.stack([_spread(part, rest) for part in parts])


def _assembled(value: Array, laid: Sequence[ranks.Spec]) -> Array:
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
    if call.op in _NORMS:
        return [_normed(call.op, settings, values)[0]]
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
