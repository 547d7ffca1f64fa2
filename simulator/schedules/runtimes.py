"""How pipeline runtimes order communication around actions: GPU frameworks, DeepSpeed, and PyTorch over gloo."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import compiled
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.schedules import BACKWARD, BACKWARD_WEIGHT, Ints, Schedule, find_schedule
from stepsight.simulator.schedules.order import (
    AROUND,
    COMPUTE,
    POST,
    RECEIVE,
    SEND,
    WAIT,
    Entries,
    Messages,
    Order,
    flatten,
)


class RankLists(NamedTuple):
    """Entries of the ranks, rank after rank."""

    # op, item, side: as in Entries
    op: Ints
    item: Ints
    side: Ints
    first: Ints  # entries of rank r are first[r] to first[r + 1], shape (num_ranks + 1,)


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


UNSHARDED_PARTS = 3  # parts that torch's lowering keeps gathered at the same time, with or without sharding


class _Actions(NamedTuple):
    """Actions of all ranks, rank after rank; those of rank ``r`` are ``first[r]`` to ``first[r + 1]``.

    ``action``: index in ``Order``; ``fused``: whether each and the next one are lowered as one.
    """

    first: Ints
    action: Ints
    kind: Ints
    part: Ints
    fused: NDArray[np.bool_]


class _Needs(NamedTuple):
    """Per action of an ``Order``: the action on another part whose result it needs, the messages that it makes and
    needs, -1 if none, and the rank that the message goes to.
    """

    source: Ints
    sends: Ints
    asks: Ints
    receiver: Ints


class _Turns(NamedTuple):
    """The state of the lowering: where each rank is in ``_Actions`` and in ``RankLists``, turns that pass before each
    of ``_Actions``, and whether each action of an ``Order`` is lowered.
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
    """Write every rank's entries, in the order of ``_add_send_recv``; stop if ranks wait in a cycle."""
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


# Columns of PyTorch's 1F1B.  Gloo sends what a rank posts in turn, and a message only flows when the receiver has asked
# for it.  So the request for a message queues behind what the rank sends itself, and both take their time.
_PAIRED = (
    (POST, RECEIVE), (WAIT, RECEIVE), (POST, SEND), (WAIT, SEND),
    (POST, RECEIVE), (WAIT, RECEIVE), (COMPUTE, 0), (WAIT, SEND), (POST, SEND),
)  # fmt: skip
_GRADIENT, _GRADIENT_ARRIVED, _SEND_FIRST, _SENT_FIRST, _ASK_LATE, _ARRIVED_LATE, _RUN, _SENT, _SEND_LATE = range(9)

# columns of DeepSpeed: every message is posted and waited for immediately
_IN_TURN = ((POST, RECEIVE), (WAIT, RECEIVE), (POST, SEND), (WAIT, SEND), (COMPUTE, 0), (POST, SEND), (WAIT, SEND))


def deepspeed_entries(schedule: Schedule, order: Order, messages: Messages) -> Entries:
    """DeepSpeed's ``PipelineEngine`` with its ``TrainSchedule`` (0.3 to 0.16): one message after the other, and both
    sides wait for it. A backward first receives its gradient, then sends the result of the forward just before it.

    Raises:
        JobError: If the schedule is not 1F1B of one part per stage.
    """
    if schedule.name != "1f1b" or schedule.virtual_stages > 1 or not _is_standard(schedule):
        raise JobError(
            "runtime deepspeed runs schedule 1f1b without virtual stages or several flushes, got "
            f"{schedule.name} with {schedule.virtual_stages} virtual stages, {schedule.num_micro_batches} micro-batches"
        )
    ranks: list[tuple[Ints, ...]] = []
    for stage in range(schedule.num_stages):
        own = order.by_stage[order.first[stage] : order.first[stage + 1]]
        sent = messages.of_source[own]
        backward = order.kind[own] == BACKWARD
        # The result that a backward has to send for the forward before it; all other results are sent when they are
        # computed.
        late = np.append(~backward[:-1] & backward[1:], False)
        late &= schedule.num_micro_batches >= schedule.num_stages - stage  # otherwise the pipeline drains in between
        slots = np.full((len(own), len(_IN_TURN)), -1, dtype=np.int32)
        slots[:, 0] = slots[:, 1] = messages.of_target[own]
        slots[1:, 2] = slots[1:, 3] = np.where(late[:-1], sent[:-1], -1)
        slots[:, 4] = own
        slots[:, 5] = slots[:, 6] = np.where(late, -1, sent)
        where, column = np.nonzero(slots >= 0)
        op, side = np.array(_IN_TURN, dtype=np.int32)[column].T
        ranks.append((op, slots[where, column], side))
    return interleaved(order, messages, ranks)


