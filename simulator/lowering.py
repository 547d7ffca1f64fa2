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
from stepsight.simulator.layers import RankShape
from stepsight.simulator.layout import neighbour_ranks_per_node, ranks_per_node
from stepsight.simulator.schedules import (
    BACKWARD,
    FORWARD,
    Order,
    Schedule,
    find_schedule,
    order_actions,
)
from stepsight.simulator.segments import (
    StageShape,
    backward_program,
    forward_program,
    optimizer_program,
)

DATA_STREAM = "dp"


@dataclass(frozen=True, eq=False)
class Graph:
    """All distinct programs of a job as one set of arrays; nodes of program ``i`` are ``bounds[i]:bounds[i + 1]``.

    Attributes:
        bounds: Shape ``(num_programs + 1,)``.
        work: Index of each node's signature in ``Lowered.all_works``, shape ``(num_nodes,)``.
        share: Part of the signature's time, same shape.
        on_data_stream: Whether the node is on the data-parallel stream, same shape.
        kind: 0 compute, 1 tensor-parallel, 2 data-parallel; what the breakdown books a node under.
        pointer, before: Dependencies in CSR, stream order included.
        ready: Shape ``(2, num_nodes)``: 0 where a node may start with its segment's computation (all nodes), or with
            the data-parallel stream (the first node there); else ``-inf``.
    """

    bounds: NDArray[np.int64]
    work: NDArray[np.int32]
    share: NDArray[np.float64]
    on_data_stream: NDArray[np.bool_]
    kind: NDArray[np.int8]
    pointer: NDArray[np.int32]
    before: NDArray[np.int32]
    ready: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Lowered:
    """One iteration of a job, each distinct thing once.

    Attributes:
        programs: Distinct segments.
        schedule: Order of the actions of every stage.
        order: The same actions in one global order; the optimizer of every stage follows them in ``segment``.
        segment: Index into ``programs`` of each action, shape ``(num_actions + num_stages,)``.
        stage, source: As in ``Order``, with the optimizer's actions.
        message: Index into ``messages`` of the message that each action waits for, -1 if none.
        messages: Distinct point-to-point messages between stages.
        stages: What each stage holds.
        joined: Whether a segment ends only when its data-parallel collectives do (FSDP on CPU).
    """

    programs: tuple[Program, ...]
    schedule: Schedule
    order: Order
    segment: NDArray[np.int32]
    stage: NDArray[np.int32]
    source: NDArray[np.int32]
    message: NDArray[np.int32]
    messages: tuple[Collective, ...]
    stages: tuple[StageShape, ...]
    joined: bool

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_micro_batches(self) -> int:
        return self.schedule.num_micro_batches

    @cached_property
    def works(self) -> tuple[tuple[Op, ...], tuple[Collective, ...]]:
        """Distinct ops and distinct collectives, messages included; both in order of first use."""
        seen: dict[Op | Collective, None] = dict.fromkeys(
            node.work for program in self.programs for node in program.nodes
        )
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
    def previous(self) -> NDArray[np.int32]:
        """The action before each on the same stage, -1 if none."""
        previous = np.full(len(self.stage), -1, dtype=np.int32)
        for stage in range(self.num_stages):
            own = np.flatnonzero(self.stage == stage)
            previous[own[1:]] = own[:-1]
        return previous

    @cached_property
    def graph(self) -> Graph:
        return _graph(self)

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


def rank_shape(job: Job) -> RankShape:
    """What one rank of a job sees of a micro-batch."""
    p = job.parallel
    near = ranks_per_node(p.tp, p.dp, p.pp, job.cluster.devices_per_node, "tp")
    sequence_parallel = p.sequence_parallel and p.tp > 1
    return RankShape(job.model, job.batch.micro_batch, job.batch.precision, p.tp, near, sequence_parallel)


