"""What ranks do in a pipeline, entry by entry: computations, posts of messages, and waits for them; in one order.

A post is never blocking: a side says that it is ready to send or to receive.  A message passes when both sides have
posted it.  A wait ends when the message has passed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.errors import JobError
from stepsight.simulator.clock.engine import compiled
from stepsight.simulator.schedules.base import Ints
from stepsight.simulator.schedules.order import Order

COMPUTE, POST, WAIT = range(3)
SEND, RECEIVE = range(2)


@dataclass(frozen=True, eq=False)
class Entries:
    """What ranks do, in one order; arrays of shape ``(num_entries,)``.

    Attributes:
        op: ``COMPUTE``, ``POST`` or ``WAIT``.
        stage: Whose entry it is.
        index: The action that is computed, or the message that is posted or waited for.
        side: ``SEND`` or ``RECEIVE`` of a message.
    """

    op: Ints
    stage: Ints
    index: Ints
    side: Ints


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
    """Op, index and side of every rank's entries, in one order that can run."""
    op, index, side = (np.concatenate([rank[field] for rank in ranks]) for field in range(3))
    return in_one_order(order, messages, op, index, side, np.cumsum([0, *(len(r[0]) for r in ranks)]).astype(np.int32))


def in_one_order(order: Order, messages: Messages, op: Ints, index: Ints, side: Ints, first: Ints) -> Entries:
    """Entries of all ranks in one order that can run; those of rank ``r`` are ``first[r]`` to ``first[r + 1]``.

    Raises:
        JobError: If ranks wait for each other in a circle.
    """
    entries = np.full(len(op), -1, dtype=np.int32)
    reached = first[:-1].copy()
    _interleave(first, op, index, side, np.zeros((len(messages.source), 2), dtype=np.bool_), entries, reached)
    if len(entries) and entries[-1] < 0:
        raise JobError(_circle(order, messages, op, index, side, first, reached))
    stage = np.repeat(np.arange(len(first) - 1, dtype=np.int32), np.diff(first))
    return Entries(op[entries], stage[entries], index[entries], side[entries])


@compiled
def _interleave(
    first: Ints, op: Ints, index: Ints, side: Ints, posted: NDArray[np.bool_], entries: Ints, reached: Ints
) -> None:
    """Let every rank go on as far as it can, round after round.

    Args:
        first: Entries of rank ``r`` are ``first[r]`` to ``first[r + 1]``.
        op, index, side: Of each entry.
        posted: Per message and side, all false.
        entries: Filled with the entries in the order of completion; stays -1 behind where it is stuck.
        reached: Where each rank is.
    """
    placed = 0
    moved = True
    while moved:
        moved = False
        for rank in range(len(reached)):
            at = reached[rank]
            while at < first[rank + 1]:
                if op[at] == WAIT and not (posted[index[at], 0] and posted[index[at], 1]):
                    break
                if op[at] == POST:
                    posted[index[at], side[at]] = True
                entries[placed] = at
                placed += 1
                at += 1
            if at != reached[rank]:
                moved = True
                reached[rank] = at


def _circle(order: Order, messages: Messages, op: Ints, index: Ints, side: Ints, first: Ints, reached: Ints) -> str:
    waits = []
    for rank in range(len(reached)):
        at = int(reached[rank])
        if at < first[rank + 1]:
            source, target = int(messages.source[index[at]]), int(messages.target[index[at]])
            if side[at] == SEND:
                waits.append(f"stage {rank} waits until stage {order.stage[target]} takes {order.name(source)}")
            else:
                waits.append(f"stage {rank} waits until stage {order.stage[source]} sends {order.name(source)}")
    return "a schedule must not wait in a circle, got: " + "; ".join(waits)
