"""An order in which all actions of a schedule can run, and the entries of ranks: computations, posts, waits.

A post is never blocking: a side says that it is ready to send or to receive.  A message passes when both sides have
posted it.  A wait ends when the message has passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.compiling import compiled
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KIND_NAMES,
    Actions,
    Ints,
    Schedule,
)


@dataclass(frozen=True, eq=False)
class Order:
    """All actions of a schedule in one order that respects every dependency; arrays of shape ``(num_actions,)``.

    Attributes:
        stage, kind, micro_batch, part: Of each action.
        source: Index of the action on another part whose result it needs, -1 if none.
        own: Index of the action on its own part that it needs, -1 if none.
        first: Actions of stage ``s``, in its order, are ``by_stage[first[s]:first[s + 1]]``.
        by_stage: Index of every action, stage after stage.
    """

    stage: Ints
    kind: Ints
    micro_batch: Ints
    part: Ints
    source: Ints
    own: Ints
    first: Ints
    by_stage: Ints

    def __len__(self) -> int:
        return len(self.stage)

    def name(self, action: int) -> str:
        """The action in readable form, for messages."""
        return f"{KIND_NAMES[self.kind[action]]}{self.micro_batch[action]} of part {self.part[action]}"


def order_actions(schedule: Schedule) -> Order:
    """Check a schedule and sort its actions into an order that can run.

    Raises:
        JobError: If an action is missing, repeated or out of range, or if stages deadlock; the
            message says who waits for what.
    """
    lengths = [len(rows) for rows in schedule.actions]
    rows = np.concatenate(schedule.actions)
    stage = np.repeat(np.arange(schedule.num_stages, dtype=np.int32), lengths)
    part_of = schedule.part_of
    _check_ranges(schedule, rows, stage, part_of)
    kind, micro_batch = np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])
    part = part_of[stage, rows[:, 2]]
    index = _index(schedule, kind, micro_batch, part)
    source, own = _requirements(schedule, kind, micro_batch, part, index)
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    order = np.full(len(rows), -1, dtype=np.int32)
    position = np.full(len(rows), -1, dtype=np.int32)
    _sweep(first, source, own, order, position)
    alone = Order(stage, kind, micro_batch, part, source, own, first, np.arange(len(rows), dtype=np.int32))
    if len(order) and order[-1] < 0:
        raise JobError("a schedule must not deadlock, got: " + _deadlock(alone, position))
    return Order(
        stage[order], kind[order], micro_batch[order], part[order],
        _renumber(source[order], position), _renumber(own[order], position), first, position,
    )  # fmt: skip


def _renumber(index: Ints, position: Ints) -> Ints:
    return np.where(index >= 0, position[index], -1)


def _check_ranges(schedule: Schedule, rows: Actions, stage: Ints, part_of: Ints) -> None:
    limits = np.array([len(KIND_NAMES), schedule.num_micro_batches, part_of.shape[1]])
    if len(rows) and (rows.min() < 0 or (rows.max(axis=0) >= limits).any()):
        wrong = ((rows < 0) | (rows >= limits)).any(axis=1)
    else:
        wrong = part_of[stage, rows[:, 2]] < 0
    if wrong.any():
        at = int(np.argmax(wrong))
        raise JobError(
            "a schedule's actions are (kind, micro_batch, chunk) with kind < 4, "
            f"micro_batch < {schedule.num_micro_batches} and a chunk that the stage holds, "
            f"got {tuple(map(int, rows[at]))} on stage {stage[at]}"
        )


def _index(schedule: Schedule, kind: Ints, micro_batch: Ints, part: Ints) -> Ints:
    """Index of each kind of action of each part and micro-batch, -1 if missing; shape ``(4, num_parts,
    num_micro_batches)``.
    """
    parts, micro = schedule.num_parts, schedule.num_micro_batches
    index = np.full((4, parts, micro), -1, dtype=np.int32)
    flat = (kind * parts + part) * micro + micro_batch
    index.ravel()[flat] = np.arange(len(kind), dtype=np.int32)
    there = index >= 0
    whole, split = there[BACKWARD], there[BACKWARD_INPUT]
    good = there[FORWARD] & (whole != split) & (there[BACKWARD_WEIGHT] == split)
    if not good.all() or len(kind) != np.count_nonzero(there):
        counts = np.bincount(flat, minlength=index.size).reshape(index.shape)
        good &= (counts <= 1).all(axis=0)
        where = tuple(np.argwhere(~good)[0])
        seen = ", ".join(f"{int(counts[number][where])} {name}" for number, name in enumerate(KIND_NAMES))
        raise JobError(
            "every part runs each micro-batch once forward (F) and once backward (B, or I and W), "
            f"got {seen} for part {where[0]}, micro-batch {where[1]}"
        )
    return index


def _requirements(schedule: Schedule, kind: Ints, micro_batch: Ints, part: Ints, index: Ints) -> tuple[Ints, Ints]:
    """Indices of the actions whose results an action needs: from another part, and from its own; -1 if none."""
    parts = schedule.num_parts
    forward = index[FORWARD]
    backward = np.maximum(index[BACKWARD], index[BACKWARD_INPUT])
    table = np.full((2, 4, parts, schedule.num_micro_batches), -1, dtype=np.int32)
    table[0, FORWARD, 1:] = forward[:-1]
    table[0, BACKWARD, :-1] = table[0, BACKWARD_INPUT, :-1] = backward[1:]
    table[1, BACKWARD] = table[1, BACKWARD_INPUT] = forward
    table[1, BACKWARD_WEIGHT] = backward
    return table[0, kind, part, micro_batch], table[1, kind, part, micro_batch]


@compiled
def _sweep(first: Ints, source: Ints, own: Ints, order: Ints, position: Ints) -> None:
    """Advance every stage as far as possible, round after round."""
    pointer = first[:-1].copy()
    placed = 0
    moved = True
    while moved:
        moved = False
        for stage in range(len(pointer)):
            at = pointer[stage]
            while at < first[stage + 1]:
                if source[at] >= 0 and position[source[at]] < 0:
                    break
                if own[at] >= 0 and position[own[at]] < 0:
                    break
                order[placed] = at
                position[at] = placed
                placed += 1
                at += 1
            if at != pointer[stage]:
                moved = True
                pointer[stage] = at


def _deadlock(order: Order, position: NDArray[np.int32]) -> str:
    waits = []
    for stage in range(len(order.first) - 1):
        own = np.arange(order.first[stage], order.first[stage + 1])
        stuck = own[position[own] < 0]
        if len(stuck):
            at = int(stuck[0])
            missing = [need for need in (int(order.source[at]), int(order.own[at])) if need >= 0 > position[need]]
            names = " and ".join(order.name(need) for need in missing)
            waits.append(f"stage {stage} at {order.name(at)} waits for {names}")
    return "; ".join(waits)


COMPUTE, POST, WAIT = range(3)
SEND, RECEIVE = range(2)


class Entries(NamedTuple):
    """Entries of all ranks, in one order that can run; arrays of shape ``(num_entries,)``.

    Attributes:
        op: ``COMPUTE``, ``POST`` or ``WAIT``.
        stage: The rank whose entry it is.
        item: The action that is computed, or the message that is posted or waited for.
        side: ``SEND`` or ``RECEIVE`` of a message.
    """

    op: Ints
    stage: Ints
    item: Ints
    side: Ints

    def unsigned(self) -> Entries:
        """The entries as unsigned integers for the clock's loops: signed indices cost a fifth of the time."""
        fields: Iterator[Any] = (field.view(np.uint32) for field in self)
        return Entries(*fields)


