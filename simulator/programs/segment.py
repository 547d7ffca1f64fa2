"""Segments: what one stage runs without interruption, as passages through blocks and the replicas' traffic.

A segment is a list of *events* in the order of issue.  Repeated layers are one event, so its cost grows with the
replicas' messages, not with ops; ``program`` writes all of it out at op level, and takes exactly as long.

A plan is a segment of slots, placeholders for passages and collectives, which the work of one rank fills.  Strategies
that differ in micro-batch, degrees or replicas run the same events with other work, so a plan of a part's forward or
backward is made once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import HashedTuple, cached
from stepsight.dataset.graph.program import Program
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.step import Item
from stepsight.simulator.clock.engine import BLOCK, DATA, ON_HOST, RUN, SECOND, SEND, WAIT
from stepsight.simulator.programs.block_pass import WEIGHT, BlockPass, items_pass
from stepsight.simulator.programs.op_level import Issue, OpGraph, Work, Written, op_graph, write_out
from stepsight.simulator.programs.sizes import Replicas, bucket_works

BUCKET_NAMES = ("gradients{}", "expert_gradients{}")  # of ordinary parameters, of experts


@dataclass(frozen=True, eq=False)
class Segment:
    """Events of one segment.

        RUN    passage, first node, last node (exclusive), times   | name, number, step
        SEND   collective, clock, event that it follows or -1, 1: early, 2: of the host | name, number, -
        BLOCK  collective, clock, -, -                             | name, number, -
        WAIT   event, -, -, -                                      | -, -, -

    names: For people; in each ``{}`` stands for the event's number, to which every repetition adds ``step``.
    compute_share: Part of a sent collective's time that is taken from the computation.
    joined: Whether it ends only when all of its collectives do.
    """

    label: str  # forward, backward, input, weight or optimizer
    passages: tuple[BlockPass, ...]  # distinct passages that its events run
    sent: tuple[Collective, ...]  # distinct collectives that its events send
    events: NDArray[np.int32]  # shape (num_events, 8), int32; columns by kind::
    names: tuple[str, ...]
    compute_share: float = 0.0
    joined: bool = False

    @property
    def program(self) -> Program:
        """Everything at op level."""
        return self.written.program

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Distinct signatures in order of first use in ``program``."""
        return tuple(dict.fromkeys(node.work for node in self.program.nodes))

    @cached_property
    def flops(self) -> float:
        """FLOP of one run on one rank: of products and attention alone, a multiply-add as two; causal attention counts
        the half that is computed.
        """
        return self._sum(lambda op: op.flops if op.record.bound == "compute" else 0.0)

    @cached_property
    def looked_up_bytes(self) -> float:
        """Bytes that lookups in embedding tables read and write in one run on one rank."""
        return self._sum(lambda op: op.num_bytes if op.family == "table_lookup" else 0.0)

    def _sum(self, amount: Callable[[Op], float]) -> float:
        """Sum over the ops of all passages."""
        total = 0.0
        for what, first, last, times in self.events[self.events[:, 0] == RUN, 1:5].tolist():
            works = [node.work for node in self.passages[what].program.nodes[first:last]]
            total += times * sum(amount(work) for work in works if isinstance(work, Op))
        return total

    def filled(self, work: Callable[[Slot], Any]) -> Segment:
        """The segment of one rank, if this is a plan: its ``passages`` and ``sent`` are slots, which ``work`` fills."""
        passages, sent = (tuple([work(slot) for slot in slots]) for slots in (self.passages, self.sent))  # type: ignore[arg-type]
        return Segment(self.label, passages, sent, self.events, self.names, self.compute_share, self.joined)

    @cached_property
    def graph(self) -> OpGraph:
        return op_graph(self.works, self.written)

    @cached_property
    def written(self) -> Written:
        """Everything at op level, and what nodes are."""
        out = Issue(self.label, self.compute_share)
        return write_out(out, self.events, self.names, lambda at, *ends: self.passages[at].between(*ends), self.sent)


NUM_COLUMNS = 8
_Row = tuple[int, int, int, int, int, int, int, int]  # as ``Segment.events``


