"""The work of ranks and the links between their stages, without the order of micro-batches.

Strategies that differ only in that order share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import HashedTuple, cached
from stepsight.dataset.job.execution import StateSemantics
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective
from stepsight.simulator.blocks.step import Group, RankShape
from stepsight.simulator.clock.engine import DATA, SECOND
from stepsight.simulator.clock.track import FIRST, LAST, Track
from stepsight.simulator.programs.block_pass import BACKWARD as WHOLE
from stepsight.simulator.programs.block_pass import FORWARD as FORWARDS
from stepsight.simulator.programs.block_pass import INPUT, WEIGHT
from stepsight.simulator.programs.replicas import BUCKET_NAMES, Replicas, bucket_works, reduce_gradients
from stepsight.simulator.programs.segment import Segment, SegmentBuilder
from stepsight.simulator.programs.sizes import Layout, Parts, PartShape, boundary_bytes
from stepsight.simulator.programs.stage import Pass, calls_of, part_segments, part_units
from stepsight.simulator.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KIND_NAMES

Ints = NDArray[np.int32]
Placement = HashedTuple[int]  # the stage of each part of the model, in its order


@cached(1024)
def meeting_stages(placement: Placement, tied: Group, *, all_meet: bool) -> Ints:
    """Group of each stage: stages of one group wait for each other before the optimizer; shape ``(num_stages,)``.

    All meet for the norm of all gradients, two for a shared table.
    """
    num_stages = max(placement) + 1
    if all_meet:
        return np.zeros(num_stages, dtype=np.int32)
    meets = np.arange(num_stages, dtype=np.int32)
    if tied.size > 1:
        meets[placement[-1]] = meets[placement[0]]
    return meets


@cached(4096)
def part_messages(
    shape: RankShape, parts: Parts, layout: Layout, placement: Placement
) -> tuple[tuple[Collective, ...], tuple[int, ...]]:
    """Distinct messages between stages, and the message after each part, -1 if none."""
    near = [0 if a == b else layout.pipeline_neighbours(a, b) for a, b in pairwise(placement)]  # 2: within a node
    kinds = list(zip(boundary_bytes(shape, parts), near, strict=True))
    distinct = {kind: index for index, kind in enumerate(dict.fromkeys(kind for kind in kinds if kind[1]))}
    messages = tuple(Collective("send_recv", size, 2, near) for size, near in distinct)
    return messages, tuple([distinct.get(kind, -1) for kind in kinds])


@cached(1024)
def message_kinds(track: Track, after_part: tuple[int, ...]) -> Ints:
    """Kind of each message of a track, from the kinds after each part; shape ``(num_messages,)``."""
    if not track.num_messages or max(after_part) == 0:
        return np.zeros(track.num_messages, dtype=np.int32)
    kinds: Ints = np.array(after_part, dtype=np.int32)
    return np.asarray(kinds[np.minimum(track.part[track.source], track.part[track.target])])


LABELS = {FORWARD: FORWARDS, BACKWARD: WHOLE, BACKWARD_INPUT: INPUT, BACKWARD_WEIGHT: WEIGHT}


class Rank(NamedTuple):
    """Everything that the work of a job's ranks depends on, except the schedule.

    ``recompute``: and ``recompute_every`` of ``ParallelSpec``; ``habits``: what the optimizer does.
    """

    shape: RankShape
    parts: Parts
    layout: Layout
    replicas: Replicas
    recompute: tuple[str, int]
    habits: OptimizerHabits


class RankWork(NamedTuple):
    """The work of a job's ranks: fields of ``Lowered``, and the index of the message after each part, -1 if none."""

    segments: tuple[Segment, ...]
    table: Ints
    optimizer: Ints
    messages: tuple[Collective, ...]
    meets: Ints
    after_part: tuple[int, ...]


