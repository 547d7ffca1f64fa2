"""Plans of a part's forward and backward: where FSDP gathers parameters, and where gradients are sent.

Strategies that differ in micro-batch, degrees or replicas run the same events with other work, so a plan is made once
for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepsight.dataset.base.caching import HashedTuple, cached
from stepsight.simulator.clock.engine import DATA, SECOND
from stepsight.simulator.programs.block_pass import WEIGHT
from stepsight.simulator.programs.segment import BUCKET_NAMES, Segment, SegmentBuilder, Slot
from stepsight.simulator.programs.sizes import Replicas, bucket_works

TWICE = "_twice"
ROOT = -1  # replaces a unit's index: the units that FSDP wraps with the model itself


class UnitPattern(NamedTuple):
    """The properties of a unit that the events of a segment depend on."""

    number: int  # position of the unit in its part
    # name, first, times, root: as in Unit
    name: str
    first: int
    times: int
    root: bool
    num_nodes: int  # of its passage
    loss_nodes: int  # of these, the first that belong to the head's loss
    tensors: tuple[int, int]  # number of its parameter tensors, of others and of experts
    # numel, expert_numel: whether it has parameters at all, others' and experts'
    numel: bool
    expert_numel: bool

    @property
    def run(self) -> Slot:
        """The slot of its own passage."""
        return Slot("run", self.number, num_nodes=self.num_nodes)


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
