"""Plans of a part's forward and backward: their events, without the sizes of blocks and groups; and gradient buckets.

Strategies that differ in micro-batch, degrees or replicas run the same events with other work, so a plan is made once
for all of them.  Where gradients are sent bucket by bucket, a plan says where a backward pass is interrupted for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import HashedTuple, cached, compiled
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.clock.engine import DATA, RUN, SECOND, SEND
from stepsight.simulator.programs.block_pass import WEIGHT, BlockPass
from stepsight.simulator.programs.segment import (
    BUCKET_NAMES,
    NUM_COLUMNS,
    ROOT,
    TWICE,
    Segment,
    SegmentBuilder,
    Slot,
    UnitPattern,
)
from stepsight.simulator.programs.sizes import Replicas, bucket_works

Patterns = HashedTuple[UnitPattern]


def _one_by_one(units: Patterns) -> list[tuple[UnitPattern, int]]:
    """Each block of some units with its number, in order."""
    return [(unit, unit.first + turn) for unit in units for turn in range(unit.times)]


class _Gathers:
    """FSDP's all-gathers of parameters; if they overlap, they run some units ahead of the computation.

    They come in the order of use: the root first; in backward only layers, as the root stays gathered.
    ``twice``: whether recomputation and backward each gather what they use.
    """

    def __init__(
        self, builder: SegmentBuilder, units: Patterns, replicas: Replicas, *, backward: bool, twice: bool = False
    ) -> None:
        layers = [(unit, number) for unit, number in _one_by_one(units) if not unit.root]
        wrapped = [unit for unit in units if unit.root]
        there = any(u.numel for u in wrapped), any(u.expert_numel for u in wrapped)
        root = UnitPattern(ROOT, "root", 0, 1, True, 0, 0, (0, 0), *there)
        self._builder, self._replicas = builder, replicas
        self._units = layers[::-1] if backward else ([(root, 0)] if root.numel else []) + layers
        # Parameters that stay are all on their way before the computation begins: nothing needs to be freed before.
        self._early = not backward and not replicas.gathering.reshard and replicas.beside
        self._suffix = TWICE if twice else ""
        # In backward the next unit is asked for early even where that hides nothing (on CPU).
        self._ahead = replicas.gathering.prefetch if backward or replicas.beside else 0
        self._asked = self._used = 0
        self._steady = 0  # consecutive units with the same events
        self._flying: list[tuple[int, ...]] = []  # events of gathers whose unit has not been used yet

    def ask(self) -> None:
        while self._asked < len(self._units) and len(self._flying) < self._ahead:
            self._issue()

    def arrive(self) -> None:
        """Wait for the oldest gathered unit, and copy it out into parameters."""
        again = self._used > 0 and self._units[self._used][0] is self._units[self._used - 1][0]
        self._steady = self._steady + 1 if again and len(self._flying) == self._ahead else 0
        if not self._flying:
            self._issue()
        for event in self._flying.pop(0):
            self._builder.wait(event)
        unit, number = self._units[self._used]
        self._used += 1
        self._builder.run(Slot(f"copy_out{self._suffix}", unit.number), unit.name, number)

    def repeat(self, unit: UnitPattern, since: int, most: int, step: int) -> int:
        """Repeat the events of a layer for the next layers as long as they wait for and gather the same sizes; return
        the number of repetitions.
        """
        if unit.root or self._steady <= self._ahead or len(self._flying) < self._ahead:
            return 0  # the gather that it waited for was started by a unit of another kind
        units, last, count = self._units, self._units[self._used - 1][0], 0
        while count < most and self._asked + count < len(units):
            if units[self._used + count][0] is not last or units[self._asked + count][0] is not last:
                break
            count += 1
        if count > 0:
            shift = self._builder.repeat(since, count, step)
            self._used += count
            self._asked += count
            self._flying = [tuple(event + shift for event in events) for events in self._flying]
        return count

    def _issue(self) -> None:
        (unit, number), groups = self._units[self._asked], self._replicas.groups
        self._asked += 1
        gathering = self._replicas.gathering
        nodes = 3 if gathering.lists else 1 + gathering.casts  # lists: with the whole tensor, and the host's list work
        self._builder.run(Slot(f"copy_in{self._suffix}", unit.number, num_nodes=nodes), unit.name, number)
        events = []
        for group, there, clock in ((groups.shard, unit.numel, DATA), (groups.experts, unit.expert_numel, SECOND)):
            if not there or group.size == 1:
                continue
            gather = Slot(f"gather{self._suffix}", unit.number, clock == SECOND)
            name = f"{unit.name}.parameters"
            if self._replicas.beside:
                events.append(self._builder.send(gather, clock, name, number, early=self._early))
            else:
                self._builder.block(gather, clock, name, number)
        self._flying.append(tuple(events))


class BackwardTraffic(NamedTuple):
    """The events of a backward segment besides its passages."""

    every: int  # as in Recompute
    gathers: bool  # whether parameters are gathered again (FSDP)
    reduces: bool  # whether gradients are sent
    accumulates: bool  # whether sums are then added to those of earlier micro-batches
    again: bool = False  # whether parameters are gathered for recomputation, and once more for backward


@cached(4096)
def forward_plan(units: Patterns, replicas: Replicas) -> Segment:
    """Plan of the forward of one micro-batch; ``units``: in forward order; ``replicas``: their ``pattern``."""
    joined = replicas.fully_sharded and not replicas.beside
    builder = SegmentBuilder("forward", replicas.compute_share, joined)
    if replicas.size == 1:
        for unit in units:
            builder.run(unit.run, unit.name, unit.first, times=unit.times)
    elif replicas.fully_sharded:
        gathers = _Gathers(builder, units, replicas, backward=False)
        if any(unit.root for unit in units):
            gathers.arrive()
        for unit in units:
            turn = 0
            while turn < unit.times:
                since, number = builder.num_events, unit.first + turn
                if not unit.root:
                    gathers.arrive()
                    gathers.ask()  # parameters of the next layers are gathered during this one
                builder.run(unit.run, unit.name, number)
                turn += 1 + gathers.repeat(unit, since, unit.times - turn - 1, 1)
    else:  # parameters of the optimizer's shards; each gather is waited for before its first use
        each, groups = _one_by_one(units), replicas.groups
        sent: list[list[int]] = [[] for _ in each]
        for (unit, number), events in zip(each, sent, strict=True):
            for group, there, clock in ((groups.shard, unit.numel, DATA), (groups.experts, unit.expert_numel, SECOND)):
                if group.size > 1 and there:
                    gather = Slot("gather", unit.number, clock == SECOND)
                    events.append(builder.send(gather, clock, f"{unit.name}.parameters", number, early=True))
        for (unit, number), events in zip(each, sent, strict=True):
            for event in events:
                builder.wait(event)
            builder.run(unit.run, unit.name, number)
    return builder.build()


@cached(4096)
def backward_plan(units: Patterns, replicas: Replicas, label: str, traffic: BackwardTraffic) -> Segment:
    """Plan of the backward of one micro-batch whose gradients are not sent bucket by bucket.

    ``label``: ``backward``, ``input`` or ``weight``; ``traffic``: what it does beside its passages.
    """
    joined = replicas.fully_sharded and not replicas.beside
    builder = SegmentBuilder(label, replicas.compute_share if replicas.size > 1 else 0.0, joined)
    if replicas.fully_sharded and traffic.gathers and label != WEIGHT:
        _run_gathered(builder, units, replicas, traffic)
    elif traffic.reduces:  # gradients are scattered unit by unit
        for unit in reversed(units):
            since, newest = builder.num_events, unit.first + unit.times - 1
            builder.run(unit.run, unit.name, newest, -1)
            _reduce_unit(builder, replicas, unit.number, unit.tensors, (newest, traffic.accumulates))
            if unit.times > 1:
                builder.repeat(since, unit.times - 1, -1)
    else:
        for unit in reversed(units):
            builder.run(unit.run, unit.name, unit.first + unit.times - 1, -1, times=unit.times)
    return builder.build()


def _run_gathered(builder: SegmentBuilder, units: Patterns, replicas: Replicas, traffic: BackwardTraffic) -> None:
    """FSDP: layers are gathered before their use; the root's gradients are reduced at the end."""
    gathers = _Gathers(builder, units, replicas, backward=True, twice=traffic.again)
    for unit in reversed(units):
        if unit.root:
            loss, nodes = unit.loss_nodes, unit.num_nodes
            builder.run(unit.run, unit.name, nodes=(0, loss))
            if loss:
                gathers.ask()  # the last layer's parameters are gathered during the head, without its loss
            builder.run(unit.run, unit.name, nodes=(loss, nodes))
            continue
        turn = 0
        while turn < unit.times:
            since, number = builder.num_events, unit.first + unit.times - 1 - turn
            gathers.arrive()
            gathers.ask()
            lists = traffic.reduces and replicas.gathering.lists  # the host splits them while the device computes
            cut = builder.host(Slot("grad_lists", unit.number), f"{unit.name}.lists", number) if lists else -1
            builder.run(unit.run, unit.name, number, -1)
            if traffic.reduces:  # buckets are numbered like the layers
                _reduce_unit(builder, replicas, unit.number, unit.tensors, (number, traffic.accumulates))
            if lists:
                builder.wait(cut)
            turn += 1 + gathers.repeat(unit, since, unit.times - turn - 1, -1)
    if traffic.reduces:
        number = sum(unit.times for unit in units if not unit.root)
        tensors = [unit.tensors for unit in units if unit.root]
        others, experts = sum(other for other, _ in tensors), sum(expert for _, expert in tensors)
        _reduce_unit(builder, replicas, ROOT, (others, experts), (number, traffic.accumulates))


