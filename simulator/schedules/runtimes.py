"""How pipeline runtimes order communication around actions: GPU frameworks, DeepSpeed, and PyTorch over gloo."""

from __future__ import annotations

from collections.abc import Sequence

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
    waiting,
)

Flat = tuple[Ints, Ints, Ints]  # op, item and side of entries


def in_one_order(order: Order, messages: Messages, entries: Entries) -> Entries:
    """Sort entries, which are listed rank after rank, into one order that can run.

    Raises:
        JobError: If ranks deadlock.
    """
    first = np.searchsorted(entries.stage, np.arange(len(order.first))).astype(np.int32)
    placed = np.full(len(entries.op), -1, dtype=np.int32)
    reached = first[:-1].copy()
    _interleave(entries, first, np.zeros((len(messages.source), 2), dtype=np.bool_), placed, reached)
    if not len(placed) or placed[-1] >= 0:
        return Entries(*(field[placed] for field in entries))
    waits = []
    for rank, at in enumerate(reached.tolist()):
        if at < first[rank + 1]:
            message = entries.item[at]
            source, target = int(messages.source[message]), int(messages.target[message])
            does = f"{order.stage[target]} takes" if entries.side[at] == SEND else f"{order.stage[source]} sends"
            waits.append(f"stage {rank} waits until stage {does} {order.name(source)}")
    raise JobError("a schedule must not deadlock, got: " + "; ".join(waits))


@compiled
def _interleave(entries: Entries, first: Ints, posted: NDArray[np.bool_], order: Ints, reached: Ints) -> None:
    """Advance every rank as far as possible, round after round."""
    op, _, item, side = entries
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
                order[placed] = at
                placed += 1
                at += 1
            if at != reached[rank]:
                moved = True
                reached[rank] = at


UNSHARDED_PARTS = 3  # parts that torch's lowering keeps gathered at the same time, with or without sharding
# Columns of actions, which are listed rank after rank: what each is, whether it and the next one are lowered as one,
# its index in the order, that of the action on another part whose result it needs, the messages that it makes and
# needs (-1 if none), and the rank that its message goes to.
_KIND, _PART, _FUSED, _ACTION, _SOURCE, _SENDS, _ASKS, _RECEIVER = range(8)


def torch_lowered(schedule: Schedule, order: Order, messages: Messages) -> Entries:
    """Every rank's entries, rank after rank.

    Ranks take turns to lower an action, and whoever sends has the other side ask: receives are posted long before they
    are needed.  Sends are waited for at the very end, the last one first.

    Raises:
        JobError: If fused pairs of actions deadlock.
    """
    own = order.by_stage
    fused = np.concatenate(schedule.fused) if schedule.fused else np.zeros(len(order), dtype=np.bool_)
    receiver = np.zeros(len(order), dtype=np.int32)
    receiver[messages.source] = order.stage[messages.target]
    of_order = np.arange(len(order)), order.source, messages.of_source, messages.of_target, receiver
    actions = np.stack([order.kind[own], order.part[own], fused, *(f[own] for f in of_order)], axis=1, dtype=np.int32)
    idle, done = np.zeros(len(order), dtype=np.int32), np.zeros(len(order), dtype=np.bool_)
    _count_idle(order.first, actions, schedule.num_micro_batches, schedule.num_parts, idle)
    rows = np.empty((len(order) + 3 * len(messages.source), 4), dtype=np.int32)
    _lower(order.first, actions, idle, done, rows)
    if not done.all():
        raise JobError(waiting(order, done, (order.source,), fused.tolist()))
    sent = messages.of_source[own[::-1]]
    waits = np.stack(np.broadcast_arrays(order.stage[own[::-1]], WAIT, sent, SEND), axis=1, dtype=np.int32)
    rows = np.concatenate([rows, waits[sent >= 0]])
    stage, op, item, side = np.ascontiguousarray(rows[rows[:, 0].argsort(kind="stable")].T)
    return Entries(op, stage, item, side)


