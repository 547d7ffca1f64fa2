"""How ``_PipelineScheduleRuntime`` of ``torch.distributed.pipelining`` 2.13 lowers actions to entries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.compiling import compiled
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.schedules.base import BACKWARD, BACKWARD_WEIGHT, Ints, Schedule
from stepsight.simulator.schedules.entries import COMPUTE, POST, RECEIVE, SEND, WAIT, Messages, RankLists
from stepsight.simulator.schedules.order import Order

UNSHARDED_PARTS = 3  # parts that torch's lowering keeps gathered at the same time, with or without sharding


class _Actions(NamedTuple):
    """Actions of all ranks, rank after rank; those of rank ``r`` are ``first[r]`` to ``first[r + 1]``.

    Attributes:
        first: Shape ``(num_ranks + 1,)``.
        action: Index in ``Order`` of each, shape ``(num_actions,)``.
        kind, part: Of each, same shape.
        fused: Whether each and the next one are lowered as one, same shape.
    """

    first: Ints
    action: Ints
    kind: Ints
    part: Ints
    fused: NDArray[np.bool_]


class _Needs(NamedTuple):
    """Per action of an ``Order``, shape ``(num_actions,)``.

    Attributes:
        source: The action on another part whose result each needs, -1 if none.
        sends, asks: The message that each makes and needs, -1 if none.
        receiver: The rank that the message goes to, 0 if there is none.
    """

    source: Ints
    sends: Ints
    asks: Ints
    receiver: Ints


class _Turns(NamedTuple):
    """The state of the lowering.

    Attributes:
        at, to: Where each rank is in ``_Actions`` and in ``RankLists``, shape ``(num_ranks,)``.
        waiting: Turns that pass before each of ``_Actions``.
        done: Whether each action of an ``Order`` is lowered.
    """

    at: Ints
    to: Ints
    waiting: Ints
    done: NDArray[np.bool_]


def torch_lowered(schedule: Schedule, order: Order, messages: Messages) -> RankLists:
    """Every rank's entries.

    Ranks take turns to lower an action, and whoever sends has the other side ask: receives are posted long before they
    are needed.  Sends are waited for at the very end, the last one first.

    Raises:
        JobError: If fused pairs of actions deadlock.
    """
    own = order.by_stage
    fused = np.concatenate(schedule.fused) if schedule.fused else np.zeros(len(order), dtype=np.bool_)
    actions = _Actions(order.first, own, order.kind[own], order.part[own], fused)
    idle = np.zeros(len(order), dtype=np.int32)
    _count_idle(actions, schedule.num_micro_batches, schedule.num_parts, idle)
    sends, asks = messages.of_source >= 0, messages.of_target >= 0
    lengths = np.bincount(order.stage, 1 + 2 * sends + 2 * asks, minlength=schedule.num_stages).astype(np.int64)
    first = np.cumsum([0, *lengths]).astype(np.int32)
    op, item, side = np.empty((3, first[-1]), dtype=np.int32)
    lists = RankLists(op, item, side, first)
    receiver = np.zeros(len(order), dtype=np.int32)
    receiver[messages.source] = order.stage[messages.target]
    done = np.zeros(len(order), dtype=np.bool_)
    turns = _Turns(order.first[:-1].copy(), first[:-1].copy(), idle, done)
    _lower(actions, _Needs(order.source, messages.of_source, messages.of_target, receiver), turns, lists)
    if not done.all():
        raise JobError("a schedule must not deadlock, got: " + _stuck(order, done, fused))
    return lists


def _stuck(order: Order, done: NDArray[np.bool_], fused: NDArray[np.bool_]) -> str:
    """Raise if fused pairs wait for each other or for themselves; the order itself is known to run."""
    waits = []
    for stage in range(len(order.first) - 1):
        places = np.arange(order.first[stage], order.first[stage + 1])
        left = places[~done[order.by_stage[places]]]
        for place in left[: 1 + fused[left[0]]] if len(left) else ():
            action = int(order.by_stage[place])
            need = int(order.source[action])
            if need >= 0 and not done[need]:
                waits.append(f"stage {stage} at {order.name(action)} waits for {order.name(need)}")
    return "; ".join(waits)


@compiled
def _count_idle(actions: _Actions, num_micro_batches: int, num_parts: int, idle: Ints) -> None:
    """Count the turns that torch's lowering spends before each action on gathering, freeing and reducing parameters.

    They do nothing without FSDP, but shift the order in which receives are posted.

    Args:
        actions: Of all ranks.
        num_micro_batches, num_parts: Of the schedule.
        idle: Filled, of each action.
    """
    first, part, fused = actions.first, actions.part, actions.fused
    active = np.zeros(num_parts, dtype=np.bool_)
    left = np.zeros(num_parts, dtype=np.int32)
    soon = np.zeros(num_parts, dtype=np.int32)
    for stage in range(len(first) - 1):
        begin, end = first[stage], first[stage + 1]
        nearest = np.full((end - begin, UNSHARDED_PARTS), -1, dtype=np.int32)  # parts used next after each action
        _find_nearest(part[begin:end], soon, nearest)
        active[:] = False
        left[:] = num_micro_batches
        for at in range(begin, end):
            if at > begin and fused[at - 1]:
                continue
            wanted = nearest[at - begin]
            for number in range(num_parts):
                if active[number] and not (number == wanted).any():
                    active[number] = False
                    idle[at] += 1
            for place in range(UNSHARDED_PARTS):
                if wanted[place] >= 0 and not active[wanted[place]]:
                    active[wanted[place]] = True
                    idle[at] += 1
            after = at + 2 if fused[at] else at + 1
            for number in range(at, after):
                if actions.kind[number] == BACKWARD or actions.kind[number] == BACKWARD_WEIGHT:
                    left[part[number]] -= 1
                    if left[part[number]] == 0 and after < end:
                        idle[after] += 1


def _find_nearest(part: Ints, soon: Ints, nearest: Ints) -> None:
    """Fill in the distinct parts that a rank uses next after each action, the nearest first."""
    known = 0
    for at in range(len(part) - 1, -1, -1):
        move = 0
        while move < known and soon[move] != part[at]:
            move += 1
        if move == known:
            known += 1
        for place in range(move, 0, -1):
            soon[place] = soon[place - 1]
        soon[0] = part[at]
        for place in range(min(known, nearest.shape[1])):
            nearest[at, place] = soon[place]


@compiled
def _lower(actions: _Actions, needs: _Needs, turns: _Turns, lists: RankLists) -> None:
    """Write every rank's entries, in the order of ``_add_send_recv``; stop if ranks wait in a cycle.

    Args:
        actions, needs: What is lowered.
        turns: Where ranks begin; moved on.
        lists: Filled.
    """
    first, at = actions.first, turns.at
    left = len(actions.action)
    while left > 0:
        before = left
        slept = False
        for rank in range(len(at)):
            if at[rank] == first[rank + 1]:
                continue
            if turns.waiting[at[rank]] > 0:
                turns.waiting[at[rank]] -= 1
                slept = True
                continue
            end = at[rank] + 2 if actions.fused[at[rank]] else at[rank] + 1
            ready = True
            for number in range(at[rank], end):
                need = needs.source[actions.action[number]]
                ready = ready and (need < 0 or turns.done[need])
            if ready:
                _lower_actions(actions.action[at[rank] : end], rank, needs, turns, lists)
                left -= end - at[rank]
                at[rank] = end
        if left == before and not slept:
            return
    for rank in range(len(at)):
        for number in range(first[rank + 1] - 1, first[rank] - 1, -1):
            message = needs.sends[actions.action[number]]
            if message >= 0:
                _add(WAIT, message, SEND, rank, turns, lists)


def _lower_actions(own: Ints, rank: int, needs: _Needs, turns: _Turns, lists: RankLists) -> None:
    """Write the entries of one action or of two fused ones, and the receives that other ranks post for them."""
    for action in own:
        if needs.asks[action] >= 0:
            _add(WAIT, needs.asks[action], RECEIVE, rank, turns, lists)
        _add(COMPUTE, action, 0, rank, turns, lists)
    for action in own:
        turns.done[action] = True
        message = needs.sends[action]
        if message >= 0:
            _add(POST, message, SEND, rank, turns, lists)
            _add(POST, message, RECEIVE, needs.receiver[action], turns, lists)


def _add(op: int, item: int, side: int, rank: int, turns: _Turns, lists: RankLists) -> None:
    """Write one entry of a rank."""
    at = turns.to[rank]
    lists.op[at], lists.item[at], lists.side[at] = op, item, side
    turns.to[rank] += 1