@cached(512)
def passes_of(track: Track) -> tuple[tuple[Pass, ...], tuple[int, ...]]:
    """Distinct passes of a track's actions, and their positions in a part's row of ``Lowered.table``."""
    places = tuple(np.unique(track.kind * 3 + track.turn).tolist())
    alone = track.schedule.num_micro_batches == 1
    kinds = [divmod(place, 3) for place in places]
    return tuple([Pass(LABELS[kind], turn == FIRST or alone, turn == LAST) for kind, turn in kinds]), places


@cached(512)
def placement_of(track: Track) -> Placement:
    """The stage of each part; equal placements are one object."""
    return _shared_placement(tuple(track.schedule.placement[:, 0].tolist()))


_shared_placement = cached(512)(HashedTuple)


@cached(2048)
def rank_work(rank: Rank, placement: Placement, passes: tuple[tuple[Pass, ...], tuple[int, ...]]) -> RankWork:
    """Make the work of a job's ranks; ``placement``: the stage of each part; ``passes``: from ``passes_of``."""
    shape, parts, replicas = rank.shape, rank.parts, rank.replicas
    held = _held(placement, parts)
    calls = calls_of(shape.kernels, replicas, rank.recompute, passes[0])
    numbers: dict[Segment, int] = {}  # by identity: equal segments are one object because their makers are cached
    of_parts = []
    for part in held.rows:
        own = part_segments(shape, part, calls)
        of_parts.append(tuple([numbers.setdefault(segment, len(numbers)) for segment in own]))
    first, last = placement[0], placement[-1]
    tied = Group()  # the two ranks in different stages that hold the same embedding table
    if first != last and shape.model.tied_embeddings:
        tied = Group(2, rank.layout.pipeline_neighbours(first, last))
    segments = [
        optimizer_segment(shape, own, replicas, rank.habits, tied if ends and tied.size > 1 else Group())
        for own, ends in held.distinct
    ]
    optimizers = tuple([numbers.setdefault(segment, len(numbers)) for segment in segments])
    table, optimizer = _tables(held, passes[1], tuple(of_parts), optimizers)
    messages, after_part = part_messages(shape, parts, rank.layout, placement)
    meets = meeting_stages(placement, tied, all_meet=rank.habits.clips)
    return RankWork(tuple(numbers), table, optimizer, messages, meets, after_part)


@dataclass(frozen=True, eq=False)
class _Held:
    """The distinct parts of the model, and the row of each part; what distinct stages hold, with whether the model's
    first or last part is among it, and which of these each stage is.
    """

    rows: tuple[PartShape, ...]
    row: Ints
    distinct: tuple[tuple[Parts, bool], ...]
    of_stage: Ints


@cached(512)
def _held(placement: Placement, parts: Parts) -> _Held:
    rows: dict[PartShape, int] = {}
    row = [rows.setdefault(part, len(rows)) for part in parts]
    held: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for part, stage in enumerate(placement):
        held[stage].append(part)
    distinct: dict[tuple[Parts, bool], int] = {}
    of_stage = []
    for own in held:
        ends = any(parts[part].first or parts[part].last for part in own)
        of_stage.append(distinct.setdefault((Parts([parts[part] for part in own]), ends), len(distinct)))
    return _Held(tuple(rows), np.array(row), tuple(distinct), np.array(of_stage))


@cached(2048)
def _tables(
    held: _Held, places: tuple[int, ...], of_parts: tuple[tuple[int, ...], ...], optimizers: tuple[int, ...]
) -> tuple[Ints, Ints]:
    """``Lowered.table`` and ``optimizer``, one object for all jobs that are alike in these."""
    table = np.zeros((len(held.rows), len(KIND_NAMES) * 3), dtype=np.int32)
    table[:, list(places)] = of_parts
    return table[held.row].ravel(), np.array(optimizers, dtype=np.int32)[held.of_stage]