def torch_entries(schedule: Schedule, order: Order, messages: Messages) -> Entries:
    """``torch.distributed.pipelining`` 2.13 over gloo.

    ``ScheduleGPipe`` and ``Schedule1F1B`` have loops of their own; everything else, users' tables too, is lowered by
    ``_PipelineScheduleRuntime``.

    Raises:
        JobError: If ranks deadlock.
    """
    make = _LOOPS.get(schedule.name)
    if make and schedule.virtual_stages == 1 and schedule.num_stages > 1 and _is_standard(schedule):
        ranks = [
            make(schedule, stage, order.by_stage[order.first[stage] : order.first[stage + 1]], messages)
            for stage in range(schedule.num_stages)
        ]
        return interleaved(order, messages, ranks)
    return in_one_order(order, messages, torch_lowered(schedule, order, messages))


def _is_standard(schedule: Schedule) -> bool:
    """Whether it is the built-in schedule of this name, and not a user's schedule with the same name."""
    usual = find_schedule(schedule.name, schedule.num_stages, schedule.num_micro_batches)
    return schedule is usual or all(map(np.array_equal, schedule.actions, usual.actions))


def _waits(messages: Ints) -> tuple[Ints, Ints, Ints]:
    """Waits for sent messages, without the -1."""
    sent = messages[messages >= 0]
    return np.full_like(sent, WAIT), sent, np.full_like(sent, SEND)


def _gpipe(schedule: Schedule, stage: int, own: Ints, messages: Messages) -> tuple[Ints, ...]:
    """``ScheduleGPipe``: sends of a pass are waited for at the end of the pass."""
    slots = np.full((len(own), len(AROUND)), -1, dtype=np.int32)
    slots[:, 0] = slots[:, 1] = messages.of_target[own]
    slots[:, 2] = own
    slots[:, 3] = messages.of_source[own]
    half = len(own) // 2
    pieces = []
    for rows in (slots[:half], slots[half:]):
        pieces += [flatten(rows)[:3], _waits(rows[:, 3])]
    return tuple(np.concatenate([piece[field] for piece in pieces]) for field in range(3))


def _one_f_one_b(schedule: Schedule, stage: int, own: Ints, messages: Messages) -> tuple[Ints, ...]:
    """``Schedule1F1B``: in the steady state a rank posts a send and a receive together and waits for both."""
    num = schedule.num_micro_batches
    warm_up = min(num, schedule.num_stages - stage)
    is_forward = np.zeros(len(own), dtype=np.bool_)
    is_forward[: warm_up - 1] = True
    is_forward[warm_up - 1 : 2 * num - warm_up + 1 : 2] = True  # afterwards one after the other
    forward, backward = np.flatnonzero(is_forward), np.flatnonzero(~is_forward)
    send, received = messages.of_source[own], messages.of_target[own]
    slots = np.full((len(own), len(_PAIRED)), -1, dtype=np.int32)
    slots[:, _RUN] = own
    slots[:, _ASK_LATE] = slots[:, _ARRIVED_LATE] = received
    slots[forward[: warm_up - 1], _SEND_LATE] = send[forward[: warm_up - 1]]
    slots[forward[1:warm_up], _SENT] = send[forward[: warm_up - 1]]
    # Each backward sends the result of the forward before it, and each later forward the result of the backward.  Of
    # both messages between two ranks the gradient is first on both sides.
    pairs = num - warm_up + 1
    paired = backward[:pairs]
    slots[paired, _SEND_FIRST] = slots[paired, _SENT_FIRST] = send[forward[warm_up - 1 :]]
    if warm_up > min(num, schedule.num_stages - stage - 1):  # else the next rank makes no gradient before that result
        slots[paired, _GRADIENT] = slots[paired, _GRADIENT_ARRIVED] = received[paired]
        slots[paired, _ASK_LATE] = slots[paired, _ARRIVED_LATE] = -1
    slots[forward[warm_up:], _SEND_FIRST] = slots[forward[warm_up:], _SENT_FIRST] = send[backward[: pairs - 1]]
    slots[backward[pairs - 1 :], _SEND_LATE] = send[backward[pairs - 1 :]]
    slots[backward[pairs:], _SENT] = send[backward[pairs - 1 : -1]]
    pieces = [flatten(slots, _PAIRED)[:3], _waits(send[backward[-1:]])]
    return tuple(np.concatenate([piece[field] for piece in pieces]) for field in range(3))


_LOOPS = {"gpipe": _gpipe, "1f1b": _one_f_one_b}
