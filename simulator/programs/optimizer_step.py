"""The work after the last backward of a stage: remaining gradient sums, the optimizer step, all-gathers of
parameters.
"""

from __future__ import annotations

from typing import NamedTuple

from stepsight.dataset.base.caching import HashedTuple, cached
from stepsight.dataset.job.execution import StateSemantics
from stepsight.dataset.kinds.op import DTYPE_BYTES, Op
from stepsight.simulator.blocks.step import Group, RankShape
from stepsight.simulator.clock.engine import DATA, SECOND
from stepsight.simulator.programs.replicas import BUCKET_NAMES, Replicas, bucket_works, reduce_gradients
from stepsight.simulator.programs.segment import Segment, SegmentBuilder
from stepsight.simulator.programs.sizes import Parts
from stepsight.simulator.programs.stage import part_units


class OptimizerHabits(NamedTuple):
    """Sizes that the optimizer of a rank works on.

    Attributes:
        form: As ``ExecutionSemantics.optimizer``.
        decays: Whether weights decay (AdamW).
        clips: Whether the norm of all gradients is computed, and they are scaled.
        states: Of parameters and gradients.
    """

    form: str
    decays: bool
    clips: bool
    states: StateSemantics


@cached(2048)
def optimizer_segment(
    shape: RankShape, parts: Parts, replicas: Replicas, habits: OptimizerHabits, tied: Group
) -> Segment:
    """Sum the remaining gradients, then run the optimizer on a rank's share of the parameters; ZeRO stages 1 and 2 then
    all-gather the parameters.

    Args:
        shape, parts, replicas: The rank and all of the model that it holds.
        habits: What the optimizer does.
        tied: First and last stage, where both hold the embedding's table and this is one of them.
    """
    tensors = _tensors_of(shape, parts)
    builder = SegmentBuilder("optimizer")
    if shape.sequence_parallel:
        shards = replicas.shards if replicas.fully_sharded else 1
        _sum_replicated(builder, shape, _elements(tensors, (shards, shards), replicated=True)[0])
    if tied.size > 1:
        table = shape.model.vocab // shape.vocab_tp * shape.model.hidden
        builder.block(tied.collective("all_reduce", table * replicas.gradient_bytes), DATA, "tied_embedding")
    if replicas.size > 1 and replicas.zero_stage < 2 and not replicas.overlap_gradients:
        _sum_buckets(builder, shape, parts, replicas)
    numel, num_tensors = _elements(tensors, (replicas.shards, replicas.expert_shards))
    if habits.states.scales_loss and numel:
        builder.items(_unscaled(shape, habits.states, numel), "unscale")
    if habits.clips:
        builder.items([shape.main_op("grad_norm", numel, num_tensors)] if numel else [], "grad_norm")
        for group, name in ((replicas.groups.model, "grad_norm"), (replicas.groups.shard, "grad_norm.shards")):
            if group.size > 1 and (name == "grad_norm" or replicas.zero_stage):
                builder.block(group.collective("all_reduce", shape.main_bytes), DATA, name)
        builder.items([shape.main_op("elementwise", numel)] if numel else [], "clip")
    _step(builder, shape, habits, numel, num_tensors)
    sharded = max(replicas.shards, replicas.expert_shards) > 1
    if sharded and replicas.zero_stage < 3 and not replicas.overlap_parameters:
        size = DTYPE_BYTES[shape.dtype]
        groups = replicas.groups
        for group, experts, clock in ((groups.shard, False, DATA), (groups.experts, True, SECOND)):
            whole = sum(t.times * t.numel for t in tensors if t.expert == experts)
            if whole and group.size > 1:
                builder.block(group.collective("all_gather", whole * size), clock, "parameters")
    return builder.build()


def _unscaled(shape: RankShape, states: StateSemantics, numel: int) -> list[Op]:
    """Gradients of a scaled loss: cast to the main type, divide by the scale, and check for overflows.

    As Megatron's ``Float16OptimizerWithFloat16Params`` and DeepSpeed's ``FP16_Optimizer`` of 2021-22 do.
    """
    casts = [] if states.gradient_dtype == shape.kernels.main_dtype else [shape.op("cast", numel)]
    return [*casts, shape.main_op("elementwise", numel)]


