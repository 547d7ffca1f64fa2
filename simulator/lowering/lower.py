"""From a job to what has to be timed: distinct segments, which action runs which, and the messages between stages."""

from __future__ import annotations

import io
import itertools
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.bounded import read_file
from stepsight.dataset.caching import cached
from stepsight.dataset.errors import JobError
from stepsight.dataset.execution import ExecutionSemantics, semantics_of
from stepsight.dataset.hardware import Hardware
from stepsight.dataset.hashed_once import hashed_once
from stepsight.dataset.job import Job
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.program import Program
from stepsight.simulator.blocks.shape import Group, RankShape
from stepsight.simulator.clock.track import FIRST, LAST, Track, find_track
from stepsight.simulator.clock.track import track as order_entries
from stepsight.simulator.lowering.optimizer_step import OptimizerHabits, optimizer_segment
from stepsight.simulator.lowering.passages import BACKWARD as WHOLE
from stepsight.simulator.lowering.passages import FORWARD as FORWARDS
from stepsight.simulator.lowering.passages import INPUT, WEIGHT
from stepsight.simulator.lowering.rank_layout import Layout, layout_of
from stepsight.simulator.lowering.replicas import replicas_of
from stepsight.simulator.lowering.segment import Segment
from stepsight.simulator.lowering.sizes import Groups, Parts, PartShape, groups_of, part_shapes, rank_shape
from stepsight.simulator.lowering.stage import Pass, calls_of, part_segments
from stepsight.simulator.lowering.stage_links import meeting_stages, stage_messages, tied_group
from stepsight.simulator.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KIND_NAMES,
    read_schedule,
)

Ints = NDArray[np.int32]
_LABELS = {FORWARD: FORWARDS, BACKWARD: WHOLE, BACKWARD_INPUT: INPUT, BACKWARD_WEIGHT: WEIGHT}


@dataclass(frozen=True, eq=False)
class Lowered:
    """One iteration of a job, each distinct thing once.

    Attributes:
        segments: Distinct segments of the parts of the model, and the stages' optimizers.
        track: The schedule's actions, and the messages between stages, in one order that can run.
        table: Index into ``segments`` of what each part runs in each kind and turn (see ``place``).
        optimizer: Likewise of each stage's optimizer, shape ``(num_stages,)``.
        messages: Distinct point-to-point messages between stages.
        message: Index into ``messages`` of each of the track's, shape ``(num_messages,)``.
        parts: Parts of the model in its order.
        meets: Stages with equal numbers start their optimizers together, shape ``(num_stages,)``.
        semantics: Of what executes the job.
    """

    segments: tuple[Segment, ...]
    track: Track
    table: Ints
    optimizer: Ints
    messages: tuple[Collective, ...]
    message: Ints
    parts: tuple[PartShape, ...]
    meets: Ints
    semantics: ExecutionSemantics

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
        """What a stage runs for a micro-batch (``optimizer``: whatever the micro-batch)."""
        if label == "optimizer":
            return self.segments[int(self.optimizer[stage])].program
        track, kind = self.track, {name: kind for kind, name in _LABELS.items()}[label]
        found = np.flatnonzero((track.stage == stage) & (track.kind == kind) & (track.micro_batch == micro_batch))
        return self.segments[int(self.segment[found[0]])].program


def lower(job: Job, hardware: Hardware) -> Lowered:
    """Lower a job to the segments that its ranks run on this hardware.

    Ranks of one stage are alike, so one stands for all.  Only the hardware's kind and ``comm_compute_share`` matter.
    """
    return _lower(_asked(job, hardware))


class _Strategy(NamedTuple):
    """Fields of ``ParallelSpec`` that nothing else of ``_Asked`` depends on, and the micro-batches of a replica."""

    schedule: str
    pp: int
    virtual_stages: int
    zero_stage: int
    recompute: str
    recompute_every: int
    num_micro_batches: int


class _Asked(NamedTuple):
    """All that a lowered job depends on; jobs that are alike in it share one."""

    strategy: _Strategy
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
    recompute = p.recompute, p.recompute_every
    return _Asked(
        _Strategy(p.schedule, p.pp, p.virtual_stages, p.zero_stage, *recompute, job.num_micro_batches),
        semantics,
        job.optimizer.kind,
        rank_shape(job, share if beside else 0.0, semantics),
        part_shapes(job),
        groups_of(job),
        layout_of(job),
        beside,
        share,
    )


@cached(512)
def _lower(asked: _Asked) -> Lowered:
    p, shape, parts, overlap = asked.strategy, asked.shape, asked.parts, asked.semantics.overlap
    zero = p.zero_stage, p.pp > 1
    replicas = replicas_of(zero, asked.groups, asked.semantics, beside=asked.beside, share=asked.share)
    track = _find_track(p, overlap.runtime)
    held = _held(track, parts)
    passes = _passes(track)
    calls = calls_of(shape.kernels, replicas, (p.recompute, p.recompute_every), passes.passes)
    numbers: dict[Segment, int] = {}  # by identity: equal segments are one object, their makers are cached
    of_parts = []
    for part in held.rows:
        own = part_segments(shape, part, calls)
        of_parts.append(tuple([numbers.setdefault(segment, len(numbers)) for segment in own]))
    tied = tied_group(shape, asked.layout, track)
    states, form = asked.semantics.states, asked.semantics.optimizer
    habits = OptimizerHabits(form, asked.optimizer == "adamw", overlap.reads_norm, states)
    segments = [
        optimizer_segment(shape, own, replicas, habits, tied if ends and tied.size > 1 else Group())
        for own, ends in held.distinct
    ]
    optimizers = tuple([numbers.setdefault(segment, len(numbers)) for segment in segments])
    table, optimizer = _tables(held, passes, tuple(of_parts), optimizers)
    messages, message = stage_messages(shape, parts, asked.layout, track)
    return Lowered(
        segments=tuple(numbers),
        track=track,
        table=table,
        optimizer=optimizer,
        messages=messages,
        message=message,
        parts=parts,
        meets=meeting_stages(track, tied, all_meet=overlap.reads_norm),
        semantics=asked.semantics,
    )