@lru_cache(maxsize=256)
def _lower(
    p: ParallelSpec, num_micro_batches: int, devices_per_node: int, shape: RankShape, overlaps: bool, share: float
) -> Lowered:
    near = ranks_per_node(p.tp, p.dp, p.pp, devices_per_node, "dp")
    after_schedule = not overlaps and p.pp > 1 and p.zero_stage == 0
    dp = DataParallel(p.dp, near, p.zero_stage, int(p.bucket_mbytes * 2**20), overlaps, after_schedule, share)
    stages = stage_shapes(shape.model, p.pp)
    schedule, order = _ordered(p.schedule, p.pp, num_micro_batches)
    programs: dict[int, Program] = {}  # by identity: equal programs are the same object, their makers are cached

    def number(program: Program) -> int:
        programs.setdefault(id(program), program)
        return list(programs).index(id(program))

    table = np.zeros((p.pp, 2, 3), dtype=np.int32)  # stage, kind, (first, middle, last) of its backwards
    optimizers = np.zeros(p.pp, dtype=np.int32)
    alone = num_micro_batches == 1
    for at, stage in enumerate(stages):
        table[at, FORWARD] = number(forward_program(shape, stage, dp))
        for column, (accumulate, last) in enumerate(((False, alone), (True, False), (not alone, True))):
            if column == 1 and num_micro_batches < 3:
                continue
            table[at, BACKWARD, column] = number(backward_program(shape, stage, dp, p.recompute, accumulate, last))
        optimizers[at] = number(optimizer_program(shape, stage, dp))
    messages, boundary = _messages(p, shape, devices_per_node)
    upstream = np.where(order.kind == FORWARD, order.part - 1, order.part)
    message = np.where(order.source >= 0, boundary[np.clip(upstream, 0, len(boundary) - 1)], -1)
    no_message = np.full(p.pp, -1, dtype=np.int32)
    return Lowered(
        programs=tuple(programs.values()),
        schedule=schedule,
        order=order,
        segment=np.concatenate([table[order.stage, order.kind, _turn(order)], optimizers]).astype(np.int32),
        stage=np.concatenate([order.stage, np.arange(p.pp, dtype=np.int32)]),
        source=np.concatenate([order.source, no_message]),
        message=np.concatenate([message.astype(np.int32), no_message]),
        messages=messages,
        stages=stages,
        joined=dp.fully_sharded and not dp.overlaps,
    )


@lru_cache(maxsize=256)
def _ordered(name: str, pp: int, num_micro_batches: int) -> tuple[Schedule, Order]:
    schedule = find_schedule(name, pp, num_micro_batches)
    return schedule, order_actions(schedule)


def _turn(order: Order) -> NDArray[np.int64]:
    """0 for a part's first backward, 2 for its last (also if it is the first), 1 between; 0 for forwards."""
    turn = np.ones(len(order), dtype=np.int64)
    turn[order.kind == FORWARD] = 0
    backward = order.kind != FORWARD
    for part in range(int(order.part.max()) + 1):
        own = np.flatnonzero(backward & (order.part == part))
        turn[own[0]] = 0
        turn[own[-1]] = 2
    return turn


def _messages(
    p: ParallelSpec, shape: RankShape, devices_per_node: int
) -> tuple[tuple[Collective, ...], NDArray[np.int32]]:
    """Distinct messages, and which of them crosses the boundary after each stage (at least one entry)."""
    distinct: dict[Collective, int] = {}
    boundary = [0]
    if p.pp > 1:
        near = [neighbour_ranks_per_node(p.tp, p.dp, devices_per_node, stage) for stage in range(p.pp - 1)]
        sent = [Collective("send_recv", shape.boundary_bytes, 2, ranks) for ranks in near]
        boundary = [distinct.setdefault(message, len(distinct)) for message in sent]
    return tuple(distinct), np.array(boundary, dtype=np.int32)


def _graph(lowered: Lowered) -> Graph:
    index = lowered.work_index
    bounds, pointer = [0], [0]
    work: list[int] = []
    share: list[float] = []
    on_data: list[bool] = []
    kind: list[int] = []
    before: list[int] = []
    first_data: list[bool] = []
    for program in lowered.programs:
        base = bounds[-1]
        incoming: list[list[int]] = [[] for _ in program.nodes]
        for earlier, later, _ in program.all_edges():
            incoming[later].append(earlier)
        seen = False
        for node, needs in zip(program.nodes, incoming, strict=True):
            work.append(index[node.work])
            share.append(node.share)
            on_data.append(node.stream == DATA_STREAM)
            kind.append(0 if isinstance(node.work, Op) else 1 if node.stream == "tp" else 2)
            before.extend(base + need for need in dict.fromkeys(needs))
            pointer.append(len(before))
            first_data.append(on_data[-1] and not seen)
            seen |= on_data[-1]
        bounds.append(base + len(program))
    ready = np.stack([np.zeros(len(work)), np.where(first_data, 0.0, -np.inf)])
    return Graph(
        np.array(bounds),
        np.array(work, dtype=np.int32),
        np.array(share),
        np.array(on_data),
        np.array(kind, dtype=np.int8),
        np.array(pointer, dtype=np.int32),
        np.array(before, dtype=np.int32),
        ready,
    )


def signatures(job: Job, hardware: Hardware) -> tuple[set[Op], set[Collective]]:
    """Distinct ops and collectives of a job: what has to be known to predict it."""
    ops, collectives = lower(job, hardware).works
    return set(ops), set(collectives)
