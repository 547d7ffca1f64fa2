"""The entries of ranks in a pipeline: computations, posts of messages, and waits for them; in one order.

A post is never blocking: a side says that it is ready to send or to receive.  A message passes when both sides have
posted it.  A wait ends when the message has passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.compiling import compiled
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.schedules.base import Ints
from stepsight.simulator.schedules.order import Order

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
    """Advance every rank as far as possible, round after round.

    Args:
        lists: What each rank does.
        posted: Per message and side, all false.
        entries: Filled with the entries in the order of completion; stays -1 behind where it is stuck.
        reached: Where each rank is.
    """
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
