"""From a job to what has to be timed: distinct segments, which stage runs which, and the messages between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware import Hardware
from stepsight.dataset.job import Job, ModelSpec, ParallelSpec
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.program import Program
from stepsight.simulator.emitter import DataParallel
from stepsight.simulator.graph import Graph, Segment, join
from stepsight.simulator.layers import RankShape
from stepsight.simulator.layout import neighbour_ranks_per_node, ranks_per_node
from stepsight.simulator.old_track import FIRST, LAST, MIDDLE, Track, find_track
from stepsight.simulator.schedules import BACKWARD, FORWARD, Order, Schedule
from stepsight.simulator.segments import StageShape, backward_segment, forward_segment, optimizer_segment


@dataclass(frozen=True, eq=False)
class Lowered:
    """One iteration of a job, each distinct thing once.

    Attributes:
        segments: Distinct segments: a stage's forward, its backwards, its optimizer.
        track: The schedule's actions in one order.
        segment: Index into ``segments`` of each action of the track, shape ``(num_actions + num_stages,)``.
        message: Index into ``messages`` of the message that each action waits for, -1 if none; same shape.
        messages: Distinct point-to-point messages between stages.
        stages: What each stage holds.
        joined: Whether a segment ends only when its data-parallel collectives do (FSDP on CPU).
    """

    segments: tuple[Segment, ...]
    track: Track
    segment: NDArray[np.int32]
    message: NDArray[np.int32]
    messages: tuple[Collective, ...]
    stages: tuple[StageShape, ...]
    joined: bool

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def schedule(self) -> Schedule:
        """Order of the actions of every stage."""
        return self.track.schedule

    @property
    def order(self) -> Order:
        """The same actions in one global order; the optimizers follow them."""
        return self.track.order

    @property
    def stage(self) -> NDArray[np.int32]:
        """Of each action and optimizer."""
        return self.track.stage

    @property
    def source(self) -> NDArray[np.int32]:
        """Action whose message each waits for, -1 if none."""
        return self.track.source

    @property
    def previous(self) -> NDArray[np.int32]:
        """The action before each on the same stage, -1 if none."""
        return self.track.previous

    @property
    def num_micro_batches(self) -> int:
        """Per replica."""
        return self.schedule.num_micro_batches

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Programs of ``segments``."""
        return tuple(segment.program for segment in self.segments)

    @cached_property
    def works(self) -> tuple[tuple[Op, ...], tuple[Collective, ...]]:
        """Distinct ops and distinct collectives, messages included; both in order of first use."""
        seen: dict[Op | Collective, None] = dict.fromkeys(work for part in self.segments for work in part.works)
        seen.update(dict.fromkeys(self.messages))
        ops = tuple(work for work in seen if isinstance(work, Op))
        return ops, tuple(work for work in seen if isinstance(work, Collective))

    @cached_property
    def all_works(self) -> tuple[Op | Collective, ...]:
        """``works`` in one: ops, then collectives."""
        return (*self.works[0], *self.works[1])

    @cached_property
    def work_index(self) -> Mapping[Op | Collective, int]:
        """Position of each signature in ``all_works``."""
        return {work: index for index, work in enumerate(self.all_works)}

    @cached_property
    def message_work(self) -> NDArray[np.int32]:
        """Position in ``all_works`` of each message."""
        return np.array([self.work_index[message] for message in self.messages], dtype=np.int32)

    @cached_property
    def gated(self) -> NDArray[np.bool_]:
        """Whether a segment waits for its stage's data-parallel stream before it starts (the optimizer)."""
        return np.array([program.label == "optimizer" for program in self.programs])

    @cached_property
    def graph(self) -> Graph:
        """All programs as arrays; ``graph.work`` points into ``all_works``."""
        return join(self.segments, self.work_index)

    def program(self, label: str, stage: int = 0, micro_batch: int = 0) -> Program:
        """What a stage runs for a micro-batch (``optimizer``: whatever the micro-batch)."""
        if label == "optimizer":
            return self.programs[int(self.segment[len(self.order) + stage])]
        kind = {"forward": FORWARD, "backward": BACKWARD}[label]
        order = self.order
        found = np.flatnonzero((order.stage == stage) & (order.kind == kind) & (order.micro_batch == micro_batch))
        return self.programs[int(self.segment[found[0]])]


