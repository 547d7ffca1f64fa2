"""What follows the last backward of a stage: gradients still to be summed, the step, parameters gathered again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.caching import cached
from stepsight.dataset.op import DTYPE_BYTES, Op
from stepsight.dataset.specs import OptimizerSpec
from stepsight.simulator.blocks.shape import Group, RankShape
from stepsight.simulator.lowering.replicas import BUCKET_NAMES, FULL_GRADIENT_BYTES, Replicas, reduce_gradients
from stepsight.simulator.lowering.segment import DATA, SECOND, Segment, SegmentBuilder
from stepsight.simulator.lowering.sizes import PartShape
from stepsight.simulator.lowering.stage import part_units


@cached(2048)
def optimizer_segment(
    shape: RankShape,
    parts: tuple[PartShape, ...],
    replicas: Replicas,
    optimizer: OptimizerSpec,
    tied: Group,
) -> Segment:
    """Gradients that are still to be summed, then the optimizer on a rank's share of the parameters; ZeRO stages 1
    and 2 then gather them again.

    Args:
        shape, parts, replicas: The rank and all of the model that it holds.
        optimizer: What it runs.
        tied: First and last stage, where both hold the embedding's table and this is one of them.
    """
    tables = [_part_tensors(shape, part) for part in parts]
    numel_of, expert, replicated = (np.concatenate(column) for column in zip(*tables, strict=True))
    builder = SegmentBuilder("optimizer")
    if shape.sequence_parallel:
        own = -(-numel_of[replicated] // (replicas.shards if replicas.fully_sharded else 1))
        _sum_replicated(builder, shape, int(own.sum()))
    if tied.size > 1:
        table = shape.model.vocab // shape.vocab_tp * shape.model.hidden
        builder.block(tied.collective("all_reduce", table * replicas.gradient_bytes), DATA, "tied_embedding")
    if replicas.size > 1 and replicas.zero_stage < 2 and not replicas.overlap_gradients:
        _sum_buckets(builder, numel_of, expert, replicas)
    numel = int((-(-numel_of // np.where(expert, replicas.expert_shards, replicas.shards))).sum())
    num_tensors = len(numel_of)
    if shape.precision == "fp16" and numel:
        builder.items(_unscaled(shape, replicas, numel), "unscale")
    if optimizer.clip_grad_norm:
        builder.items([Op("grad_norm", (numel, num_tensors), "fp32")] if numel else [], "grad_norm")
        for group, name in ((replicas.groups.model, "grad_norm"), (replicas.groups.shard, "grad_norm.shards")):
            if group.size > 1 and (name == "grad_norm" or replicas.zero_stage):
                builder.block(group.collective("all_reduce", FULL_GRADIENT_BYTES), DATA, name)
        builder.items([Op("elementwise", (numel,), "fp32")] if numel else [], "clip")
    _step(builder, shape, optimizer, numel, num_tensors)
    sharded = max(replicas.shards, replicas.expert_shards) > 1
    if sharded and replicas.zero_stage < 3 and not replicas.overlap_parameters:
        size = DTYPE_BYTES[shape.dtype]
        groups = replicas.groups
        for group, experts, clock in ((groups.shard, False, DATA), (groups.experts, True, SECOND)):
            whole = int(numel_of[expert == experts].sum())
            if whole and group.size > 1:
                builder.block(group.collective("all_gather", whole * size), clock, "parameters")
    return builder.build()


def _unscaled(shape: RankShape, replicas: Replicas, numel: int) -> list[Op]:
    """Gradients of a scaled loss: to fp32 where they are not yet, divided by the scale and looked through for overflows
    (Megatron's ``Float16OptimizerWithFloat16Params`` and DeepSpeed's ``FP16_Optimizer``, 2021-22)."""
    casts = [] if replicas.gradient_bytes == FULL_GRADIENT_BYTES else [shape.op("cast", numel)]
    return [*casts, Op("elementwise", (numel,), "fp32")]


# Passes over all elements of foreach Adam: second moment, square root, bias correction, update.
_FOREACH = ("add", "elementwise", "add", "elementwise", "elementwise", "elementwise", "add")


def _step(builder: SegmentBuilder, shape: RankShape, optimizer: OptimizerSpec, numel: int, tensors: int) -> None:
    """Adam on some elements, and the cast of the result."""
    if not numel:
        return
    if optimizer.offload:
        builder.items([Op("to_host", (numel,), "fp32"), Op("adamw_host", (numel, tensors), "fp32")], "adamw")
        builder.items([Op("from_host", (numel,), shape.dtype)], "adamw")
        return
    if optimizer.fused:
        builder.items([Op("adamw", (numel, tensors), "fp32")], "adamw")
    else:
        decay = ("elementwise",) if optimizer.kind == "adamw" else ()
        builder.items([Op(kind, (numel,), "fp32") for kind in (*decay, *_FOREACH)], "adamw")
    if shape.precision != "fp32":
        builder.items([Op("cast", (numel,), shape.dtype)], "cast")


@cached(4096)
def _part_tensors(shape: RankShape, part: PartShape) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Elements of every parameter tensor of a part in forward order, and whether it is an expert's, and replicated."""
    columns = []
    for unit in part_units(shape, part):
        rows = [(numel, step.expert, step.replicated) for step in unit.block for numel in step.parameters]
        columns.append(np.tile(np.array(rows, dtype=np.int64).reshape(-1, 3), (unit.times, 1)))
    table = np.concatenate([np.zeros((0, 3), dtype=np.int64), *columns])
    return table[:, 0], table[:, 1] > 0, table[:, 2] > 0


def _sum_replicated(builder: SegmentBuilder, shape: RankShape, numel: int) -> None:
    """Sequence parallelism: each rank has a part of the gradients of norms and positions; one message sums them."""
    if numel:
        builder.items([Op("copy", (numel,), "fp32")], "replicated", own="copy_in")
        builder.items([shape.tp_comm("all_reduce", numel * FULL_GRADIENT_BYTES)], "replicated")
        builder.items([Op("copy", (numel,), "fp32")], "replicated", own="copy_out")


def _sum_buckets(
    builder: SegmentBuilder, tensors: NDArray[np.int64], experts: NDArray[np.bool_], replicas: Replicas
) -> None:
    """All gradients, bucket by bucket; eager: joined, summed, divided, put back."""
    for expert in (False, True):
        buckets: list[int] = []
        held = 0
        for tensor in tensors[experts == expert][::-1].tolist():
            held += tensor
            if held * replicas.gradient_bytes >= replicas.bucket_bytes:
                buckets, held = [*buckets, held], 0
        name = BUCKET_NAMES[expert]
        for index, numel in enumerate([*buckets, held] if held else buckets):
            if replicas.eager:
                builder.items([Op("copy", (numel,), "fp32")], name, index, "copy_in")
            reduce_gradients(builder, replicas, numel, index, expert=expert, wait=True)
            if replicas.eager:
                builder.items([Op("elementwise", (numel,), "fp32")], name, index, "mean")
                builder.items([Op("copy", (numel,), "fp32")], name, index, "copy_out")
