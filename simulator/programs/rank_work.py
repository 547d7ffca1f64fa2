"""The work of ranks and the links between their stages, without the order of micro-batches.

Strategies that differ only in that order share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import HashedTuple, cached, hashed_once
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.blocks.step import Group, RankShape
from stepsight.simulator.clock.track import FIRST, LAST, Track
from stepsight.simulator.programs.block_pass import BACKWARD as WHOLE
from stepsight.simulator.programs.block_pass import FORWARD as FORWARDS
from stepsight.simulator.programs.block_pass import INPUT, WEIGHT
from stepsight.simulator.programs.optimizer_step import OptimizerHabits, optimizer_segment
from stepsight.simulator.programs.replicas import Replicas
from stepsight.simulator.programs.segment import Segment
from stepsight.simulator.programs.sizes import Layout, Parts, PartShape, boundary_bytes
from stepsight.simulator.programs.stage import Pass, calls_of, part_segments
from stepsight.simulator.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KIND_NAMES

Ints = NDArray[np.int32]
Placement = HashedTuple[int]  # the stage of each part of the model, in its order


def tied_group(shape: RankShape, layout: Layout, placement: Placement) -> Group:
    """The two ranks in different stages that hold the same embedding table; None if there is only one."""
    first, last = placement[0], placement[-1]
    if first == last or not shape.model.tied_embeddings:
        return Group()
    return Group(2, layout.pipeline_neighbours(first, last))


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
    kinds = list(zip(boundary_bytes(shape, parts), _nearness(placement, layout), strict=True))
    distinct = {kind: index for index, kind in enumerate(dict.fromkeys(kind for kind in kinds if kind[1]))}
    messages = tuple(Collective("send_recv", size, 2, near) for size, near in distinct)
    return messages, tuple([distinct.get(kind, -1) for kind in kinds])


@cached(1024)
def message_kinds(track: Track, after_part: tuple[int, ...]) -> Ints:
    """Kind of each message of a track, from the kinds after each part; shape ``(num_messages,)``."""
    if not track.num_messages or max(after_part) == 0:
        return np.zeros(track.num_messages, dtype=np.int32)
    kinds: Ints = np.array(after_part, dtype=np.int32)
    return np.asarray(kinds[_boundaries(track)])


@cached(512)
def _nearness(placement: Placement, layout: Layout) -> tuple[int, ...]:
    """For each part: whether the message after it stays within a node (2) or leaves it (1), or there is none (0)."""
    return tuple(0 if a == b else layout.pipeline_neighbours(a, b) for a, b in pairwise(placement))


@cached(512)
def _boundaries(track: Track) -> Ints:
    """The part that sends each message."""
    return np.minimum(track.part[track.source], track.part[track.target])


LABELS = {FORWARD: FORWARDS, BACKWARD: WHOLE, BACKWARD_INPUT: INPUT, BACKWARD_WEIGHT: WEIGHT}


class Rank(NamedTuple):
    """Everything that the work of a job's ranks depends on, except the schedule.

    Attributes:
        shape, parts, layout: What a rank sees of a micro-batch, parts of the model, where ranks lie.
        replicas: Who shares parameters, and how.
        recompute: ``recompute`` and ``recompute_every`` of ``ParallelSpec``.
        habits: What the optimizer does.
    """

    shape: RankShape
    parts: Parts
    layout: Layout
    replicas: Replicas
    recompute: tuple[str, int]
    habits: OptimizerHabits


class RankWork(NamedTuple):
    """The work of a job's ranks.

    Attributes:
        segments, table, optimizer, messages, meets: As in ``Lowered``.
        after_part: Index into ``messages`` of the message after each part, -1 if there is none.
    """

    segments: tuple[Segment, ...]
    table: Ints
    optimizer: Ints
    messages: tuple[Collective, ...]
    meets: Ints
    after_part: tuple[int, ...]


@hashed_once
@dataclass(frozen=True)
class Passes:
    """Distinct passes of a track's actions, and their positions in a part's row of ``Lowered.table``."""

    passes: tuple[Pass, ...]
    places: tuple[int, ...]


@cached(512)
def passes_of(track: Track) -> Passes:
    """The passes of a track; equal ones are one object."""
    places = tuple(np.unique(track.kind * 3 + track.turn).tolist())
    alone = track.schedule.num_micro_batches == 1
    kinds = [divmod(place, 3) for place in places]
    passes = [Pass(LABELS[kind], turn == FIRST or alone, turn == LAST) for kind, turn in kinds]
    return _shared_passes(tuple(passes), places)


_shared_passes = cached(512)(Passes)


@cached(512)
def placement_of(track: Track) -> Placement:
    """The stage of each part; equal placements are one object."""
    return _shared_placement(tuple(track.schedule.placement[:, 0].tolist()))


_shared_placement = cached(512)(HashedTuple)


@cached(2048)
def rank_work(rank: Rank, placement: Placement, passes: Passes) -> RankWork:
    """Make the work of a job's ranks.

    Args:
        rank: Of the job.
        placement: The stage of each part of the model.
        passes: Of a micro-batch through a part.
    """
    shape, parts, replicas = rank.shape, rank.parts, rank.replicas
    held = _held(placement, parts)
    calls = calls_of(shape.kernels, replicas, rank.recompute, passes.passes)
    numbers: dict[Segment, int] = {}  # by identity: equal segments are one object because their makers are cached
    of_parts = []
    for part in held.rows:
        own = part_segments(shape, part, calls)
        of_parts.append(tuple([numbers.setdefault(segment, len(numbers)) for segment in own]))
    tied = tied_group(shape, rank.layout, placement)
    segments = [
        optimizer_segment(shape, own, replicas, rank.habits, tied if ends and tied.size > 1 else Group())
        for own, ends in held.distinct
    ]
    optimizers = tuple([numbers.setdefault(segment, len(numbers)) for segment in segments])
    table, optimizer = _tables(held, passes, tuple(of_parts), optimizers)
    messages, after_part = part_messages(shape, parts, rank.layout, placement)
    meets = meeting_stages(placement, tied, all_meet=rank.habits.clips)
    return RankWork(tuple(numbers), table, optimizer, messages, meets, after_part)


@dataclass(frozen=True, eq=False)
class _Held:
    """The parts of the model on each stage.

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
def _held(placement: Placement, parts: Parts) -> _Held:
    rows: dict[PartShape, int] = {}
    row = [rows.setdefault(part, len(rows)) for part in parts]
    held: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for part, stage in enumerate(placement):
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
    held: _Held, passes: Passes, of_parts: tuple[tuple[int, ...], ...], optimizers: tuple[int, ...]
) -> tuple[Ints, Ints]:
    """``Lowered.table`` and ``optimizer`` from the segments of each distinct part and optimizer.

    Jobs that are alike in these share both arrays.
    """
    table = np.zeros((len(held.rows), len(KIND_NAMES) * 3), dtype=np.int32)
    table[:, list(passes.places)] = of_parts
    return table[held.row].ravel(), np.array(optimizers, dtype=np.int32)[held.of_stage]
