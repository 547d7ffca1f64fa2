"""How pipeline runtimes turn actions into entries: computations, posts of messages, and waits for them.

A post is never blocking: a side says that it is ready to send or to receive.  A message passes when both sides have
posted it.  A wait ends when the message has passed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.errors import JobError
from stepsight.simulator.engine import compiled
from stepsight.simulator.schedules.base import BACKWARD, BACKWARD_WEIGHT, Ints, Schedule
from stepsight.simulator.schedules.find import find_schedule
from stepsight.simulator.schedules.order import Order

COMPUTE, POST, WAIT = range(3)
SEND, RECEIVE = range(2)
UNSHARDED_PARTS = 3  # that torch's lowering keeps at once, whether or not anything is sharded

# What may stand around an action, in this order: columns of ``_Slots``.
_COLUMNS = ((POST, SEND), (POST, RECEIVE), (WAIT, SEND), (WAIT, RECEIVE), (COMPUTE, 0), (WAIT, SEND), (POST, SEND))
_SEND_FIRST, _ASK, _SENT_FIRST, _ARRIVED, _COMPUTE, _SENT, _SEND = range(len(_COLUMNS))
_OPS = np.array([op for op, _ in _COLUMNS], dtype=np.int32)
_SIDES = np.array([side for _, side in _COLUMNS], dtype=np.int32)


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


def asynchronous(order: Order, messages: Messages) -> Entries:
    """GPU frameworks: an action asks for what it needs, waits for it, and sends what it made without waiting."""
    slots = np.full((len(order), len(_COLUMNS)), -1, dtype=np.int32)
    slots[:, _ASK] = slots[:, _ARRIVED] = messages.of_target
    slots[:, _COMPUTE] = np.arange(len(order))
    slots[:, _SEND] = messages.of_source
    op, index, side, where = _flatten(slots)
    return Entries(op, order.stage[where], index, side)


# DeepSpeed's columns: every message is posted and waited for in its turn.
_IN_TURN = ((POST, RECEIVE), (WAIT, RECEIVE), (POST, SEND), (WAIT, SEND), (COMPUTE, 0), (POST, SEND), (WAIT, SEND))


def deepspeed_entries(schedule: Schedule, order: Order, messages: Messages) -> Entries:
    """DeepSpeed's ``PipelineEngine`` with its ``TrainSchedule`` (0.3 to 0.16): one message after the other, each waited
    for by both sides.  A backward first receives its gradient, then sends the result of the forward just before it.

    Raises:
        JobError: If the schedule is not 1F1B of one part per stage.
    """
    if schedule.name != "1f1b" or schedule.virtual_stages > 1 or not _is_standard(schedule):
        raise JobError(
            f"runtime deepspeed runs schedule 1f1b without virtual stages, got {schedule.name} with "
            f"{schedule.virtual_stages} of them"
        )
    ranks: list[tuple[Ints, ...]] = []
    for stage in range(schedule.num_stages):
        own = order.by_stage[order.first[stage] : order.first[stage + 1]]
        sent = messages.of_source[own]
        backward = order.kind[own] == BACKWARD
        # What a backward has to send for the forward before it; all else is sent when it is there.
        late = np.append(~backward[:-1] & backward[1:], False)
        late &= schedule.num_micro_batches >= schedule.num_stages - stage  # else the pipeline drains in between
        slots = np.full((len(own), len(_IN_TURN)), -1, dtype=np.int32)
        slots[:, 0] = slots[:, 1] = messages.of_target[own]
        slots[1:, 2] = slots[1:, 3] = np.where(late[:-1], sent[:-1], -1)
        slots[:, 4] = own
        slots[:, 5] = slots[:, 6] = np.where(late, -1, sent)
        where, column = np.nonzero(slots >= 0)
        op, side = np.array(_IN_TURN, dtype=np.int32)[column].T
        ranks.append((op, slots[where, column], side))
    return _interleaved(order, messages, ranks)


def torch_entries(schedule: Schedule, order: Order, messages: Messages) -> Entries:
    """``torch.distributed.pipelining`` 2.13 over gloo.

    ``ScheduleGPipe`` and ``Schedule1F1B`` have loops of their own; everything else, users' tables too, is lowered by
    ``_PipelineScheduleRuntime``.

    Raises:
        JobError: If ranks wait for each other in a circle.
    """
    make = _LOOPS.get(schedule.name)
    if make and schedule.virtual_stages == 1 and schedule.num_stages > 1 and _is_standard(schedule):
        ranks = [
            make(schedule, stage, order.by_stage[order.first[stage] : order.first[stage + 1]], messages)
            for stage in range(schedule.num_stages)
        ]
        return _interleaved(order, messages, ranks)
    return _in_one_order(order, messages, *_lowered(schedule, order, messages))


def _interleaved(order: Order, messages: Messages, ranks: list[tuple[Ints, ...]]) -> Entries:
    """Op, index and side of every rank's entries, in one order that can run."""
    op, index, side = (np.concatenate([rank[field] for rank in ranks]) for field in range(3))
    return _in_one_order(order, messages, op, index, side, np.cumsum([0, *(len(r[0]) for r in ranks)]).astype(np.int32))