@cached(512)
def _place(track: Track) -> Ints:
    """Position of each action in a table of parts, kinds and turns."""
    return (track.part * len(KIND_NAMES) + track.kind) * 3 + track.turn


@dataclass(frozen=True, eq=False)
class _Held:
    """Who holds which parts of the model.

    Attributes:
        rows: Distinct parts.
        row: Position in ``rows`` of each part.
        distinct: What stages hold, in model order, each distinct combination once, and whether the model's first or
            last part is among it.
        of_stage: Position in ``distinct`` of each stage's.
    """

    rows: tuple[PartShape, ...]
    row: Ints
    distinct: tuple[tuple[Parts, bool], ...]
    of_stage: Ints


@cached(512)
def _held(track: Track, parts: Parts) -> _Held:
    rows: dict[PartShape, int] = {}
    row = [rows.setdefault(part, len(rows)) for part in parts]
    held: list[list[int]] = [[] for _ in range(track.num_stages)]
    for part, stage in enumerate(track.schedule.placement[:, 0].tolist()):
        held[stage].append(part)
    distinct: dict[tuple[tuple[int, ...], bool], tuple[int, Parts]] = {}
    of_stage = []
    for own in held:
        ends = any(parts[part].first or parts[part].last for part in own)
        key = (tuple([row[part] for part in own]), ends)
        at, _ = distinct.setdefault(key, (len(distinct), Parts([parts[part] for part in own])))
        of_stage.append(at)
    combinations = tuple((own, ends) for (_, ends), (_, own) in distinct.items())
    return _Held(tuple(rows), np.array(row), combinations, np.array(of_stage))


@cached(2048)
def _tables(
    held: _Held, passes: _Passes, of_parts: tuple[tuple[int, ...], ...], optimizers: tuple[int, ...]
) -> tuple[Ints, Ints]:
    """``Lowered.table`` and ``optimizer`` from the segments of each distinct part and optimizer.

    Jobs that are alike in these share both arrays.
    """
    table = np.zeros((len(held.rows), len(KIND_NAMES) * 3), dtype=np.int32)
    table[:, list(passes.places)] = of_parts
    return table[held.row].ravel(), np.array(optimizers, dtype=np.int32)[held.of_stage]


@hashed_once
@dataclass(frozen=True)
class _Passes:
    """Distinct passes of a track's actions, and their positions in a part's row of ``Lowered.table``."""

    passes: tuple[Pass, ...]
    places: tuple[int, ...]


@cached(512)
def _passes(track: Track) -> _Passes:
    places = tuple(np.unique(track.kind * 3 + track.turn).tolist())
    alone = track.schedule.num_micro_batches == 1
    kinds = [divmod(place, 3) for place in places]
    passes = [Pass(_LABELS[kind], turn == FIRST or alone, turn == LAST) for kind, turn in kinds]
    return _shared_passes(tuple(passes), places)


_shared_passes = cached(512)(_Passes)


def _find_track(p: _Strategy, runtime: str) -> Track:
    if p.schedule.endswith(".csv"):
        path = Path(p.schedule)
        changed = path.stat().st_mtime_ns if path.is_file() else 0
        return _read_track(path, changed, p.pp, p.num_micro_batches, p.virtual_stages, runtime)
    return find_track(p.schedule, p.pp, p.num_micro_batches, p.virtual_stages, runtime)


@cached(64)
def _read_track(path: Path, changed: int, stages: int, micro_batches: int, virtual_stages: int, runtime: str) -> Track:
    """A user's own table; ``changed`` is there to read a file again that is another."""
    with suppress(OSError):  # what is no file is told by its reader
        ranks = sum(1 for _ in itertools.islice(io.BytesIO(read_file(path)), stages + 1))
        if ranks != stages:
            got = ranks if ranks < stages else "more"
            raise JobError(f"{path} must hold a row for each of pp = {stages} ranks, got {got}")
    schedule = read_schedule(path)
    has = (schedule.num_stages, schedule.num_micro_batches, schedule.num_parts)
    if has != (stages, micro_batches, stages * virtual_stages):
        raise JobError(
            f"{path} must hold pp = {stages} ranks, {micro_batches} micro-batches and pp * virtual_stages = "
            f"{stages * virtual_stages} parts, got {has[0]}, {has[1]} and {has[2]}"
        )
    return order_entries(schedule, runtime)


def signatures(job: Job, hardware: Hardware) -> tuple[set[Op], set[Collective]]:
    """Distinct ops and collectives of a job: what has to be known to predict it."""
    works = lower(job, hardware).all_works
    return {w for w in works if isinstance(w, Op)}, {w for w in works if isinstance(w, Collective)}
