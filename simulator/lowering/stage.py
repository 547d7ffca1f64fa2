"""What one pipeline stage runs for a micro-batch: forward and backward segments of its parts of the model.

What an engine does beside the blocks is in ``dataset.execution``.  With autograd's accumulation, gradients are added by
one ``add`` for each parameter tensor, and DDP scales each into its bucket (``copy``), which it sends once it holds
``bucket_mbytes`` (an explicit size leaves no smaller first bucket).  All-gathers carry parameters in the training type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from stepsight.dataset.caching import cached
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.lowering.buckets import BucketPlan, Repeated, send_buckets
from stepsight.simulator.lowering.part_plan import Duties, backward_plan, forward_plan
from stepsight.simulator.lowering.part_units import Unit, part_units, passage_of
from stepsight.simulator.lowering.passages import BACKWARD, INPUT, WEIGHT, BackwardSpec, Passage
from stepsight.simulator.lowering.replicas import SILENT, Replicas
from stepsight.simulator.lowering.segment import Segment
from stepsight.simulator.lowering.sizes import PartShape
from stepsight.simulator.lowering.slot_work import SlotWork
from stepsight.simulator.lowering.slots import UnitPattern


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


@cached(4096)
def _forward(shape: RankShape, part: PartShape, replicas: Replicas) -> Segment:
    run = _part_run(shape, part, 1, None)
    plan = forward_plan(run.patterns, replicas.pattern)
    return plan.filled(SlotWork(shape, run.units, run.passages, replicas).of)


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
    return _backward(shape, part, who, spec, Duties(recompute.every, gathers, reduces, accumulate and reduces))


@cached(8192)
def _backward(shape: RankShape, part: PartShape, replicas: Replicas, spec: BackwardSpec, duties: Duties) -> Segment:
    if duties.reduces and replicas.zero_stage < 2:
        return send_buckets(_bucket_plan(shape, part, duties.every, spec), replicas)
    run = _part_run(shape, part, duties.every, spec)
    plan = backward_plan(run.patterns, replicas.pattern, spec.part, duties)
    return plan.filled(SlotWork(shape, run.units, run.passages, replicas).of)


class _PartRun(NamedTuple):
    """A part's units in forward order, the passage of each, and what plans read of both."""

    units: tuple[Unit, ...]
    passages: tuple[Passage, ...]
    patterns: tuple[UnitPattern, ...]


@cached(4096)
def _part_run(shape: RankShape, part: PartShape, every: int, spec: BackwardSpec | None) -> _PartRun:
    """``spec``: of the backward; None: the forward."""
    units = part_units(shape, part, every)
    passages = tuple([passage_of(u.block, None if spec is None else _spec_for(u, spec)) for u in units])
    patterns = [_pattern(at, *run) for at, run in enumerate(zip(units, passages, strict=True))]
    return _PartRun(units, passages, tuple(patterns))


def _pattern(index: int, unit: Unit, passage: Passage) -> UnitPattern:
    loss = _loss_nodes(passage) if unit.name == "head" else 0
    tensors = len(unit.tensors), len(unit.expert_tensors)
    there = unit.numel > 0, unit.expert_numel > 0
    return UnitPattern(index, unit.name, unit.first, unit.times, unit.root, passage.num_nodes, loss, tensors, *there)


def _loss_nodes(passage: Passage) -> int:
    """Nodes of a head's first step in backward, which is the loss."""
    names = [name for _, name in passage.items]
    return next((i for i, name in enumerate(names) if name != names[0]), len(names))


@cached(4096)
def _bucket_plan(shape: RankShape, part: PartShape, every: int, spec: BackwardSpec) -> BucketPlan:
    run = _part_run(shape, part, every, spec)
    pairs = zip(run.units[::-1], run.passages[::-1], strict=True)
    in_order = [Repeated(p, unit.times, unit.name, unit.first + unit.times - 1) for unit, p in pairs]
    return BucketPlan.of(spec.part, in_order)


def _spec_for(unit: Unit, spec: BackwardSpec) -> BackwardSpec:
    if spec.recompute == "full" and (unit.root or not unit.again):
        return replace(spec, recompute="none", whole=False)
    return spec
