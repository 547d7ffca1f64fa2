"""The best way to distribute a model in a file: data, tensor and pipeline parallelism and micro-batches, all tried by
predicted time, as in the experiment of DistIR (Santhanam et al., arXiv:2111.05426).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.tensors.program import TensorProgram
from stepsight.dataset.tensors.ranks import check_counts
from stepsight.experiments.reports.text_table import Column, Number, table_of
from stepsight.training.prediction.captured_prediction import predict_captured
from stepsight.training.predictor.predictor import Predictor


@dataclass(frozen=True)
class Placement:
    """A way to distribute a model, and its predicted seconds; ``fits``: in the memory of the devices."""

    data: int
    tensor: int
    pipeline: int
    micro_batches: int
    seconds: float
    low_s: float
    high_s: float
    memory_bytes: float
    fits: bool


@dataclass(frozen=True)
class ModelGrid:
    """All placements that were tried, the fastest that fits first, and why others cannot be."""

    placements: tuple[Placement, ...]
    refused: Mapping[tuple[int, int, int, int], str]

    @property
    def best(self) -> Placement:
        return self.placements[0]

    @property
    def pure(self) -> dict[str, Placement]:
        """The best placement of each axis alone."""
        axes = ("data", "tensor", "pipeline")
        alone = {a: [p for p in self.placements if p.data * p.tensor * p.pipeline == getattr(p, a)] for a in axes}
        return {axis: placements[0] for axis, placements in alone.items() if placements}

    def __str__(self) -> str:
        columns: dict[str, Column] = {
            **{name: attrgetter(name) for name in ("data", "tensor", "pipeline")},
            "micro-batches": attrgetter("micro_batches"),
            "ms": lambda row: Number(1e3 * row.seconds, 3),
            "GB": lambda row: Number(row.memory_bytes / 1e9),
            "fits": lambda row: "yes" if row.fits else "no",
            "": lambda row: ", ".join(name for name, each in {"best": self.best, **self.pure}.items() if each is row),
        }
        return table_of(self.placements, columns)


def model_grid(
    program: TensorProgram,
    hardware: str,
    devices: int,
    *,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    devices_per_node: int = 8,
    fabric: str = "",
    predictor: Predictor | str | Path | None = None,
) -> ModelGrid:
    """Predict a model on a number of devices for every product of data, tensor and pipeline parallelism.

    Args:
        program: Untransformed, of the whole batch: its forward, or with training.
        hardware: Name of the devices.
        devices: How many.
        micro_batches: Numbers of micro-batches that pipelines try.
        devices_per_node: How many devices share a node.
        fabric: Name of the links; empty: the usual ones.
        predictor: As in ``predict``.

    Returns:
        All placements with their times, the fastest that fits first; printed, a table.

    Raises:
        CaptureError: If no placement is possible.

    Example:
        >>> model = stepsight.TensorProgram.load("gpt2.onnx", {"batch": 64})  # doctest: +SKIP
        >>> print(stepsight.model_grid(model, "h100-sxm-80gb", 16))  # doctest: +SKIP
    """
    check_counts(devices=devices)
    placements, refused = list[Placement](), dict[tuple[int, int, int, int], str]()
    for data in (size for size in range(1, devices + 1) if devices % size == 0):
        for tensor in (size for size in range(1, devices // data + 1) if devices // data % size == 0):
            pipeline = devices // data // tensor
            grid = [(data, tensor, pipeline, micro) for micro in (micro_batches if pipeline > 1 else (1,))]
            try:
                placed = program.replicate(data).split(tensor)
            except CaptureError as error:
                refused |= dict.fromkeys(grid, str(error))
                continue
            for degrees in grid:
                try:
                    step = placed.cut(*degrees[2:])
                except CaptureError as error:
                    refused[degrees] = str(error)
                    continue
                found = predict_captured(step.captured(devices_per_node), hardware, fabric, predictor)
                memory = found.memory
                sizes = memory["peak_bytes"], bool(memory["fits"])
                placements.append(Placement(*degrees, found.iteration_time_s, *found.interval, *sizes))
    if not placements:
        why = next(iter(refused.values()))
        raise CaptureError(f"a model must be divisible by {devices} devices in some way: {why}")
    return ModelGrid(tuple(sorted(placements, key=lambda each: (not each.fits, each.seconds))), refused)
