"""Lower a job to the things that have to be timed: distinct segments, the actions that run them, and messages between
stages.

The work of ranks and the links between their stages do not depend on the order of micro-batches: strategies that differ
only in that order share them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import HashedTuple, cached
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.execution import ExecutionSemantics, StateSemantics, semantics_of
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective, Op
from stepsight.simulator.blocks.step import Group, RankShape
from stepsight.simulator.clock.engine import DATA, SECOND
from stepsight.simulator.clock.track import Track, find_track
from stepsight.simulator.programs import sizes
from stepsight.simulator.programs.block_pass import BACKWARD as WHOLE
from stepsight.simulator.programs.block_pass import FORWARD as FORWARDS
from stepsight.simulator.programs.block_pass import INPUT, WEIGHT
from stepsight.simulator.programs.segment import BUCKET_NAMES, Segment, SegmentBuilder
from stepsight.simulator.programs.stage import Pass, calls_of, part_segments, part_units
from stepsight.simulator.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KIND_NAMES
from stepsight.simulator.schedules.order import FIRST, LAST

Ints = NDArray[np.int32]
_RankWork = tuple[tuple[Segment, ...], Ints, Ints, tuple[Collective, ...], Ints]  # the first fields of Lowered
Placement = HashedTuple[int]  # the stage of each part of the model, in its order
LABELS = {FORWARD: FORWARDS, BACKWARD: WHOLE, BACKWARD_INPUT: INPUT, BACKWARD_WEIGHT: WEIGHT}


@dataclass(frozen=True, eq=False)
class Lowered:
    """One iteration of a job; each distinct thing is stored once."""

    segments: tuple[Segment, ...]  # distinct segments of the parts of the model, and the stages' optimizers
    table: Ints  # index into segments of what each part runs in each kind and turn (see place)
    optimizer: Ints  # likewise of each stage's optimizer, shape (num_stages,)
    messages: tuple[Collective, ...]  # distinct point-to-point messages between stages
    meets: Ints  # stages with equal numbers start their optimizers together, shape (num_stages,)
    track: Track  # the schedule's actions, and the messages between stages, in one order that can run
    message: Ints  # index into messages of each of the track's, shape (num_messages,)
    shape: RankShape
    parts: tuple[sizes.PartShape, ...]  # parts of the model in its order
    semantics: ExecutionSemantics  # of what executes the job

    @property
    def num_stages(self) -> int:
        return self.track.num_stages

    @property
    def place(self) -> Ints:
        """Position in ``table`` of each action, shape ``(num_actions,)``."""
        return _place(self.track)

    @cached_property
    def segment(self) -> Ints:
        """Index into ``segments`` of each action, shape ``(num_actions,)``."""
        return self.table[self.place]

    @property
    def num_micro_batches(self) -> int:
        return self.track.schedule.num_micro_batches

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        return tuple(segment.program for segment in self.segments)

    @cached_property
    def all_works(self) -> tuple[Op | Collective, ...]:
        """Distinct ops, then distinct collectives, messages included."""
        seen = dict.fromkeys([*(work for segment in self.segments for work in segment.works), *self.messages])
        return tuple(sorted(seen, key=lambda work: isinstance(work, Collective)))

    def program(self, label: str, stage: int = 0, micro_batch: int = 0) -> Program:
        """Segments that a stage runs for a micro-batch (``optimizer`` does not depend on the micro-batch)."""
        if label == "optimizer":
            return self.segments[int(self.optimizer[stage])].program
        track, kind = self.track, {name: kind for kind, name in LABELS.items()}[label]
        found = np.flatnonzero((track.stage == stage) & (track.kind == kind) & (track.micro_batch == micro_batch))
        return self.segments[int(self.segment[found[0]])].program


def lower(job: Job, hardware: Hardware) -> Lowered:
    """Lower a job to the segments that its ranks run on this hardware.

    Ranks of one stage are alike, so one stands for all.  Only the hardware's kind and ``comm_compute_share`` matter.
    """
    return _lower(_asked(job, hardware))


def signatures(job: Job, hardware: Hardware) -> tuple[set[Op], set[Collective]]:
    """Distinct ops and collectives of a job: the signatures whose durations a prediction needs."""
    works = lower(job, hardware).all_works
    return {w for w in works if isinstance(w, Op)}, {w for w in works if isinstance(w, Collective)}


@cached(512)
def iteration_flops(lowered: Lowered) -> tuple[float, float]:
    """FLOP of an iteration, needed by the model and executed (with recomputation): of one rank of each stage, summed
    over stages.

    A step needs no gradient of frozen weights, and none of an input before which nothing is trained (an image's too).
    """
    flops = np.array([segment.flops for segment in lowered.segments])
    units = [unit for part in lowered.parts for unit in part_units(lowered.shape, part)]
    needed = 0.0  # of a micro-batch
    for times, step in [(unit.times, step) for unit in units for step in unit.block]:
        forward, backward = (
            sum(item.flops for item in items if isinstance(item, Op) and item.record.bound == "compute")
            for items in (step.forward, step.full_backward)
        )
        needed += times * (forward + min(2.0 * forward, backward))  # gradients of input and weights
    return needed * lowered.num_micro_batches, float(flops[lowered.segment].sum())


def looked_up_bytes(lowered: Lowered) -> float:
    """Bytes that lookups in embedding tables read and write in an iteration: of one rank of each stage, summed."""
    return float(np.array([segment.looked_up_bytes for segment in lowered.segments])[lowered.segment].sum())


class _Asked(NamedTuple):
    """Everything that a lowered job depends on; jobs with equal values share one lowering."""

    schedule: tuple[str, int, int, int, str]  # positional arguments of find_track
    flushes: int
    zero: tuple[int, bool]  # the ZeRO stage, and whether there is a pipeline
    recompute: tuple[str, int]
    semantics: ExecutionSemantics
    optimizer: str
    shape: RankShape
    parts: sizes.Parts
    groups: sizes.Groups
    layout: sizes.Layout
    beside: bool
    share: float


def _asked(job: Job, hardware: Hardware) -> _Asked:
    beside, share = hardware.kind != "cpu", hardware.comm_compute_share
    semantics, p = semantics_of(job, hardware.kind), job.parallel
    return _Asked(
        (p.schedule, p.pp, job.num_micro_batches, p.virtual_stages, semantics.overlap.runtime),
        job.batch.flushes,
        (p.zero_stage, p.pp > 1),
        (p.recomputes, p.recompute_every),
        semantics,
        job.optimizer.kind,
        sizes.rank_shape(job, share if beside else 0.0, semantics),
        sizes.part_shapes(job),
        sizes.groups_of(job),
        sizes.layout_of(job),
        beside,
        share,
    )


# DeepSpeed 0.3 gathers ahead only while fewer elements than this are gathered (stage3_max_live_parameters).
_MOST_LIVE = 10**9


@cached(512)
def _lower(asked: _Asked) -> Lowered:
    shape, parts, overlap = asked.shape, asked.parts, asked.semantics.overlap
    track = find_track(*asked.schedule, flushes=asked.flushes)
    replicas = sizes.replicas_of(asked.zero, asked.groups, asked.semantics, beside=asked.beside, share=asked.share)
    if overlap.gathers_lists:
        layers = [unit for part in parts for unit in part_units(shape, part) if not unit.root]
        if max((numel for unit in layers for numel in unit.gathered(whole=True)[False]), default=0) >= _MOST_LIVE:
            replicas = replace(replicas, gathering=replace(replicas.gathering, prefetch=0))
    if overlap.by_rank and replicas.shards > 1:  # a rank's bucket that is never full is sent after the last backward
        numel = sum(unit.times * sum(unit.tensors[False]) for part in parts for unit in part_units(shape, part))
        full = numel // track.num_stages * replicas.gradient_bytes >= replicas.bucket_bytes * replicas.shards
        replicas = replace(replicas, overlap_gradients=replicas.overlap_gradients and full)
    form = asked.optimizer if asked.optimizer in PASSES else asked.semantics.optimizer
    habits = OptimizerHabits(form, asked.optimizer == "adamw", overlap.reads_norm, asked.semantics.states)
    rank = shape, parts, asked.layout
    work, after_part = rank_work(rank, replicas, asked.recompute, habits, placement_of(track), passes_of(track))
    return Lowered(*work, track, message_kinds(track, after_part), shape, parts, asked.semantics)


@cached(512)
def _place(track: Track) -> Ints:
    """Position of each action in a table of parts, kinds and turns."""
    return (track.part * len(KIND_NAMES) + track.kind) * 3 + track.turn


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


@cached(1024)
def message_kinds(track: Track, after_part: tuple[int, ...]) -> Ints:
    """Kind of each message of a track, from the kinds after each part; shape ``(num_messages,)``."""
    if not track.num_messages or max(after_part) == 0:
        return np.zeros(track.num_messages, dtype=np.int32)
    kinds: Ints = np.array(after_part, dtype=np.int32)
    return np.asarray(kinds[np.minimum(track.part[track.source], track.part[track.target])])


@cached(2048)
def rank_work(
    rank: tuple[RankShape, sizes.Parts, sizes.Layout],
    replicas: sizes.Replicas,
    recompute: tuple[str, int],
    habits: OptimizerHabits,
    placement: Placement,
    passes: tuple[tuple[Pass, ...], tuple[int, ...]],
) -> tuple[_RankWork, tuple[int, ...]]:
    """Make the work of a job's ranks: the first fields of ``Lowered``, and the message after each part, -1 if none.

    ``recompute``: and ``recompute_every`` of ``ParallelSpec``; ``passes``: from ``passes_of``.
    """
    shape, parts, layout = rank
    rows, _, distinct, _ = _held(placement, parts)
    calls = calls_of(shape.kernels, replicas, recompute, passes[0])
    numbers: dict[Segment, int] = {}  # by identity: equal segments are one object because their makers are cached
    of_parts = []
    for part in rows:
        own = part_segments(shape, part, calls)
        of_parts.append(tuple([numbers.setdefault(segment, len(numbers)) for segment in own]))
    first, last = placement[0], placement[-1]
    tied = Group()  # the two ranks in different stages that hold the same embedding table
    if first != last and shape.model.tied_embeddings and not shape.model.lora_rank:
        tied = Group(2, layout.pipeline_neighbours(first, last))
    segments = [optimizer_segment(shape, own, replicas, habits, tied if ends else Group()) for own, ends in distinct]
    optimizers = tuple([numbers.setdefault(segment, len(numbers)) for segment in segments])
    table, optimizer = _tables(placement, parts, passes[1], tuple(of_parts), optimizers)
    messages, after_part = part_messages(shape, parts, layout, placement)
    meets = _meets(max(placement) + 1, first, last, habits.clips, tied)
    return (tuple(numbers), table, optimizer, messages, meets), after_part


@cached(1024)
def _meets(num_stages: int, first: int, last: int, all_meet: bool, tied: Group) -> Ints:
    """Group of each stage: all stages meet for the norm of all gradients, the first and the last for a shared table."""
    meets = np.arange(num_stages, dtype=np.int32)
    if tied.size > 1:
        meets[last] = meets[first]
    return np.zeros_like(meets) if all_meet else meets


@cached(4096)
def part_messages(
    shape: RankShape, parts: sizes.Parts, layout: sizes.Layout, placement: Placement
) -> tuple[tuple[Collective, ...], tuple[int, ...]]:
    """Distinct messages between stages, and the message after each part, -1 if none."""
    near = [0 if a == b else layout.pipeline_neighbours(a, b) for a, b in pairwise(placement)]  # 2: within a node
    kinds = list(zip(sizes.boundary_bytes(shape, parts), near, strict=True))
    distinct = {kind: index for index, kind in enumerate(dict.fromkeys(kind for kind in kinds if kind[1]))}
    messages = tuple(Collective("send_recv", size, 2, near) for size, near in distinct)
    return messages, tuple([distinct.get(kind, -1) for kind in kinds])


@cached(512)
def _held(
    placement: Placement, parts: sizes.Parts
) -> tuple[tuple[sizes.PartShape, ...], Ints, list[tuple[sizes.Parts, bool]], Ints]:
    """The distinct parts of the model, and the row of each part; what distinct stages hold, with whether the model's
    first or last part is among it, and which of these each stage is.
    """
    rows: dict[sizes.PartShape, int] = {}
    row = [rows.setdefault(part, len(rows)) for part in parts]
    distinct: dict[tuple[sizes.Parts, bool], int] = {}
    of_stage = []
    for stage in range(max(placement) + 1):
        own = sizes.Parts([part for part, at in zip(parts, placement, strict=True) if at == stage])
        of_stage.append(distinct.setdefault((own, any(part.first or part.last for part in own)), len(distinct)))
    return tuple(rows), np.array(row), list(distinct), np.array(of_stage)


@cached(2048)
def _tables(
    placement: Placement,
    parts: sizes.Parts,
    places: tuple[int, ...],
    of_parts: tuple[tuple[int, ...], ...],
    optimizers: tuple[int, ...],
) -> tuple[Ints, Ints]:
    """``Lowered.table`` and ``optimizer``, one object for all jobs that are alike in these."""
    rows, row, _, of_stage = _held(placement, parts)
    table = np.zeros((len(rows), len(KIND_NAMES) * 3), dtype=np.int32)
    table[:, list(places)] = of_parts
    return table[row].ravel(), np.array(optimizers, dtype=np.int32)[of_stage]


class OptimizerHabits(NamedTuple):
    """What the optimizer of a rank does."""

    form: str  # as ExecutionSemantics.optimizer, or one of PASSES
    decays: bool  # whether weights decay (AdamW)
    clips: bool  # whether gradients are clipped by their norm
    states: StateSemantics  # types of parameters and gradients


@cached(2048)
def optimizer_segment(
    shape: RankShape, parts: sizes.Parts, replicas: sizes.Replicas, habits: OptimizerHabits, tied: Group
) -> Segment:
    """Sum the remaining gradients, then run the optimizer on a rank's share of the parameters; ZeRO stages 1 and 2 then
    all-gather the parameters.  ``tied``: first and last stage, where both hold the embedding's table.
    """
    tensors, groups = _tensors_of(shape, parts), replicas.groups
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
            _once_a_rank(builder, groups.shard, whole * replicas.gradient_bytes, BUCKET_NAMES[False])
        else:
            _sum_buckets(builder, shape, parts, replicas)
    numel, num_tensors = _elements(tensors, (replicas.shards, replicas.expert_shards))
    if habits.states.scales_loss and numel and habits.form not in PASSES:
        # cast to the main type, divide, check for overflows (``FP16_Optimizer``)
        casts = [] if habits.states.gradient_dtype == shape.kernels.main_dtype else [shape.op("cast", numel)]
        builder.items([*casts, shape.main_op("elementwise", numel)], "unscale")
    if habits.clips:
        builder.items([shape.main_op("grad_norm", numel, num_tensors)] if numel else [], "grad_norm")
        for group, name in ((groups.model, "grad_norm"), (groups.shard, "grad_norm.shards")):
            if group.size > 1 and (name == "grad_norm" or replicas.zero_stage):
                builder.block(group.collective("all_reduce", shape.main_bytes), DATA, name)
        builder.items([shape.main_op("elementwise", numel)] if numel else [], "clip")
    if numel:
        _step(builder, shape, habits, numel, num_tensors)
    if replicas.zero_stage < 3 and not replicas.overlap_parameters:
        size = DTYPE_BYTES[shape.dtype] if max(replicas.shards, replicas.expert_shards) > 1 else 0
        units = [unit for part in parts for unit in part_units(shape, part)] if size else []
        for group, experts, clock in ((groups.shard, False, DATA), (groups.experts, True, SECOND)):
            num_bytes = size * sum(unit.times * sum(unit.gathered(whole=False)[experts]) for unit in units)
            if replicas.by_rank and not experts:
                _once_a_rank(builder, group, num_bytes, "parameters")
            elif num_bytes and group.size > 1:
                builder.block(group.collective("all_gather", num_bytes), clock, "parameters")
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
    if habits.form == "host":
        builder.items([shape.main_op("to_host", numel), shape.main_op("adamw_host", numel, tensors)], "adamw")
        builder.items([shape.op("from_host", numel)], "adamw")
        return
    if habits.form == "fused":
        builder.items([shape.main_op("adamw", numel, tensors)], "adamw")
    else:
        adam = (*(("elementwise",) if habits.decays else ()), *_FOREACH)
        kinds, name = (PASSES[habits.form], habits.form) if habits.form in PASSES else (adam, "adamw")
        builder.items([shape.main_op(kind, numel) for kind in kinds], name)
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
def _tensors_of(shape: RankShape, parts: sizes.Parts) -> HashedTuple[_Tensors]:
    found: dict[tuple[int, bool, bool], int] = {}
    for unit in [unit for part in parts for unit in part_units(shape, part)]:
        for step in unit.block:
            for numel in step.parameters:
                key = numel, step.expert, step.replicated
                found[key] = found.get(key, 0) + unit.times
    return HashedTuple([_Tensors(*key, count) for key, count in found.items()])


def _sum_buckets(builder: SegmentBuilder, shape: RankShape, parts: sizes.Parts, replicas: sizes.Replicas) -> None:
    """Sum all gradients bucket by bucket; with copies: join, sum, divide and copy back."""
    units = [unit for part in reversed(parts) for unit in reversed(part_units(shape, part))]
    for expert in (False, True):
        buckets = [0]  # elements; the last one is being filled
        for unit in units:
            for tensor in unit.tensors[expert] * unit.times:
                buckets[-1] += tensor
                if buckets[-1] * replicas.gradient_bytes >= replicas.bucket_bytes:
                    buckets.append(0)
        name = BUCKET_NAMES[expert]
        for index, numel in enumerate(filter(None, buckets)):
            works = sizes.bucket_works(replicas, numel, expert=expert)
            if not any(works):  # no other rank has these experts
                continue
            if replicas.bucket_copies:
                builder.items([shape.main_op("copy", numel)], name, index, "copy_in")
            builder.reduce(works, index, expert=expert, wait=True)
            if replicas.bucket_copies:
                builder.items([shape.main_op("elementwise", numel)], name, index, "mean")
                builder.items([shape.main_op("copy", numel)], name, index, "copy_out")