# Passes over all elements of foreach Adam: second moment, square root, bias correction, update.
_FOREACH = ("add", "elementwise", "add", "elementwise", "elementwise", "elementwise", "add")


def _step(builder: SegmentBuilder, shape: RankShape, habits: OptimizerHabits, numel: int, tensors: int) -> None:
    """Adam on some elements, and the cast of the result."""
    if not numel:
        return
    if habits.form == "host":
        builder.items([shape.main_op("to_host", numel), shape.main_op("adamw_host", numel, tensors)], "adamw")
        builder.items([shape.op("from_host", numel)], "adamw")
        return
    if habits.form == "fused":
        builder.items([shape.main_op("adamw", numel, tensors)], "adamw")
    else:
        decay = ("elementwise",) if habits.decays else ()
        builder.items([shape.main_op(kind, numel) for kind in (*decay, *_FOREACH)], "adamw")
    if habits.states.main_copy and shape.casts:
        builder.items([shape.op("cast", numel)], "cast")


class _Tensors(NamedTuple):
    """Parameter tensors of a rank with equal properties.

    Attributes:
        numel: Elements of each.
        expert, replicated: As in ``Step``.
        times: How many.
    """

    numel: int
    expert: bool
    replicated: bool
    times: int


@cached(8192)
def _elements(tensors: HashedTuple[_Tensors], shards: tuple[int, int], *, replicated: bool = False) -> tuple[int, int]:
    """Elements of a rank's share of some tensors, and their number."""
    counted = [t for t in tensors if t.replicated or not replicated]
    return sum([t.times * -(-t.numel // shards[t.expert]) for t in counted]), sum([t.times for t in counted])


@cached(4096)
def _tensors_of(shape: RankShape, parts: Parts) -> HashedTuple[_Tensors]:
    """Distinct parameter tensors of some parts."""
    found: dict[tuple[int, bool, bool], int] = {}
    for part in parts:
        for unit in part_units(shape, part):
            for step in unit.block:
                for numel in step.parameters:
                    key = numel, step.expert, step.replicated
                    found[key] = found.get(key, 0) + unit.times
    return HashedTuple([_Tensors(*key, count) for key, count in found.items()])


def _sum_replicated(builder: SegmentBuilder, shape: RankShape, numel: int) -> None:
    """Sequence parallelism: each rank has a part of the gradients of norms and positions; one all-reduce sums them."""
    if numel:
        builder.items([shape.main_op("copy", numel)], "replicated", own="copy_in")
        builder.items([shape.tp_comm("all_reduce", numel * shape.main_bytes)], "replicated")
        builder.items([shape.main_op("copy", numel)], "replicated", own="copy_out")


def _sum_buckets(builder: SegmentBuilder, shape: RankShape, parts: Parts, replicas: Replicas) -> None:
    """Sum all gradients bucket by bucket; with copies: join, sum, divide and copy back."""
    steps = [
        step
        for part in reversed(parts)
        for unit in reversed(part_units(shape, part))
        for step in unit.block[::-1] * unit.times
    ]
    for expert in (False, True):
        tensors = [n for step in steps if step.expert == expert for n in step.parameters]
        buckets: list[int] = []
        held = 0
        for tensor in tensors:
            held += tensor
            if held * replicas.gradient_bytes >= replicas.bucket_bytes:
                buckets.append(held)
                held = 0
        if held:
            buckets.append(held)
        name = BUCKET_NAMES[expert]
        for index, numel in enumerate(buckets):
            if replicas.bucket_copies:
                builder.items([shape.main_op("copy", numel)], name, index, "copy_in")
            reduce_gradients(builder, bucket_works(replicas, numel, expert=expert), index, expert=expert, wait=True)
            if replicas.bucket_copies:
                builder.items([shape.main_op("elementwise", numel)], name, index, "mean")
                builder.items([shape.main_op("copy", numel)], name, index, "copy_out")
