"""What one pipeline stage runs for a micro-batch: forward and backward segments of its parts of the model.

What an engine does beside the blocks is in ``dataset.execution``.  With autograd's accumulation, gradients are added by
one ``add`` for each parameter tensor, and DDP scales each into its bucket (``copy``), which it sends once it holds
``bucket_mbytes`` (an explicit size leaves no smaller first bucket).  All-gathers carry parameters in the training type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from stepsight.dataset.caching import cached
from stepsight.dataset.op import DTYPE_BYTES
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Step
from stepsight.simulator.lowering.buckets import BucketPlan, Repeated, send_buckets
from stepsight.simulator.lowering.gathers import FullUnit, Gathers
from stepsight.simulator.lowering.part_units import Unit, full_unit, one_by_one, part_units, passage_of
from stepsight.simulator.lowering.passages import BACKWARD, INPUT, WEIGHT, BackwardSpec, Passage
from stepsight.simulator.lowering.replicas import BUCKET_NAMES, SILENT, Replicas, reduce_gradients
from stepsight.simulator.lowering.segment import DATA, SECOND, Segment, SegmentBuilder
from stepsight.simulator.lowering.sizes import PartShape


@dataclass(frozen=True, slots=True)
class Recompute:
    """What backward runs again: ``none``, ``selective`` or ``full``; with ``full``, every n-th layer."""

    kind: str = "none"
    every: int = 1


def forward_segment(shape: RankShape, part: PartShape, replicas: Replicas, first: bool) -> Segment:
    """Forward of one micro-batch on one part; ``first``: the first of an iteration."""
    gathers = replicas.fully_sharded and (replicas.gathering.reshard or first)
    updates = replicas.overlap_parameters and replicas.zero_stage in (1, 2) and replicas.shards > 1 and first
    return _forward(shape, part, replicas if gathers or updates else SILENT)


@cached(2048)
def _forward(shape: RankShape, part: PartShape, replicas: Replicas) -> Segment:
    units = part_units(shape, part)
    joined = replicas.fully_sharded and not replicas.beside
    builder = SegmentBuilder("forward", replicas.compute_share, joined)
    if replicas.size == 1:
        for unit in units:
            builder.run(passage_of(unit.block), unit.name, unit.first, times=unit.times)
    elif replicas.fully_sharded:
        gathers = _gathers(builder, units, shape, replicas, backward=False)
        if any(unit.root for unit in units):
            gathers.arrive()
        for unit in units:
            passage, turn = passage_of(unit.block), 0
            while turn < unit.times:
                since, number = builder.num_events, unit.first + turn
                if not unit.root:
                    gathers.arrive()
                    gathers.ask()  # the next layers' parameters travel while this one computes
                builder.run(passage, unit.name, number)
                turn += 1 + _repeat(builder, gathers, unit, since, unit.times - turn - 1, 1)
    else:  # the optimizer's shards, each waited for where it is used
        sent = []
        for unit, number in one_by_one(units):
            sent.append(_send_parameters(builder, full_unit([unit], unit.name), number, shape, replicas))
        for (unit, number), events in zip(one_by_one(units), sent, strict=True):
            for event in events:
                builder.wait(event)
            builder.run(passage_of(unit.block), unit.name, number)
    return builder.build()


def _repeat(builder: SegmentBuilder, gathers: Gathers, unit: Unit, since: int, most: int, step: int) -> int:
    """Do again what was done for a layer since an event, as often as all stays alike; returns how often."""
    times = 0 if unit.root else min(most, gathers.alike())
    if times > 0:
        gathers.skip(times, builder.repeat(since, times, step))
    return max(times, 0)


def _send_parameters(
    builder: SegmentBuilder, full: FullUnit, number: int, shape: RankShape, replicas: Replicas
) -> list[int]:
    groups, size = replicas.groups, DTYPE_BYTES[shape.dtype]
    sent = []
    for group, numel, clock in ((groups.shard, full.numel, DATA), (groups.experts, full.expert_numel, SECOND)):
        if group.size > 1 and numel:
            work = group.collective("all_gather", numel * size)
            sent.append(builder.send(work, clock, f"{full.name}.parameters", number, early=True))
    return sent


def _gathers(
    builder: SegmentBuilder, units: tuple[Unit, ...], shape: RankShape, replicas: Replicas, *, backward: bool
) -> Gathers:
    """All-gathers in the order of use: the root first, in backward layers alone (the root stays gathered)."""
    sizes = {id(unit): full_unit([unit], unit.name) for unit in units}
    layers = [(sizes[id(unit)], number) for unit, number in one_by_one(units) if not unit.root]
    root = full_unit([unit for unit in units if unit.root], "root")
    order = layers[::-1] if backward else ([(root, 0)] if root.numel else []) + layers
    early = not backward and not replicas.gathering.reshard  # nothing has to be freed before
    return Gathers(builder, replicas, order, shape.dtype, ahead=backward, early=early)


def backward_segment(
    shape: RankShape,
    part: PartShape,
    replicas: Replicas,
    recompute: Recompute,
    *,
    accumulate: bool,
    last: bool,
    label: str = BACKWARD,
) -> Segment:
    """Backward of one micro-batch on one part.

    Args:
        shape, part, replicas, recompute: The rank.
        accumulate: Whether gradients of an earlier micro-batch are there.
        last: Whether this is the part's last micro-batch.
        label: ``backward``, or ``input`` or ``weight`` for its halves.
    """
    gathers = replicas.fully_sharded and replicas.gathering.reshard
    reduces = replicas.reduces(last) and label != INPUT
    who = replicas if (gathers and label != WEIGHT) or reduces else SILENT
    kernels, weights = shape.kernels, label != INPUT
    adds = weights and kernels.accumulation == "autograd" and not replicas.accumulates_shards
    spec = BackwardSpec(
        label,
        recompute.kind,
        whole=kernels.whole_layers_again and not replicas.fully_sharded,
        accumulate=accumulate and adds,
        bucket=reduces and replicas.bucket_copies and replicas.zero_stage < 2,
        dtype=kernels.main_dtype,
    )
    return _backward(shape, part, who, spec, _Duties(recompute.every, gathers, reduces, accumulate and reduces))


class _Duties(NamedTuple):
    """What a backward segment does beside its passages.

    Attributes:
        every: As in ``Recompute``.
        gathers: Whether parameters are gathered again (FSDP).
        reduces: Whether gradients are sent.
        accumulates: Whether sums are then added to those of earlier micro-batches.
    """

    every: int
    gathers: bool
    reduces: bool
    accumulates: bool


@cached(4096)
def _backward(shape: RankShape, part: PartShape, replicas: Replicas, spec: BackwardSpec, duties: _Duties) -> Segment:
    if duties.reduces and replicas.zero_stage < 2:
        return send_buckets(_bucket_plan(shape, part, duties.every, spec), replicas)
    units = part_units(shape, part, duties.every)
    joined = replicas.fully_sharded and not replicas.beside
    builder = SegmentBuilder(spec.part, replicas.compute_share if replicas.size > 1 else 0.0, joined)
    passages = _backwards(units, spec)
    if replicas.fully_sharded and duties.gathers and spec.part != WEIGHT:
        _run_gathered(builder, passages, shape, replicas, duties)
    elif duties.reduces:
        _run_by_unit(builder, passages, shape, replicas, duties.accumulates)
    else:
        for unit, passage in passages:
            builder.run(passage, unit.name, unit.first + unit.times - 1, -1, times=unit.times)
    return builder.build()


def _backwards(units: tuple[Unit, ...], spec: BackwardSpec) -> list[tuple[Unit, Passage]]:
    return [(unit, passage_of(unit.block, _spec_for(unit, spec))) for unit in reversed(units)]


@cached(4096)
def _bucket_plan(shape: RankShape, part: PartShape, every: int, spec: BackwardSpec) -> BucketPlan:
    passages = _backwards(part_units(shape, part, every), spec)
    in_order = [Repeated(p, unit.times, unit.name, unit.first + unit.times - 1) for unit, p in passages]
    return BucketPlan.of(spec.part, in_order)


def _spec_for(unit: Unit, spec: BackwardSpec) -> BackwardSpec:
    if spec.recompute == "full" and (unit.root or not unit.again):
        return replace(spec, recompute="none", whole=False)
    return spec


def _run_gathered(
    builder: SegmentBuilder,
    passages: list[tuple[Unit, Passage]],
    shape: RankShape,
    replicas: Replicas,
    duties: _Duties,
) -> None:
    """FSDP: layers are gathered before they are used; the root's gradients are reduced at the end."""
    units = tuple(unit for unit, _ in reversed(passages))
    gathers = _gathers(builder, units, shape, replicas, backward=True)
    root: list[Step] = []
    for unit, passage in passages:
        if unit.root:
            loss = _nodes_of_first_step(passage) if unit.name == "head" else 0
            builder.run(passage, unit.name, nodes=(0, loss))
            if loss:
                gathers.ask()  # the last layer's parameters travel beside the head, which the loss is no part of
            builder.run(passage, unit.name, nodes=(loss, passage.num_nodes))
            root += reversed(unit.block)
            continue
        steps, turn = list(reversed(unit.block)), 0
        while turn < unit.times:
            since, number = builder.num_events, unit.first + unit.times - 1 - turn
            gathers.arrive()
            gathers.ask()
            builder.run(passage, unit.name, number, -1)
            if duties.reduces:  # buckets are numbered as the layers
                _reduce_unit(builder, shape, replicas, steps, (number, duties.accumulates))
            turn += 1 + _repeat(builder, gathers, unit, since, unit.times - turn - 1, -1)
    if duties.reduces and root:
        number = sum(unit.times for unit in units if not unit.root)
        _reduce_unit(builder, shape, replicas, root, (number, duties.accumulates))