def _in_one_order(order: Order, messages: Messages, op: Ints, index: Ints, side: Ints, first: Ints) -> Entries:
    entries = np.full(len(op), -1, dtype=np.int32)
    reached = first[:-1].copy()
    _interleave(first, op, index, side, np.zeros((len(messages.source), 2), dtype=np.bool_), entries, reached)
    if len(entries) and entries[-1] < 0:
        raise JobError(_circle(order, messages, op, index, side, first, reached))
    stage = np.repeat(np.arange(len(first) - 1, dtype=np.int32), np.diff(first))
    return Entries(op[entries], stage[entries], index[entries], side[entries])


def _is_standard(schedule: Schedule) -> bool:
    """Whether it is the schedule of its name, not a user's of the same name."""
    usual = find_schedule(schedule.name, schedule.num_stages, schedule.num_micro_batches)
    return schedule is usual or all(map(np.array_equal, schedule.actions, usual.actions))


def _flatten(slots: Ints) -> tuple[Ints, Ints, Ints, NDArray[np.int64]]:
    """Op, index and side of the slots that are not empty, row after row, and their rows."""
    where, column = np.nonzero(slots >= 0)
    return _OPS[column], slots[where, column], _SIDES[column], where


def _waits(messages: Ints) -> tuple[Ints, Ints, Ints]:
    """Waits for sent messages, without the -1."""
    sent = messages[messages >= 0]
    return np.full_like(sent, WAIT), sent, np.full_like(sent, SEND)


def _gpipe(schedule: Schedule, stage: int, own: Ints, messages: Messages) -> tuple[Ints, ...]:
    """``ScheduleGPipe``: sends of a pass are waited for when the pass is over."""
    slots = np.full((len(own), len(_COLUMNS)), -1, dtype=np.int32)
    slots[:, _ASK] = slots[:, _ARRIVED] = messages.of_target[own]
    slots[:, _COMPUTE] = own
    slots[:, _SEND] = messages.of_source[own]
    half = len(own) // 2
    pieces = []
    for rows in (slots[:half], slots[half:]):
        pieces += [_flatten(rows)[:3], _waits(rows[:, _SEND])]
    return tuple(np.concatenate([piece[field] for piece in pieces]) for field in range(3))


def _one_f_one_b(schedule: Schedule, stage: int, own: Ints, messages: Messages) -> tuple[Ints, ...]:
    """``Schedule1F1B``: in the steady state a rank sends and asks at once and waits for both."""
    num = schedule.num_micro_batches
    warm_up = min(num, schedule.num_stages - stage)
    is_forward = np.zeros(len(own), dtype=np.bool_)
    is_forward[: warm_up - 1] = True
    is_forward[warm_up - 1 : 2 * num - warm_up + 1 : 2] = True  # then in turn
    forward, backward = np.flatnonzero(is_forward), np.flatnonzero(~is_forward)
    send = messages.of_source[own]
    slots = np.full((len(own), len(_COLUMNS)), -1, dtype=np.int32)
    slots[:, _ASK] = slots[:, _ARRIVED] = messages.of_target[own]
    slots[:, _COMPUTE] = own
    slots[forward[: warm_up - 1], _SEND] = send[forward[: warm_up - 1]]
    slots[forward[1:warm_up], _SENT] = send[forward[: warm_up - 1]]
    # Each backward sends the forward's result before it, and each later forward the backward's.
    pairs = num - warm_up + 1
    slots[backward[:pairs], _SEND_FIRST] = slots[backward[:pairs], _SENT_FIRST] = send[forward[warm_up - 1 :]]
    slots[forward[warm_up:], _SEND_FIRST] = slots[forward[warm_up:], _SENT_FIRST] = send[backward[: pairs - 1]]
    slots[backward[pairs - 1 :], _SEND] = send[backward[pairs - 1 :]]
    slots[backward[pairs:], _SENT] = send[backward[pairs - 1 : -1]]
    pieces = [_flatten(slots)[:3], _waits(send[backward[-1:]])]
    return tuple(np.concatenate([piece[field] for piece in pieces]) for field in range(3))


_LOOPS = {"gpipe": _gpipe, "1f1b": _one_f_one_b}


def _lowered(schedule: Schedule, order: Order, messages: Messages) -> tuple[Ints, Ints, Ints, Ints]:
    """``_PipelineScheduleRuntime``: ranks take turns to lower an action, and whoever sends has the other side ask.

    So receives are posted long before they are needed.  Sends are waited for at the very end, the last one first.
    """
    own = order.by_stage
    fused = np.concatenate(schedule.fused) if schedule.fused else np.zeros(len(order), dtype=np.bool_)
    idle = np.zeros(len(order), dtype=np.int32)
    _count_idle(
        order.first, order.kind[own], order.part[own], fused, schedule.num_micro_batches, schedule.num_parts, idle
    )
    sends, asks = messages.of_source >= 0, messages.of_target >= 0
    lengths = np.bincount(order.stage, 1 + 2 * sends + 2 * asks, minlength=schedule.num_stages).astype(np.int64)
    first = np.cumsum([0, *lengths]).astype(np.int32)
    op, index, side = np.empty((3, first[-1]), dtype=np.int32)
    done = np.zeros(len(order), dtype=np.bool_)
    _lower(
        order.first, own, order.stage, order.source, messages.of_source, messages.of_target, messages.target, fused,
        idle, done, first, op, index, side,
    )  # fmt: skip
    if not done.all():
        raise JobError("a schedule must not wait in a circle, got: " + _stuck(order, done, fused))
    return op, index, side, first


