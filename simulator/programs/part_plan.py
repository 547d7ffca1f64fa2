"""Plans of a part's forward and backward: their events, without the sizes of blocks and groups.

Strategies that differ in micro-batch, degrees or replicas run the same events with other work, so a plan is made once
for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepsight.dataset.base.caching import HashedTuple, cached
from stepsight.simulator.clock.engine import DATA, SECOND
from stepsight.simulator.programs.block_pass import WEIGHT
from stepsight.simulator.programs.replicas import BUCKET_NAMES, Replicas, bucket_works, reduce_gradients
from stepsight.simulator.programs.segment import ROOT, TWICE, Segment, SegmentBuilder, Slot, UnitPattern


class Gathers:
    """FSDP's all-gathers of parameters; if they overlap, they run some units ahead of the computation.

    Args:
        builder: Where to.
        replicas: Who shares.
        units: What is gathered, in the order of use, each with its number; equal units are one object.
        ahead: Whether the next unit is asked for early even where that hides nothing (backward on CPU).
        early: Whether all are on their way before the computation begins (parameters that stay, once an iteration).
        twice: Whether recomputation and backward each gather what they use.
    """

    def __init__(
        self,
        builder: SegmentBuilder,
        replicas: Replicas,
        units: Sequence[tuple[UnitPattern, int]],
        *,
        ahead: bool,
        early: bool = False,
        twice: bool = False,
    ) -> None:
        self._builder = builder
        self._replicas = replicas
        self._units = units
        self._early = early and replicas.beside
        self._suffix = TWICE if twice else ""
        self._ahead = replicas.gathering.prefetch if ahead or replicas.beside else 0
        self._asked = self._used = 0
        self._steady = 0  # consecutive units with the same events
        self._flying: list[tuple[int, ...]] = []  # events of gathers whose unit has not been used yet

    def ask(self) -> None:
        """Start the all-gathers of the next units."""
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

    def alike(self) -> int:
        """Count the next units that have the same events as the last one: the same sizes waited for and gathered."""
        if self._steady <= self._ahead or len(self._flying) < self._ahead:
            return 0  # the gather that it waited for was started by a unit of another kind
        units, used, asked, count = self._units, self._used, self._asked, 0
        while asked + count < len(units):
            if units[used + count][0] is not units[used - 1][0] or units[asked + count][0] is not units[used - 1][0]:
                break
            count += 1
        return count

    def skip(self, count: int, shift: int) -> None:
        """Record that the events of the last unit were repeated ``count`` times, which shifted events by ``shift``."""
        self._used += count
        self._asked += count
        self._flying = [tuple(event + shift for event in events) for events in self._flying]

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


Patterns = HashedTuple[UnitPattern]


class BackwardTraffic(NamedTuple):
    """The events of a backward segment besides its passages.

    Attributes:
        every: As in ``Recompute``.
        gathers: Whether parameters are gathered again (FSDP).
        reduces: Whether gradients are sent.
        accumulates: Whether sums are then added to those of earlier micro-batches.
        again: Whether parameters are gathered for recomputation, and once more for backward.
    """

    every: int
    gathers: bool
    reduces: bool
    accumulates: bool
    again: bool = False


@cached(4096)
def forward_plan(units: Patterns, replicas: Replicas) -> Segment:
    """Plan of the forward of one micro-batch.

    Args:
        units: Of the part, in forward order.
        replicas: Their ``pattern``.
    """
    joined = replicas.fully_sharded and not replicas.beside
    builder = SegmentBuilder("forward", replicas.compute_share, joined)
    if replicas.size == 1:
        for unit in units:
            builder.run(unit.run, unit.name, unit.first, times=unit.times)
    elif replicas.fully_sharded:
        gathers = _gathers(builder, units, replicas, backward=False)
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
                turn += 1 + _repeat(builder, gathers, unit, since, unit.times - turn - 1, 1)
    else:  # parameters of the optimizer's shards; each gather is waited for before its first use
        sent = [_send_parameters(builder, unit, number, replicas) for unit, number in _one_by_one(units)]
        for (unit, number), events in zip(_one_by_one(units), sent, strict=True):
            for event in events:
                builder.wait(event)
            builder.run(unit.run, unit.name, number)
    return builder.build()


@cached(4096)
def backward_plan(units: Patterns, replicas: Replicas, label: str, traffic: BackwardTraffic) -> Segment:
    """Plan of the backward of one micro-batch whose gradients are not sent bucket by bucket.

    Args:
        units, replicas: As in ``forward_plan``.
        label: ``backward``, ``input`` or ``weight``.
        traffic: What it does beside its passages.
    """
    joined = replicas.fully_sharded and not replicas.beside
    builder = SegmentBuilder(label, replicas.compute_share if replicas.size > 1 else 0.0, joined)
    if replicas.fully_sharded and traffic.gathers and label != WEIGHT:
        _run_gathered(builder, units, replicas, traffic)
    elif traffic.reduces:
        _run_by_unit(builder, units, replicas, traffic)
    else:
        for unit in reversed(units):
            builder.run(unit.run, unit.name, unit.first + unit.times - 1, -1, times=unit.times)
    return builder.build()


def _one_by_one(units: Patterns) -> list[tuple[UnitPattern, int]]:
    """Each block of some units with its number, in order."""
    return [(unit, unit.first + turn) for unit in units for turn in range(unit.times)]


def _gathers(
    builder: SegmentBuilder, units: Patterns, replicas: Replicas, *, backward: bool, twice: bool = False
) -> Gathers:
    """All-gathers in the order of use: the root first; in backward only layers (the root stays gathered)."""
    layers = [(unit, number) for unit, number in _one_by_one(units) if not unit.root]
    wrapped = [unit for unit in units if unit.root]
    root = UnitPattern(
        ROOT, "root", 0, 1, True, 0, 0, (0, 0), any(u.numel for u in wrapped), any(u.expert_numel for u in wrapped)
    )
    order = layers[::-1] if backward else ([(root, 0)] if root.numel else []) + layers
    early = not backward and not replicas.gathering.reshard  # nothing needs to be freed before
    return Gathers(builder, replicas, order, ahead=backward, early=early, twice=twice)


def _repeat(builder: SegmentBuilder, gathers: Gathers, unit: UnitPattern, since: int, most: int, step: int) -> int:
    """Repeat the events of a layer for the next layers as long as they are equal; return the number of repetitions."""
    times = 0 if unit.root else min(most, gathers.alike())
    if times > 0:
        gathers.skip(times, builder.repeat(since, times, step))
    return max(times, 0)


def _send_parameters(builder: SegmentBuilder, unit: UnitPattern, number: int, replicas: Replicas) -> list[int]:
    groups, sent = replicas.groups, []
    for group, there, clock in ((groups.shard, unit.numel, DATA), (groups.experts, unit.expert_numel, SECOND)):
        if group.size > 1 and there:
            gather = Slot("gather", unit.number, clock == SECOND)
            sent.append(builder.send(gather, clock, f"{unit.name}.parameters", number, early=True))
    return sent


def _run_gathered(builder: SegmentBuilder, units: Patterns, replicas: Replicas, traffic: BackwardTraffic) -> None:
    """FSDP: layers are gathered before their use; the root's gradients are reduced at the end."""
    gathers = _gathers(builder, units, replicas, backward=True, twice=traffic.again)
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
            turn += 1 + _repeat(builder, gathers, unit, since, unit.times - turn - 1, -1)
    if traffic.reduces:
        number = sum(unit.times for unit in units if not unit.root)
        tensors = [unit.tensors for unit in units if unit.root]
        others, experts = sum(other for other, _ in tensors), sum(expert for _, expert in tensors)
        _reduce_unit(builder, replicas, ROOT, (others, experts), (number, traffic.accumulates))