class RankLists(NamedTuple):
    """Entries of the ranks, rank after rank.

    Attributes:
        op, item, side: As in ``Entries``.
        first: Entries of rank ``r`` are ``first[r]`` to ``first[r + 1]``, shape ``(num_ranks + 1,)``.
    """

    op: Ints
    item: Ints
    side: Ints
    first: Ints


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages of an order of actions.

    Attributes:
        source, target: Actions that make and need each, shape ``(num_messages,)``.
        of_source, of_target: Message that each action makes and needs, -1 if none, shape ``(num_actions,)``.
    """

    source: Ints
    target: Ints
    of_source: Ints
    of_target: Ints


def find_messages(order: Order) -> Messages:
    """Results that go to another stage; at most one from and one to every action."""
    crossing = (order.source >= 0) & (order.stage[order.source] != order.stage)
    target = np.flatnonzero(crossing).astype(np.int32)
    source = order.source[target]
    of_source, of_target = np.full((2, len(order)), -1, dtype=np.int32)
    of_source[source] = of_target[target] = np.arange(len(target), dtype=np.int32)
    return Messages(source, target, of_source, of_target)


def interleaved(order: Order, messages: Messages, ranks: list[tuple[Ints, ...]]) -> Entries:
    """Sort every rank's entries, given as op, item and side, into one order that can run."""
    op, item, side = (np.concatenate([rank[field] for rank in ranks]) for field in range(3))
    first = np.cumsum([0, *(len(rank[0]) for rank in ranks)]).astype(np.int32)
    return in_one_order(order, messages, RankLists(op, item, side, first))