class OptimizerHabits(NamedTuple):
    """What the optimizer of a rank does: its form, as ``ExecutionSemantics.optimizer`` or ``PASSES``; whether weights
    decay (AdamW); whether gradients are clipped by their norm; types of parameters and gradients.
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
    all-gather the parameters.  ``tied``: first and last stage, where both hold the embedding's table.
    """
    tensors = _tensors_of(shape, parts)
    builder = SegmentBuilder("optimizer")
    if shape.sequence_parallel:
        shards = replicas.shards if replicas.fully_sharded else 1
        numel, _ = _elements(tensors, (shards, shards), replicated=True)  # each rank has a part of these gradients
        if numel:
            builder.items([shape.main_op("copy", numel)], "replicated", own="copy_in")
            builder.items([shape.tp_comm("all_reduce", numel * shape.main_bytes)], "replicated")
            builder.items([shape.main_op("copy", numel)], "replicated", own="copy_out")
    if tied.size > 1:
        table = shape.model.vocab // shape.vocab_tp * shape.model.hidden
        builder.block(tied.collective("all_reduce", table * replicas.gradient_bytes), DATA, "tied_embedding")
    if replicas.size > 1 and replicas.zero_stage < 2 and not replicas.overlap_gradients:
        if replicas.by_rank and replicas.zero_stage:
            whole = sum(t.times * t.numel for t in tensors if not t.expert)
            _once_a_rank(builder, replicas.groups.shard, whole * replicas.gradient_bytes, BUCKET_NAMES[False])
        else:
            _sum_buckets(builder, shape, parts, replicas)
    numel, num_tensors = _elements(tensors, (replicas.shards, replicas.expert_shards))
    if (
        habits.states.scales_loss and numel and habits.form not in PASSES
    ):  # cast to the main type, divide, check for overflows (``FP16_Optimizer``)
        casts = [] if habits.states.gradient_dtype == shape.kernels.main_dtype else [shape.op("cast", numel)]
        builder.items([*casts, shape.main_op("elementwise", numel)], "unscale")
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
            if replicas.by_rank and not experts:
                _once_a_rank(builder, group, whole * size, "parameters")
            elif whole and group.size > 1:
                builder.block(group.collective("all_gather", whole * size), clock, "parameters")
    return builder.build()


def _once_a_rank(builder: SegmentBuilder, group: Group, num_bytes: int, name: str) -> None:
    """Each rank's share in a message of its own; its reduction to the rank takes as long as its broadcast."""
    for rank in range(group.size if group.size > 1 and num_bytes else 0):
        builder.block(group.collective("broadcast", -(-num_bytes // group.size)), DATA, name, rank)


# Passes over all elements of one kernel: parameter and gradient, with AdaGrad a state.
PASSES = {"sgd": ("add",), "adagrad": ("add", "elementwise")}
# Of foreach Adam: second moment, square root, bias correction, update.
_FOREACH = ("add", "elementwise", "add", "elementwise", "elementwise", "elementwise", "add")


def _step(builder: SegmentBuilder, shape: RankShape, habits: OptimizerHabits, numel: int, tensors: int) -> None:
    """The optimizer's step of some elements, and the cast of the result."""
    if not numel:
        return
    if habits.form == "host":
        builder.items([shape.main_op("to_host", numel), shape.main_op("adamw_host", numel, tensors)], "adamw")
        builder.items([shape.op("from_host", numel)], "adamw")
        return
    if habits.form == "fused":
        builder.items([shape.main_op("adamw", numel, tensors)], "adamw")
    elif habits.form in PASSES:
        builder.items([shape.main_op(kind, numel) for kind in PASSES[habits.form]], habits.form)
    else:
        decay = ("elementwise",) if habits.decays else ()
        builder.items([shape.main_op(kind, numel) for kind in (*decay, *_FOREACH)], "adamw")
    if habits.states.main_copy and shape.casts:
        builder.items([shape.op("cast", numel)], "cast")


class _Tensors(NamedTuple):
    """Parameter tensors of a rank: elements of each, ``expert`` and ``replicated`` as in ``Step``, and how many."""

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
