"""Programs of one pipeline stage: forward, backward and optimizer of one rank, with its data-parallel traffic.

Conventions.  fp32 training is PyTorch's eager behaviour: gradients are accumulated by one ``add`` per parameter and
reduced in fp32; DDP scales each gradient into its bucket (``copy``) and sends a bucket once it holds ``bucket_mbytes``
(an explicit size leaves no smaller first bucket).  bf16 and fp16 are Megatron's mixed precision:
gradients are accumulated (inside the weight-gradient GEMM) and reduced in fp32, AdamW runs on fp32 master weights, and
all-gathers carry parameters in the training dtype.  Full recomputation repeats all of a layer in Megatron; in PyTorch
(fp32, and FSDP) it stops before the last collective and residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stepsight.dataset.op import DTYPE_BYTES, Op
from stepsight.simulator.dataparallel import Gathers, Reducer, sum_buckets, sum_replicated
from stepsight.simulator.emitter import DataParallel, Emitter
from stepsight.simulator.graph import Segment
from stepsight.simulator.layers import Block, RankShape, Step, embedding_block, head_block, layer_block


@dataclass(frozen=True, slots=True)
class StageShape:
    """What distinguishes a pipeline stage from others."""

    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Unit:
    """A block of a stage and the parameters that are sharded and gathered together with it.

    FSDP wraps every layer and, as the root, what is left: embedding, final norm and logits.
    """

    name: str
    block: Block
    root: bool


@lru_cache(maxsize=4096)
def stage_units(shape: RankShape, stage: StageShape) -> tuple[Unit, ...]:
    """Blocks of a stage in forward order."""
    shared = shape.model.tied_embeddings and stage.first and stage.last
    units = [Unit(f"layer{i}", layer_block(shape), False) for i in range(stage.layers)]
    if stage.first:
        units.insert(0, Unit("embedding", embedding_block(shape, shared), True))
    if stage.last:
        units.append(Unit("head", head_block(shape, shared), True))
    return tuple(units)


def unit_parameters(units: tuple[Unit, ...]) -> tuple[int, ...]:
    """Elements of every parameter tensor of some units."""
    return tuple(numel for unit in units for step in unit.block for numel in step.parameters)


def _gathers(emitter: Emitter, units: tuple[Unit, ...], dtype: str, backward: bool) -> Gathers | None:
    """All-gathers in the order of use: the root first, in backward layers alone (the root stays gathered)."""
    if not emitter.dp.fully_sharded:
        return None
    layers = [(unit.name, sum(unit_parameters((unit,)))) for unit in units if not unit.root]
    root = sum(unit_parameters(tuple(unit for unit in units if unit.root)))
    order = layers[::-1] if backward else ([("root", root)] if root else []) + layers
    return Gathers(emitter, order, dtype, ahead=backward)


def forward_segment(shape: RankShape, stage: StageShape, dp: DataParallel) -> Segment:
    """Forward of one micro-batch on one stage."""
    return _forward(shape, stage, dp if dp.fully_sharded else _SILENT)


def backward_segment(
    shape: RankShape, stage: StageShape, dp: DataParallel, recompute: str, accumulate: bool, synchronise: bool
) -> Segment:
    """Backward of one micro-batch on one stage.

    Args:
        shape, stage, dp: The rank.
        recompute: ``none``, ``selective`` (the attention core again) or ``full`` (every layer's forward again).
        accumulate: Whether gradients of an earlier micro-batch are there.
        synchronise: Whether this is the last micro-batch, whose gradients ZeRO stages 0 and 1 reduce.
    """
    talks = dp.size > 1 and (dp.zero_stage >= 2 or (synchronise and not dp.after_schedule))
    return _backward(shape, stage, dp if talks else _SILENT, recompute, accumulate, talks)


_SILENT = DataParallel()  # segments without data-parallel traffic are the same whatever the replicas


@lru_cache(maxsize=512)
def _forward(shape: RankShape, stage: StageShape, dp: DataParallel) -> Segment:
    units = stage_units(shape, stage)
    emitter = Emitter("forward", dp)
    gathers = _gathers(emitter, units, shape.dtype, backward=False)
    if gathers and any(unit.root for unit in units):
        gathers.arrive()
    for unit in units:
        if gathers and not unit.root:
            gathers.arrive()
            gathers.ask()  # the next layer's parameters travel while this one computes
        emitter.forward(unit.block, unit.name)
    return Segment(emitter.builder.build())


@lru_cache(maxsize=512)
def _backward(
    shape: RankShape, stage: StageShape, dp: DataParallel, recompute: str, accumulate: bool, synchronise: bool
) -> Segment:
    units = stage_units(shape, stage)
    megatron = shape.dtype != "fp32" and not dp.fully_sharded
    emitter = Emitter("backward", dp)
    gathers = _gathers(emitter, units, shape.dtype, backward=True)
    reducer = Reducer(emitter, shape.dtype, accumulate, synchronise)
    root_steps: list[tuple[Step, str]] = []
    for unit in reversed(units):
        if gathers and not unit.root:
            gathers.arrive()
            gathers.ask()
        again = _needed_again(unit.block, whole=megatron) if recompute == "full" and not unit.root else ()
        for step in reversed(unit.block):
            if again and step is again[-1]:
                emitter.forward(again, f"{unit.name}.again")
            name = f"{unit.name}.{step.name}"
            if recompute == "selective" and step.attention_core:
                for work in step.forward:
                    emitter.emit(work, f"{name}.again")
            for work in step.full_backward:
                emitter.emit(work, name)
            if gathers and step.name == "loss":
                gathers.ask()  # the last layer's parameters travel beside the head, which the loss is no part of
            if unit.root and dp.fully_sharded:
                root_steps.append((step, name))  # the root's gradients are reduced at the end
            else:
                reducer.ready(step, name)
        if not unit.root or not dp.fully_sharded:
            reducer.unit_done()
    for step, name in root_steps:
        reducer.ready(step, name)
    reducer.finish()
    return Segment(emitter.builder.build())


def _needed_again(block: Block, *, whole: bool) -> Block:
    """What full recomputation runs again, just before the backward of its last step.

    PyTorch's checkpoint (not ``whole``) stops at the last step that keeps something for its backward.
    """
    last = max(index for index, step in enumerate(block) if whole or step.saved_bytes)
    return block[: last + 1]


@lru_cache(maxsize=512)
def optimizer_segment(shape: RankShape, stage: StageShape, dp: DataParallel) -> Segment:
    """Gradients that are still to be summed, then fused AdamW on a rank's share of the parameters; ZeRO stages 1 and 2
    then gather them again."""
    units = stage_units(shape, stage)
    tensors = unit_parameters(units)
    shards = dp.size if dp.zero_stage else 1
    numel = sum(-(-tensor // shards) for tensor in tensors)
    emitter = Emitter("optimizer", dp)
    steps = [step for unit in units for step in unit.block]
    if shape.sequence_parallel:
        sum_replicated(emitter, shape, steps, dp.size if dp.fully_sharded else 1)
    if dp.after_schedule and dp.size > 1:
        sum_buckets(emitter, steps)
    emitter.emit(Op("adamw", (numel, len(tensors)), "fp32"), "adamw")
    if shape.dtype != "fp32":
        emitter.emit(Op("copy", (numel,), shape.dtype), "cast")
    if shards > 1 and dp.zero_stage < 3:
        gather = dp.collective("all_gather", sum(tensors) * DTYPE_BYTES[shape.dtype])
        emitter.block(gather, "dp", "parameters")
    return Segment(emitter.builder.build())