def stage_shapes(model: ModelSpec, pp: int) -> tuple[StageShape, ...]:
    """Layers split evenly, the remainder to the earlier stages; embedding on the first, head on the last."""
    each, rest = divmod(model.layers, pp)
    return tuple(StageShape(each + (i < rest), i == 0, i == pp - 1) for i in range(pp))


def rank_shape(job: Job) -> RankShape:
    """What one rank of a job sees of a micro-batch."""
    p = job.parallel
    near = ranks_per_node(p.tp, p.dp, p.pp, job.cluster.devices_per_node, "tp")
    sequence_parallel = p.sequence_parallel and p.tp > 1
    return RankShape(job.model, job.batch.micro_batch, job.batch.precision, p.tp, near, sequence_parallel)


def lower(job: Job, hardware: Hardware) -> Lowered:
    """Lower a job to the programs that its ranks run on this hardware.

    Ranks of one stage are alike, so one stands for all.  Only the hardware's kind and ``comm_compute_share`` matter.
    """
    return _lower(
        job.parallel,
        job.num_micro_batches,
        job.cluster.devices_per_node,
        rank_shape(job),
        hardware.kind != "cpu",
        hardware.comm_compute_share,
    )


@lru_cache(maxsize=256)
def _lower(
    p: ParallelSpec, num_micro_batches: int, devices_per_node: int, shape: RankShape, overlaps: bool, share: float
) -> Lowered:
    near = ranks_per_node(p.tp, p.dp, p.pp, devices_per_node, "dp")
    after_schedule = not overlaps and p.pp > 1 and p.zero_stage == 0
    dp = DataParallel(p.dp, near, p.zero_stage, int(p.bucket_mbytes * 2**20), overlaps, after_schedule, share)
    stages = stage_shapes(shape.model, p.pp)
    track = find_track(p.schedule, p.pp, num_micro_batches)
    numbers: dict[Segment, int] = {}  # by identity: equal segments are one object, their makers are cached

    def number(segment: Segment) -> int:
        return numbers.setdefault(segment, len(numbers))

    # Backwards as (accumulate, synchronise): only the first finds no gradients, only the last reduces them.
    alone = num_micro_batches == 1
    turns = {FIRST: (False, alone), MIDDLE: (True, False), LAST: (not alone, True)}
    if num_micro_batches < 3:
        del turns[MIDDLE]
    table = np.zeros((p.pp, 2, 3), dtype=np.int32)
    optimizers = np.zeros(p.pp, dtype=np.int32)
    for at, stage in enumerate(stages):
        table[at, FORWARD] = number(forward_segment(shape, stage, dp))
        for turn, (accumulate, synchronise) in turns.items():
            backward = backward_segment(shape, stage, dp, p.recompute, accumulate, synchronise)
            table[at, BACKWARD, turn] = number(backward)
        optimizers[at] = number(optimizer_segment(shape, stage, dp))
    messages, message = _messages(p, shape, devices_per_node, track)
    order = track.order
    return Lowered(
        segments=tuple(numbers),
        track=track,
        segment=np.concatenate([table[order.stage, order.kind, track.turn], optimizers]),
        message=message,
        messages=messages,
        stages=stages,
        joined=dp.fully_sharded and not dp.overlaps,
    )


def _messages(
    p: ParallelSpec, shape: RankShape, devices_per_node: int, track: Track
) -> tuple[tuple[Collective, ...], NDArray[np.int32]]:
    """Distinct messages, and which of them each action waits for."""
    if p.pp == 1:
        return (), np.full(len(track.stage), -1, dtype=np.int32)
    near = [neighbour_ranks_per_node(p.tp, p.dp, devices_per_node, stage) for stage in range(p.pp - 1)]
    sent = [Collective("send_recv", shape.boundary_bytes, 2, ranks) for ranks in near]
    distinct = {message: index for index, message in enumerate(dict.fromkeys(sent))}
    crossing = np.array([distinct[message] for message in sent], dtype=np.int32)  # after each stage
    waits = track.source >= 0
    boundary = np.minimum(track.stage[waits], track.stage[track.source[waits]])
    message = np.full(len(track.stage), -1, dtype=np.int32)
    message[waits] = crossing[boundary]
    return tuple(distinct), message


def signatures(job: Job, hardware: Hardware) -> tuple[set[Op], set[Collective]]:
    """Distinct ops and collectives of a job: what has to be known to predict it."""
    ops, collectives = lower(job, hardware).works
    return set(ops), set(collectives)