def _reduce_unit(
    builder: SegmentBuilder, replicas: Replicas, unit: int, tensors: Sequence[int], how: tuple[int, bool]
) -> None:
    number, accumulate = how
    for expert in (False, True):
        if not tensors[expert]:
            continue
        name = BUCKET_NAMES[expert]
        if replicas.zero_stage == 3:
            builder.run(Slot("grad_in", unit, expert), name, number)
        wait = replicas.zero_stage == 3 and not replicas.beside
        works = enumerate(bucket_works(replicas, 1, expert=expert))
        slots = [None if work is None else Slot("reduce", unit, expert, second=at == 1) for at, work in works]
        builder.reduce(slots, number, expert=expert, wait=wait)
        if accumulate and replicas.accumulates_shards:
            builder.run(Slot("add", unit, expert, num_nodes=tensors[expert]), name, number)


Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Where gradients arrive in a backward pass; independent of the ops, the buckets and the replicas."""

    names: tuple[str, ...]  # for people: of the passages' blocks, then of the two kinds of buckets
    places: Longs  # of each unit: passage, its nodes, times, name, number, whether it can be cut anywhere; shape (u, 6)
    tensors: Longs  # node, elements and whether an expert's of each gradient of each unit, shape (g, 3)
    bounds: Longs  # gradients of unit i are bounds[i]:bounds[i + 1]


def plan_buckets(units: Sequence[tuple[BlockPass, int, str, int]]) -> tuple[tuple[BlockPass, ...], BucketPlan]:
    """Distinct passages of a backward pass, and where their gradients arrive.

    ``units``: passages in the order of backward; how often each runs in a row, its name, and the number of the first.
    """
    passages: dict[BlockPass, int] = {}
    rows = []
    for passage, times, name, newest in units:
        at = passages.setdefault(passage, len(passages))
        rows.append((at, passage.num_nodes, times, name, newest, passage.serial))
    return tuple(passages), _plan(tuple(rows), tuple([passage.gradients for passage, *_ in units]))


@cached(4096)
def _plan(
    rows: tuple[tuple[int, int, int, str, int, bool], ...], gradients: tuple[HashedTuple[tuple[int, int, bool]], ...]
) -> BucketPlan:
    """The plan of some units; it is the same for all micro-batches."""
    names = dict.fromkeys([*(name for _, _, _, name, _, _ in rows), *BUCKET_NAMES])
    number = {name: at for at, name in enumerate(names)}
    places = np.array([(*row[:3], number[row[3]], *row[4:]) for row in rows], dtype=np.int64).reshape(-1, 6)
    tensors = np.array([gradient for own in gradients for gradient in own], dtype=np.int64).reshape(-1, 3)
    return BucketPlan(tuple(names), places, tensors, np.cumsum([0, *map(len, gradients)]))


def send_buckets(label: str, passages: tuple[BlockPass, ...], plan: BucketPlan, replicas: Replicas) -> Segment:
    """Run a backward pass that sends gradients on the way; the last bucket has the remainder."""
    sent, events = _sent(plan, replicas)
    return Segment(label, passages, sent, events, plan.names, replicas.compute_share)


@cached(8192)
def _sent(plan: BucketPlan, replicas: Replicas) -> tuple[tuple[Collective, ...], NDArray[np.int32]]:
    """Distinct collectives of a backward pass, and the events of its segment."""
    limit = -(-replicas.bucket_bytes // replicas.gradient_bytes)
    sent: dict[Collective, int] = {}
    works = []
    for numel, expert in _cuts(plan, limit)[1]:
        for work in bucket_works(replicas, numel, expert=bool(expert)):
            works.append(-1 if work is None else sent.setdefault(work, len(sent)))
    return tuple(sent), _bucket_events(plan, limit, tuple(works))


@cached(8192)
def _cuts(plan: BucketPlan, limit: int) -> tuple[Longs, list[list[int]]]:
    """Where buckets are full, as ``bucket_rows`` takes it; elements of each distinct one, and whether experts'."""
    most = int((np.diff(plan.bounds) * plan.places[:, 2]).sum()) + 2
    table, found = np.empty((most, 7), dtype=np.int64), np.zeros(2, dtype=np.int64)
    cut_buckets(plan.places, plan.tensors, plan.bounds, limit, table, found)
    cuts = np.ascontiguousarray(table[: found[0], :5])
    if cuts[:, 4].any():  # the cuts of experts come after the others
        cuts = cuts[np.lexsort((cuts[:, 4], cuts[:, 2], cuts[:, 1], cuts[:, 0]))]
    return cuts, table[: found[1], 5:].tolist()


