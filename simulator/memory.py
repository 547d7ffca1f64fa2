"""Bytes that a rank of each pipeline stage needs at its peak.

Bytes per parameter, in fp32 training and in mixed precision (bf16 or fp16, Megatron's convention):

=============  ====  =======================================================================
parameters      4     2 (with ZeRO stage 3, PyTorch's FSDP: 4, the shard is the master copy)
gradients       4     4
optimizer       8     12 (fp32 master copy and both moments; 8 with ZeRO stage 3)
=============  ====  =======================================================================

ZeRO stage 1 divides the optimizer's by the data-parallel degree, 2 the gradients' too, 3 the parameters' too
(Rajbhandari et al. 2019, arXiv:1910.02054); FSDP then needs room for gathered layers.  Activations are what each step
keeps for its backward: with tensor and sequence parallelism the formulas of Korthikanti et al. 2022 (arXiv:2205.05198),
less dropout masks, and less the score matrix, since attention here is fused.  They are kept for as many micro-batches
as the schedule has in flight.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from stepsight.dataset.hardware import Hardware
from stepsight.dataset.job import Job, ParallelSpec
from stepsight.dataset.op import DTYPE_BYTES
from stepsight.simulator.layers import Block, RankShape, layer_block
from stepsight.simulator.lowering import rank_shape, stage_shapes
from stepsight.simulator.schedules import BACKWARD, FORWARD, Schedule, find_schedule
from stepsight.simulator.segments import StageShape, stage_units, unit_parameters

GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one rank of a stage.

    Attributes:
        parameters, gradients, optimizer: Held all the time.
        activations: Kept for backward at the peak, over all micro-batches in flight.
        buffers: What one layer needs for a moment: gathered parameters, recomputed activations.
        in_flight: Micro-batches whose activations are kept at the peak.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    in_flight: int

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True, slots=True)
class Memory:
    """What a job needs against what a device has.

    Attributes:
        stages: Of each pipeline stage.
        capacity_bytes: Of one device.
    """

    stages: tuple[StageMemory, ...]
    capacity_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Of the stage that needs most."""
        return max(stage.total for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes

    @property
    def reason(self) -> str:
        """Why it does not fit; empty if it does."""
        if self.fits:
            return ""
        at = max(range(len(self.stages)), key=lambda index: self.stages[index].total)
        stage = self.stages[at]
        parts = ", ".join(
            f"{name} {getattr(stage, name) / 1e9:.1f}"
            for name in ("parameters", "gradients", "optimizer", "activations", "buffers")
        )
        return (
            f"stage {at} needs {stage.total / 1e9:.1f} GB ({parts}; {stage.in_flight} micro-batches in flight), "
            f"a device has {self.capacity_bytes / 1e9:.1f} GB"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "reason": self.reason,
            "stages": [stage.to_dict() for stage in self.stages],
        }


def estimate_memory(job: Job, hardware: Hardware) -> Memory:
    """Peak bytes of every stage of a job."""
    return Memory(_stages(job.parallel, rank_shape(job), job.num_micro_batches), hardware.memory_bytes)


@lru_cache(maxsize=4096)
def _stages(parallel: ParallelSpec, shape: RankShape, num_micro_batches: int) -> tuple[StageMemory, ...]:
    schedule = find_schedule(parallel.schedule, parallel.pp, num_micro_batches)
    in_flight = micro_batches_in_flight(schedule)
    return tuple(
        _stage(shape, stage, parallel, flying)
        for stage, flying in zip(stage_shapes(shape.model, parallel.pp), in_flight, strict=True)
    )


def micro_batches_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Largest number of micro-batches of each stage between their forward and their backward."""
    most = []
    for rows in schedule.actions:
        step = np.select([rows[:, 0] == FORWARD, rows[:, 0] == BACKWARD], [1, -1], 0)
        most.append(int(step.cumsum().max()))
    return tuple(most)


def _stage(shape: RankShape, stage: StageShape, p: ParallelSpec, in_flight: int) -> StageMemory:
    units = stage_units(shape, stage)
    numel = sum(unit_parameters(units))
    mixed = shape.dtype != "fp32"
    sharded = p.zero_stage == 3 and p.dp > 1
    parameter_bytes = 2 if mixed and not sharded else 4
    moments_bytes = 12 if mixed and not sharded else 8
    shards = [p.dp if p.zero_stage >= stage_of else 1 for stage_of in (3, 2, 1)]
    activations, again = activation_bytes(shape, stage, p.recompute)
    buffers = float(again)
    if sharded:
        buffers += _gathered_bytes(shape, stage)
    return StageMemory(
        parameters=numel * parameter_bytes / shards[0],
        gradients=numel * GRADIENT_BYTES / shards[1],
        optimizer=numel * moments_bytes / shards[2],
        activations=float(in_flight * activations),
        buffers=buffers,
        in_flight=in_flight,
    )


def _gathered_bytes(shape: RankShape, stage: StageShape) -> int:
    """FSDP: the root's parameters, two layers' (one computes, one arrives) and one layer's gradients."""
    units = stage_units(shape, stage)
    root = sum(unit_parameters(tuple(unit for unit in units if unit.root)))
    layer = max((sum(unit_parameters((unit,))) for unit in units if not unit.root), default=0)
    return (root + 2 * layer) * DTYPE_BYTES[shape.dtype] + layer * GRADIENT_BYTES


def block_activation_bytes(block: Block, *, without_core: bool = False) -> int:
    """Bytes that a block keeps for its backward; ``without_core``: less the attention core's."""
    return sum(step.saved_bytes for step in block if not (without_core and step.attention_core))


def activation_bytes(shape: RankShape, stage: StageShape, recompute: str) -> tuple[int, int]:
    """Bytes kept for one micro-batch on a stage, and bytes needed for a moment to recompute one layer."""
    layer = block_activation_bytes(layer_block(shape))
    rest = sum(block_activation_bytes(unit.block) for unit in stage_units(shape, stage) if unit.root)
    if recompute != "full":
        return stage.layers * layer + rest, 0
    return stage.layers * shape.boundary_bytes + rest, layer