def _run_by_unit(builder: SegmentBuilder, units: Patterns, replicas: Replicas, traffic: BackwardTraffic) -> None:
    """Gradients are scattered unit by unit."""
    for unit in reversed(units):
        since, newest = builder.num_events, unit.first + unit.times - 1
        builder.run(unit.run, unit.name, newest, -1)
        _reduce_unit(builder, replicas, unit.number, unit.tensors, (newest, traffic.accumulates))
        if unit.times > 1:
            builder.repeat(since, unit.times - 1, -1)


def _reduce_unit(
    builder: SegmentBuilder, replicas: Replicas, unit: int, tensors: Sequence[int], how: tuple[int, bool]
) -> None:
    """Reduce the gradients of a unit."""
    number, accumulate = how
    for expert in (False, True):
        if not tensors[expert]:
            continue
        name = BUCKET_NAMES[expert]
        if replicas.zero_stage == 3:
            builder.run(Slot("grad_in", unit, expert), name, number)
        wait = replicas.zero_stage == 3 and not replicas.beside
        first, second = bucket_works(replicas, 1, expert=expert)
        slots = (
            None if first is None else Slot("reduce", unit, expert),
            None if second is None else Slot("reduce", unit, expert, second=True),
        )
        reduce_gradients(builder, slots, number, expert=expert, wait=wait)
        if accumulate and replicas.accumulates_shards:
            builder.run(Slot("add", unit, expert, num_nodes=tensors[expert]), name, number)