@cached(8192)
def _bucket_events(plan: BucketPlan, limit: int, works: tuple[int, ...]) -> NDArray[np.int32]:
    """Events of a backward pass; ``works``: the two collectives of each size, -1 if none."""
    cuts, _ = _cuts(plan, limit)
    rows = np.empty((5 * len(cuts) + 3 * len(plan.places), NUM_COLUMNS), dtype=np.int32)
    count = np.zeros(1, dtype=np.int64)
    bucket_rows(plan.places, cuts, np.array(works, dtype=np.int64).reshape(-1, 2), len(plan.names) - 2, rows, count)
    return rows[: count[0]]


@compiled
def cut_buckets(places: Longs, tensors: Longs, bounds: Longs, limit: int, table: Longs, found: Longs) -> None:
    """The positions at which buckets are full.

    Args:
        places, tensors, bounds: See ``BucketPlan``.
        limit: A bucket is full when it holds this many elements.
        table: Filled, shape ``(most, 7)``.  A row is a cut: unit, turn, node, number of its size, whether experts';
            first the others', then the experts'.  Columns 5 and 6 list the distinct sizes: elements, whether experts'.
        found: Filled: how many cuts and sizes.
    """
    cuts, sizes = table[:, :5], table[:, 5:]
    at, distinct = 0, 0
    for expert in range(2):
        held, unit, turn, node = 0, -1, 0, 0
        for u in range(len(places) + 1):
            last = u == len(places)
            for t in range(1 if last else places[u, 2]):
                for g in range(0 if last else bounds[u], 1 if last else bounds[u + 1]):
                    if not last:
                        if tensors[g, 2] != expert:
                            continue
                        held += tensors[g, 1]
                        unit, turn = u, t
                        node = tensors[g, 0] if places[u, 5] else places[u, 1]
                    if held >= limit or (last and held > 0):
                        size = distinct
                        for known in range(distinct - 1, -1, -1):
                            if sizes[known, 0] == held and sizes[known, 1] == expert:
                                size = known
                                break
                        if size == distinct:
                            sizes[size, 0], sizes[size, 1] = held, expert
                            distinct += 1
                        cuts[at, 0], cuts[at, 1], cuts[at, 2], cuts[at, 3], cuts[at, 4] = unit, turn, node, size, expert
                        at += 1
                        held = 0
    found[0], found[1] = at, distinct


