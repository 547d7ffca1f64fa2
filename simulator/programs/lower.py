"""Lower a job to the things that have to be timed: distinct segments, the actions that run them, and messages between
stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.execution import ExecutionSemantics, semantics_of
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.step import RankShape
from stepsight.simulator.clock.track import Track, find_track
from stepsight.simulator.programs.rank_work import (
    LABELS,
    PASSES,
    OptimizerHabits,
    Rank,
    message_kinds,
    passes_of,
    placement_of,
    rank_work,
)
from stepsight.simulator.programs.replicas import replicas_of
from stepsight.simulator.programs.segment import Segment
from stepsight.simulator.programs.sizes import (
    Groups,
    Layout,
    Parts,
    PartShape,
    groups_of,
    layout_of,
    part_shapes,
    rank_shape,
)
from stepsight.simulator.programs.stage import part_units
from stepsight.simulator.schedules import KIND_NAMES

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Lowered:
    """One iteration of a job; each distinct thing is stored once."""

    segments: tuple[Segment, ...]  # distinct segments of the parts of the model, and the stages' optimizers
    track: Track  # the schedule's actions, and the messages between stages, in one order that can run
    table: Ints  # index into segments of what each part runs in each kind and turn (see place)
    optimizer: Ints  # likewise of each stage's optimizer, shape (num_stages,)
    messages: tuple[Collective, ...]  # distinct point-to-point messages between stages
    message: Ints  # index into messages of each of the track's, shape (num_messages,)
    parts: tuple[PartShape, ...]  # parts of the model in its order
    meets: Ints  # stages with equal numbers start their optimizers together, shape (num_stages,)
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
        """Per replica."""
        return self.track.schedule.num_micro_batches

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Programs of ``segments``."""
        return tuple(segment.program for segment in self.segments)

    @cached_property
    def all_works(self) -> tuple[Op | Collective, ...]:
        """Distinct ops, then distinct collectives, messages included."""
        seen = {work: None for segment in self.segments for work in segment.works}
        seen.update(dict.fromkeys(self.messages))
        ops = tuple(work for work in seen if isinstance(work, Op))
        return (*ops, *(work for work in seen if isinstance(work, Collective)))

    @cached_property
    def work_index(self) -> dict[Op | Collective, int]:
        """Position of each signature in ``all_works``."""
        return {work: index for index, work in enumerate(self.all_works)}

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


class _Asked(NamedTuple):
    """Everything that a lowered job depends on; jobs with equal values share one lowering."""

    schedule: str
    pp: int
    virtual_stages: int
    zero_stage: int
    recompute: tuple[str, int]
    num_micro_batches: int
    flushes: int
    semantics: ExecutionSemantics
    optimizer: str
    shape: RankShape
    parts: Parts
    groups: Groups
    layout: Layout
    beside: bool
    share: float


def _asked(job: Job, hardware: Hardware) -> _Asked:
    beside, share = hardware.kind != "cpu", hardware.comm_compute_share
    semantics, p = semantics_of(job, hardware.kind), job.parallel
    recompute = p.recomputes, p.recompute_every
    strategy = p.schedule, p.pp, p.virtual_stages, p.zero_stage, recompute, job.num_micro_batches, job.batch.flushes
    return _Asked(
        *strategy,
        semantics,
        job.optimizer.kind,
        rank_shape(job, share if beside else 0.0, semantics),
        part_shapes(job),
        groups_of(job),
        layout_of(job),
        beside,
        share,
    )


# DeepSpeed 0.3 gathers ahead only while fewer elements than this are gathered (stage3_max_live_parameters).
_MOST_LIVE = 10**9


def _largest_tensor(shape: RankShape, parts: Parts) -> int:
    """Elements of the largest parameter tensor of a layer."""
    units = [unit for part in parts for unit in part_units(shape, part) if not unit.root]
    return max((numel for unit in units for numel in unit.tensors), default=0)


@cached(512)
def _lower(asked: _Asked) -> Lowered:
    overlap = asked.semantics.overlap
    once = asked.schedule, asked.pp, asked.num_micro_batches, asked.virtual_stages, overlap.runtime
    track = find_track(*once, flushes=asked.flushes)
    zero = asked.zero_stage, asked.pp > 1
    replicas = replicas_of(zero, asked.groups, asked.semantics, beside=asked.beside, share=asked.share)
    if overlap.gathers_lists and _largest_tensor(asked.shape, asked.parts) >= _MOST_LIVE:
        replicas = replace(replicas, gathering=replace(replicas.gathering, prefetch=0))
    if overlap.by_rank and replicas.shards > 1:  # a rank's bucket that is never full is sent after the last backward
        numel = sum(unit.times * unit.numel for part in asked.parts for unit in part_units(asked.shape, part))
        full = numel // asked.pp * replicas.gradient_bytes >= replicas.bucket_bytes * replicas.shards
        replicas = replace(replicas, overlap_gradients=replicas.overlap_gradients and full)
    rank = Rank(
        asked.shape,
        asked.parts,
        asked.layout,
        replicas,
        asked.recompute,
        OptimizerHabits(
            asked.optimizer if asked.optimizer in PASSES else asked.semantics.optimizer,
            asked.optimizer == "adamw",
            overlap.reads_norm,
            asked.semantics.states,
        ),
    )
    work = rank_work(rank, placement_of(track), passes_of(track))._asdict()
    kinds = message_kinds(track, work.pop("after_part"))
    return Lowered(track=track, message=kinds, parts=asked.parts, semantics=asked.semantics, **work)


@cached(512)
def _place(track: Track) -> Ints:
    """Position of each action in a table of parts, kinds and turns."""
    return (track.part * len(KIND_NAMES) + track.kind) * 3 + track.turn


def signatures(job: Job, hardware: Hardware) -> tuple[set[Op], set[Collective]]:
    """Distinct ops and collectives of a job: the signatures whose durations a prediction needs."""
    works = lower(job, hardware).all_works
    return {w for w in works if isinstance(w, Op)}, {w for w in works if isinstance(w, Collective)}