def _stuck(order: Order, done: NDArray[np.bool_], fused: NDArray[np.bool_]) -> str:
    """Only pairs that run as one can still wait for each other, or for themselves, once the order is known to run."""
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
def _count_idle(
    first: Ints,
    kind: Ints,
    part: Ints,
    fused: NDArray[np.bool_],
    num_micro_batches: int,
    num_parts: int,
    idle: Ints,
) -> None:
    """Turns that torch's lowering spends before each action on gathering, freeing and reducing parameters.

    They do nothing without FSDP, but shift the order in which receives are posted.

    Args:
        first: Actions of stage ``s`` are ``first[s]`` to ``first[s + 1]``.
        kind, part, fused: Of each.
        idle: Filled, same shape.
    """
    active = np.zeros(num_parts, dtype=np.bool_)
    left = np.zeros(num_parts, dtype=np.int32)
    soon = np.zeros(num_parts, dtype=np.int32)
    for stage in range(len(first) - 1):
        begin, end = first[stage], first[stage + 1]
        nearest = np.full((end - begin, UNSHARDED_PARTS), -1, dtype=np.int32)  # parts used next from each action on
        known = 0
        for at in range(end - 1, begin - 1, -1):
            move = 0
            while move < known and soon[move] != part[at]:
                move += 1
            if move == known:
                known += 1
            for place in range(move, 0, -1):
                soon[place] = soon[place - 1]
            soon[0] = part[at]
            for place in range(min(known, UNSHARDED_PARTS)):
                nearest[at - begin, place] = soon[place]
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
                if kind[number] == BACKWARD or kind[number] == BACKWARD_WEIGHT:
                    left[part[number]] -= 1
                    if left[part[number]] == 0 and after < end:
                        idle[after] += 1


@compiled
def _lower(
    first: Ints,
    own: Ints,
    stage: Ints,
    source: Ints,
    of_source: Ints,
    of_target: Ints,
    target: Ints,
    fused: NDArray[np.bool_],
    idle: Ints,
    done: NDArray[np.bool_],
    first_entry: Ints,
    op: Ints,
    index: Ints,
    side: Ints,
) -> None:
    """Entries of every rank, as ``_add_send_recv`` orders them.

    Args:
        first, own: Actions of rank ``r`` are ``own[first[r]:first[r + 1]]``.
        stage, source, of_source, of_target, target: See ``Order`` and ``Messages``.
        fused: Whether an action of ``own`` and the next one are lowered as one.
        idle: Turns that pass before each action of ``own``.
        done: All false; set for every action that is lowered.
        first_entry: Entries of rank ``r`` go to ``first_entry[r]`` to ``first_entry[r + 1]``.
        op, index, side: Filled.
    """
    ranks = len(first) - 1
    at = first[:-1].copy()
    to = first_entry[:-1].copy()
    waiting = idle.copy()
    left = len(own)
    while left > 0:
        before = left
        slept = False
        for rank in range(ranks):
            if at[rank] == first[rank + 1]:
                continue
            if waiting[at[rank]] > 0:
                waiting[at[rank]] -= 1
                slept = True
                continue
            end = at[rank] + 2 if fused[at[rank]] else at[rank] + 1
            ready = True
            for number in range(at[rank], end):
                need = source[own[number]]
                ready = ready and (need < 0 or done[need])
            if not ready:
                continue
            for number in range(at[rank], end):
                action = own[number]
                if of_target[action] >= 0:
                    op[to[rank]], index[to[rank]], side[to[rank]] = WAIT, of_target[action], RECEIVE
                    to[rank] += 1
                op[to[rank]], index[to[rank]], side[to[rank]] = COMPUTE, action, 0
                to[rank] += 1
            for number in range(at[rank], end):
                action = own[number]
                done[action] = True
                message = of_source[action]
                if message >= 0:
                    op[to[rank]], index[to[rank]], side[to[rank]] = POST, message, SEND
                    to[rank] += 1
                    other = stage[target[message]]
                    op[to[other]], index[to[other]], side[to[other]] = POST, message, RECEIVE
                    to[other] += 1
                left -= 1
            at[rank] = end
        if left == before and not slept:
            return
    for rank in range(ranks):
        for number in range(first[rank + 1] - 1, first[rank] - 1, -1):
            message = of_source[own[number]]
            if message >= 0:
                op[to[rank]], index[to[rank]], side[to[rank]] = WAIT, message, SEND
                to[rank] += 1


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