def in_one_order(order: Order, messages: Messages, lists: RankLists) -> Entries:
    """Sort the entries of all ranks into one order that can run.

    Raises:
        JobError: If ranks deadlock.
    """
    op, item, side, first = lists
    placed = np.full(len(op), -1, dtype=np.int32)
    reached = first[:-1].copy()
    _interleave(lists, np.zeros((len(messages.source), 2), dtype=np.bool_), placed, reached)
    if len(placed) and placed[-1] < 0:
        raise JobError(_circle(order, messages, lists, reached))
    stage = np.repeat(np.arange(len(first) - 1, dtype=np.int32), np.diff(first))
    return Entries(op[placed], stage[placed], item[placed], side[placed])


@compiled
def _interleave(lists: RankLists, posted: NDArray[np.bool_], entries: Ints, reached: Ints) -> None:
    """Advance every rank as far as possible, round after round."""
    op, item, side, first = lists
    placed = 0
    moved = True
    while moved:
        moved = False
        for rank in range(len(reached)):
            at = reached[rank]
            while at < first[rank + 1]:
                if op[at] == WAIT and not (posted[item[at], 0] and posted[item[at], 1]):
                    break
                if op[at] == POST:
                    posted[item[at], side[at]] = True
                entries[placed] = at
                placed += 1
                at += 1
            if at != reached[rank]:
                moved = True
                reached[rank] = at


def _circle(order: Order, messages: Messages, lists: RankLists, reached: Ints) -> str:
    """Describe which rank waits for which."""
    waits = []
    for rank in range(len(reached)):
        at = int(reached[rank])
        if at < lists.first[rank + 1]:
            message = lists.item[at]
            source, target = int(messages.source[message]), int(messages.target[message])
            if lists.side[at] == SEND:
                waits.append(f"stage {rank} waits until stage {order.stage[target]} takes {order.name(source)}")
            else:
                waits.append(f"stage {rank} waits until stage {order.stage[source]} sends {order.name(source)}")
    return "a schedule must not deadlock, got: " + "; ".join(waits)


AROUND = ((POST, RECEIVE), (WAIT, RECEIVE), (COMPUTE, 0), (POST, SEND))  # the possible entries around an action


def asynchronous(order: Order, messages: Messages) -> Entries:
    """GPU frameworks: an action requests its inputs, waits for them, and sends its result without waiting."""
    actions = np.arange(len(order), dtype=np.int32)
    slots = np.stack([messages.of_target, messages.of_target, actions, messages.of_source], axis=1)
    op, item, side, where = flatten(slots, AROUND)
    return Entries(op, order.stage[where], item, side)


def flatten(slots: Ints, columns: Sequence[tuple[int, int]] = AROUND) -> tuple[Ints, Ints, Ints, NDArray[np.int64]]:
    """Op, item and side of the slots that are not -1, row by row, and their rows; ``columns``: op and side of each."""
    where, column = np.nonzero(slots >= 0)
    op, side = np.array(columns, dtype=np.int32)[column].T
    return op, slots[where, column], side, where