@compiled
def _count_idle(first: Ints, actions: Ints, num_micro_batches: int, num_parts: int, idle: Ints) -> None:
    """Count the turns that torch's lowering spends before each action on gathering, freeing and reducing parameters.

    They do nothing without FSDP, but shift the order in which receives are posted.
    """
    active = np.zeros(num_parts, dtype=np.bool_)
    left = np.zeros(num_parts, dtype=np.int32)
    soon = np.zeros(num_parts, dtype=np.int32)
    for stage in range(len(first) - 1):
        begin, end = first[stage], first[stage + 1]
        nearest = np.full((end - begin, UNSHARDED_PARTS), -1, dtype=np.int32)  # parts used next after each action
        _find_nearest(actions[begin:end, _PART], soon, nearest)
        active[:] = False
        left[:] = num_micro_batches
        for at in range(begin, end):
            if at > begin and actions[at - 1, _FUSED]:
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
            after = at + 1 + actions[at, _FUSED]
            for number in range(at, after):
                if actions[number, _KIND] == BACKWARD or actions[number, _KIND] == BACKWARD_WEIGHT:
                    part = actions[number, _PART]
                    left[part] -= 1
                    if left[part] == 0 and after < end:
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
def _lower(first: Ints, actions: Ints, idle: Ints, done: NDArray[np.bool_], rows: Ints) -> None:
    """Fill in stage, op, item and side of entries, in the order of ``_add_send_recv``; stop if ranks wait in a cycle.

    ``idle``: turns that pass before each action; ``done``: filled, whether each action of the order is lowered.
    """
    reached, placed = first[:-1].copy(), 0
    moved = True
    while moved:
        moved = False
        for rank in range(len(reached)):
            at = reached[rank]
            if at == first[rank + 1]:
                continue
            if idle[at] > 0:
                idle[at] -= 1
                moved = True
                continue
            end = at + 1 + actions[at, _FUSED]
            ready = True
            for number in range(at, end):
                need = actions[number, _SOURCE]
                ready = ready and (need < 0 or done[need])
            if not ready:
                continue
            moved, reached[rank] = True, end
            for number in range(at, end):
                if actions[number, _ASKS] >= 0:
                    placed = _put(rows, placed, rank, WAIT, actions[number, _ASKS], RECEIVE)
                placed = _put(rows, placed, rank, COMPUTE, actions[number, _ACTION], 0)
            for number in range(at, end):  # the other side posts its receive at the same time
                done[actions[number, _ACTION]] = True
                message = actions[number, _SENDS]
                if message >= 0:
                    placed = _put(rows, placed, rank, POST, message, SEND)
                    placed = _put(rows, placed, actions[number, _RECEIVER], POST, message, RECEIVE)


def _put(rows: Ints, at: int, stage: int, op: int, item: int, side: int) -> int:
    """Write one entry, and return the place of the next one."""
    rows[at, 0], rows[at, 1], rows[at, 2], rows[at, 3] = stage, op, item, side
    return at + 1


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
        rule = "runtime deepspeed runs schedule 1f1b without virtual stages or several flushes"
        sizes = f"{schedule.virtual_stages} virtual stages, {schedule.num_micro_batches} micro-batches"
        raise JobError(f"{rule}, got {schedule.name} with {sizes}")

    ranks = []
    for stage, own in enumerate(_own(order)):
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
        ranks.append(flatten(slots, _IN_TURN)[:3])
    return interleaved(order, messages, ranks)


def torch_entries(schedule: Schedule, order: Order, messages: Messages) -> Entries:
    """``torch.distributed.pipelining`` 2.13 over gloo.

    ``ScheduleGPipe`` and ``Schedule1F1B`` have loops of their own; everything else, users' tables too, is lowered by
    ``_PipelineScheduleRuntime``.

    Raises:
        JobError: If ranks deadlock.
    """
    make = {"gpipe": _gpipe, "1f1b": _one_f_one_b}.get(schedule.name)
    if make and schedule.virtual_stages == 1 and schedule.num_stages > 1 and _is_standard(schedule):
        return interleaved(order, messages, [make(schedule, *rank, messages) for rank in enumerate(_own(order))])
    return in_one_order(order, messages, torch_lowered(schedule, order, messages))


def interleaved(order: Order, messages: Messages, ranks: Sequence[Flat]) -> Entries:
    """One order that can run of every rank's entries."""
    op, item, side = (np.concatenate(fields) for fields in zip(*ranks, strict=True))
    stage = np.repeat(np.arange(len(ranks), dtype=np.int32), [len(ops) for ops, _, _ in ranks])
    return in_one_order(order, messages, Entries(op, stage, item, side))


def _own(order: Order) -> list[Ints]:
    """The actions of each rank, in its order."""
    return np.split(order.by_stage, order.first[1:-1])


def _is_standard(schedule: Schedule) -> bool:
    """Whether it is the built-in schedule of this name, and not a user's schedule with the same name."""
    usual = find_schedule(schedule.name, schedule.num_stages, schedule.num_micro_batches)
    return schedule is usual or all(map(np.array_equal, schedule.actions, usual.actions))


def _with_waits(*pieces: tuple[Flat, Ints]) -> Flat:
    """Flattened slots, each followed by the waits for some sent messages, -1 if none."""
    found: list[Flat] = []
    for flat, messages in pieces:
        sent = messages[messages >= 0]
        found += [flat, (np.full_like(sent, WAIT), sent, np.full_like(sent, SEND))]
    op, item, side = (np.concatenate([piece[field] for piece in found]) for field in range(3))
    return op, item, side


def _gpipe(schedule: Schedule, stage: int, own: Ints, messages: Messages) -> Flat:
    """``ScheduleGPipe``: sends of a pass are waited for at the end of the pass."""
    asks, half = messages.of_target[own], len(own) // 2
    slots = np.stack([asks, asks, own, messages.of_source[own]], axis=1)
    return _with_waits(*[(flatten(rows, AROUND)[:3], rows[:, 3]) for rows in (slots[:half], slots[half:])])


def _one_f_one_b(schedule: Schedule, stage: int, own: Ints, messages: Messages) -> Flat:
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
    return _with_waits((flatten(slots, _PAIRED)[:3], send[backward[-1:]]))
