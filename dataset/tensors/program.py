"""Tensor programs: models that transforms distribute, a reference executor computes, and predictions are made of."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.captured import Captured
from stepsight.dataset.kinds.op import check_sizes
from stepsight.dataset.tensors.calls import Array
from stepsight.dataset.tensors.cuts import Cutting, staged
from stepsight.dataset.tensors.executor import run
from stepsight.dataset.tensors.exported_reader import open_exported
from stepsight.dataset.tensors.onnx_reader import open_onnx
from stepsight.dataset.tensors.ranks import (
    PRECISIONS,
    TensorStep,
    check_counts,
    ops_of,
    rank_of,
    with_backward,
    with_replicas,
)
from stepsight.dataset.tensors.readers import named

READERS = MappingProxyType({".onnx": open_onnx, ".pt2": open_exported})


def is_model(path: Path) -> bool:
    """Whether a file is a model by its name."""
    return path.suffix.lower() in READERS


def read_step(path: Path, dims: Mapping[str, int] | None, precision: str, *, whole: bool = True) -> TensorStep:
    """Read the forward of a model, as ``TensorProgram.load``; ``whole``: a shape that is not known is an error."""
    if not is_model(path) or not path.is_file():
        raise CaptureError(f"a model must be a file .onnx or .pt2, got {str(path)!r:.200}")
    if precision not in ("", *PRECISIONS):
        raise CaptureError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r:.40}")
    check_counts(2**31, **(dims or {}))
    with named(path.name):
        reader = READERS[path.suffix.lower()](path, dims or {})
        step = reader.read()
        step = replace(step, precision=precision, dtype=precision or step.dtype)
        check_sizes((op for call in step.calls for op in ops_of(step, call)), "a model")
    for name, node in list(reader.unshaped.items())[:1]:
        if whole:
            raise CaptureError(f"shapes of all tensors must be known, got none of {name!r:.80} of {node!r:.80}")
        more = f"shapes from {node:.80} on are not known: {len(reader.unshaped)} tensors are taken as single numbers"
        step = replace(step, notes=(*step.notes, more))
    if whole and not step.outputs:
        raise CaptureError(f"a tensor program must compute its outputs, got {len(step.calls)} calls")
    return step


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
        program = cls(**vars(read_step(Path(path), dims, precision)))
        return program.with_training() if training else program

    def __repr__(self) -> str:
        axes = [f"{name} {size}" for name, size in (*self.axes.items(), ("pp", self.num_stages)) if size > 1]
        micro = f", {self.num_micro} micro-batches" if self.num_micro > 1 else ""
        return f"TensorProgram({len(self.calls)} calls on {self.world_size} ranks: {', '.join(axes) or 'one'}{micro})"

    def replicate(self, count: int) -> TensorProgram:
        """Data parallelism: each of ``count`` replicas takes its part of the batch; gradients are all-reduced."""
        check_counts(replicas=count)
        return self._cut(count, "dp", batch=True)

    def split(self, count: int) -> TensorProgram:
        """Tensor parallelism: products, and what follows them, are cut into ``count`` parts by columns and rows."""
        check_counts(parts=count)
        return self._cut(count, "tp", batch=False)

    def _cut(self, count: int, axis: str, *, batch: bool) -> TensorProgram:
        names = itertools.chain([axis], (f"{axis}_{number}" for number in itertools.count(2)))
        axis = axis and next(each for each in names if each not in self.axes)
        return Cutting(self, count, axis, batch=batch).program() if count > 1 else self

    def micro_batches(self, count: int) -> TensorProgram:
        """Parts of the batch one after the other on the same rank; gradients are accumulated."""
        check_counts(micro_batches=count)
        if count > 1 < self.num_micro:
            raise CaptureError(f"micro-batches must be cut once, got {count} after {self.num_micro}")
        return replace(self._cut(count, "", batch=True), num_micro=count) if count > 1 else self

    def cut(self, stages: int, micro_batches: int = 1) -> TensorProgram:
        """Pipeline parallelism: consecutive calls become ``stages`` of about equal FLOP, which pass tensors on."""
        check_counts(stages=stages)
        program = self.micro_batches(micro_batches)
        if self.num_stages > 1 < stages:
            raise CaptureError(f"stages must be cut once, got {stages} after {self.num_stages}")
        return staged(program, stages) if stages > 1 else program

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
            CaptureError: If a value is missing or is not numbers of its shape, or an op is not known.
        """
        return run(self, values)

    def captured(self, devices_per_node: int = 8, name: str = "model") -> Captured:
        """The programs of the first rank of each pipeline stage, and their memory.

        Tensor-parallel ranks are neighbours, then replicas; stages are furthest apart.
        """
        check_counts(devices_per_node=devices_per_node)
        ranks = tuple(rank_of(self, stage, devices_per_node) for stage in range(self.num_stages))
        return Captured(name, self.world_size, devices_per_node, "", ranks)


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
    check_counts(2**20, **{"world size": replicas, "devices per node": local_size})
    step = read_step(path, dims, precision, whole=False)
    if not any(ops_of(step, call) for call in step.calls):
        raise CaptureError(f"{path.name} must compute something, got no op")
    with named(path.name):
        step = with_replicas(with_backward(step) if training else step, replicas)
        rank = rank_of(step, 0, local_size)
    name = f"{path.name} ({'training' if training else 'inference'})"
    return Captured(name, replicas, local_size, path.suffix[1:], (rank,))