class SegmentBuilder:
    """Records events in the order of issue. ``send`` returns the handle that ``wait`` takes.

    Passages and collectives may be slots (``slots``): then what is built belongs to a plan.
    """

    def __init__(self, label: str, compute_share: float = 0.0, joined: bool = False) -> None:
        self._label = label
        self._share = compute_share
        self._joined = joined
        self._passages: dict[Any, int] = {}
        self._sent: dict[Any, int] = {}
        self._names: dict[str, int] = {}
        self._rows: list[_Row] = []
        self._done: list[NDArray[np.int32]] = []  # events before ``_rows``
        self._before = 0

    @property
    def num_events(self) -> int:
        return self._before + len(self._rows)

    def run(
        self,
        passage: BlockPass | Slot,
        name: str,
        number: int = 0,
        step: int = 1,
        *,
        times: int = 1,
        nodes: tuple[int, int] | None = None,
    ) -> None:
        """Run a passage several times, or some of its nodes once."""
        first, last = nodes or (0, passage.num_nodes)
        if last > first and times:
            at = self._passages.setdefault(passage, len(self._passages))
            label = self._names.setdefault(name, len(self._names))
            self._rows.append((RUN, at, first, last, times, label, number, step))

    def items(self, items: Sequence[Item], name: str, number: int = 0, own: str = "") -> None:
        """Run ops, and collectives of groups other than replicas, as ``name.own``."""
        if items:
            self.run(items_pass(tuple(items), own), name, number)

    def send(
        self, work: Hashable, clock: int, name: str, number: int = 0, *, after: int = -1, early: bool = False
    ) -> int:
        """Start a collective that overlaps with the computation; ``early``: before the computation reaches it."""
        return self._add(SEND, work, (clock, after, int(early)), name, number)

    def host(self, work: Hashable, name: str, number: int = 0) -> int:
        """Start work of the host that overlaps with the computation."""
        return self._add(SEND, work, (SECOND, -1, ON_HOST), name, number)

    def block(self, work: Hashable, clock: int, name: str, number: int = 0) -> int:
        """Run a collective that the computation waits for."""
        return self._add(BLOCK, work, (clock, 0, 0), name, number)

    def reduce(
        self, works: Sequence[Collective | Slot | None], number: int, *, expert: bool = False, wait: bool = False
    ) -> None:
        """Sum one bucket of gradients, with hybrid sharding within a group and then between groups.

        ``works``: what ``bucket_works`` says, or slots for it; ``wait``: whether the computation waits for it.
        """
        name, sent = BUCKET_NAMES[expert], -1
        for work, clock in zip(works, (SECOND if expert else DATA, SECOND), strict=True):
            if work is not None and wait:
                self.block(work, clock, name, number)
            elif work is not None:
                sent = self.send(work, clock, name, number, after=sent)

    def wait(self, event: int) -> None:
        self._rows.append((WAIT, event, 0, 0, 0, self._names.setdefault("", len(self._names)), 0, 0))

    def repeat(self, since: int, times: int, step: int) -> int:
        """Repeat the events since an event; indices advance by ``step``. Return by how many events they are shifted."""
        rows = np.array(self._rows[since - self._before :], dtype=np.int32)
        length = len(rows)
        again = np.tile(rows, (times, 1))
        turn = np.repeat(np.arange(1, times + 1, dtype=np.int32), length)
        kind = again[:, 0]
        again[:, 1] += np.where(kind == WAIT, length * turn, 0)
        again[:, 3] += np.where((kind == SEND) & (again[:, 3] >= 0), length * turn, 0)
        again[:, 6] += np.where(kind == WAIT, 0, step * turn)
        self._done += [*([np.array(self._rows, dtype=np.int32)] if self._rows else []), again]
        self._before += len(self._rows) + len(again)
        self._rows = []
        return length * times

    def build(self) -> Segment:
        rows = _events(tuple(self._rows))
        return Segment(
            self._label,
            tuple(self._passages),
            tuple(self._sent),
            np.concatenate([*self._done, rows]) if self._done else rows,
            tuple(self._names),
            self._share,
            self._joined,
        )

    def _add(self, kind: int, work: Hashable, how: tuple[int, int, int], name: str, number: int) -> int:
        """Record an event of a collective; collectives and names are numbered in the order of first use."""
        at = self._sent.setdefault(work, len(self._sent))
        self._rows.append((kind, at, *how, self._names.setdefault(name, len(self._names)), number, 0))
        return self.num_events - 1


@cached(4096)
def _events(rows: tuple[_Row, ...]) -> NDArray[np.int32]:
    """Rows as an array, which segments with the same events share."""
    return np.array(rows, dtype=np.int32).reshape(-1, NUM_COLUMNS)


TWICE = "_twice"
ROOT = -1  # replaces a unit's index: the units that FSDP wraps with the model itself


class Slot(NamedTuple):
    """A placeholder for a passage or a collective."""

    # run (a unit's own passage); copy_in, copy_out and gather of its parameters, with TWICE where recomputation and
    # backward each gather; grad_in, grad_lists, reduce and add of its gradients
    what: str
    unit: int  # index of the unit, or ROOT
    expert: bool = False  # whether it is for experts' parameters
    second: bool = False  # of two collectives that sum gradients, whether it is the one between hybrid shards
    num_nodes: int = 1  # of a passage


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