def _nodes_of_first_step(passage: Passage) -> int:
    names = [name for _, name in passage.items]
    return next((i for i, name in enumerate(names) if name != names[0]), len(names))


def _run_by_unit(
    builder: SegmentBuilder,
    passages: list[tuple[Unit, Passage]],
    shape: RankShape,
    replicas: Replicas,
    accumulate: bool,
) -> None:
    """Gradients are scattered unit by unit."""
    for unit, passage in passages:
        since, newest = builder.num_events, unit.first + unit.times - 1
        builder.run(passage, unit.name, newest, -1)
        _reduce_unit(builder, shape, replicas, list(reversed(unit.block)), (newest, accumulate))
        if unit.times > 1:
            builder.repeat(since, unit.times - 1, -1)


def _reduce_unit(
    builder: SegmentBuilder, shape: RankShape, replicas: Replicas, steps: list[Step], how: tuple[int, bool]
) -> None:
    """Reduce the gradients of some steps; ``how``: the bucket's number, whether sums are added to earlier ones."""
    number, accumulate = how
    for expert in (False, True):
        tensors = [numel for step in steps if step.expert == expert for numel in step.parameters]
        if not tensors:
            continue
        name, numel = BUCKET_NAMES[expert], sum(tensors)
        if replicas.zero_stage == 3:
            builder.items([shape.main_op("copy", numel)], name, number, "copy_in")
        wait = replicas.zero_stage == 3 and not replicas.beside
        reduce_gradients(builder, replicas, numel, number, expert=expert, wait=wait)
        if accumulate and replicas.accumulates_shards:
            shards = replicas.expert_shards if expert else replicas.shards
            adds = [shape.main_op("add", -(-tensor // shards)) for tensor in reversed(tensors)]  # as declared
            builder.items(adds, name, number, "accumulate")