@compiled
def bucket_rows(places: Longs, cuts: Longs, works: Longs, names: int, rows: NDArray[np.int32], count: Longs) -> None:
    """Events of units that are interrupted where buckets are full.

    Args:
        places, cuts: As in ``cut_buckets``, cuts in the order of issue.
        works: The one or two collectives of each size, -1 if none, shape ``(num_sizes, 2)``.
        names: Index of the name of others' buckets; that of experts' follows.
        rows, count: Filled: events, and how many.
    """
    at, cut = 0, 0
    numbers = np.zeros(2, dtype=np.int64)
    for u in range(len(places)):
        passage, nodes, times, name, newest = places[u, 0], places[u, 1], places[u, 2], places[u, 3], places[u, 4]
        turn, node = 0, 0
        while True:
            here = cut < len(cuts) and cuts[cut, 0] == u
            until, stop = (cuts[cut, 1], cuts[cut, 2]) if here else (times, 0)
            if stop == nodes:
                until, stop = until + 1, 0
            if node > 0 and turn < until:
                at = _put(rows, at, (RUN, passage, node, nodes, 1, name, newest - turn, -1))
                turn, node = turn + 1, 0
            if turn < until:
                at = _put(rows, at, (RUN, passage, 0, nodes, until - turn, name, newest - turn, -1))
                turn = until
            if stop > node:
                at = _put(rows, at, (RUN, passage, node, stop, 1, name, newest - turn, -1))
                node = stop
            if not here:
                break
            expert = cuts[cut, 4]
            sent = -1
            for which in range(2):
                if works[cuts[cut, 3], which] >= 0:
                    clock = SECOND if which == 1 or expert == 1 else DATA
                    work, name_at = works[cuts[cut, 3], which], names + expert
                    follows, sent = sent, at
                    at = _put(rows, at, (SEND, work, clock, follows, 0, name_at, numbers[expert], 0))
            numbers[expert] += 1
            cut += 1
    count[0] = at


def _put(rows: NDArray[np.int32], at: int, columns: tuple[int, ...]) -> int:
    """Fill in one row, and return the place of the next; a loop, as numba takes seconds to compile an assignment."""
    for column in range(len(columns)):
        rows[at, column] = columns[column]
    return at + 1
