"""How pipeline runtimes order communication around actions: GPU frameworks, DeepSpeed, and PyTorch over gloo."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.schedules.base import BACKWARD, Ints, Schedule
from stepsight.simulator.schedules.entries import (
    COMPUTE,
    POST,
    RECEIVE,
    SEND,
    WAIT,
    Entries,
    Messages,
    in_one_order,
    interleaved,
)
from stepsight.simulator.schedules.find import find_schedule
from stepsight.simulator.schedules.order import Order
from stepsight.simulator.schedules.torch_runtime import torch_lowered

# The possible entries around an action, in this order: columns of ``_Slots``.
_COLUMNS = ((POST, RECEIVE), (WAIT, RECEIVE), (COMPUTE, 0), (POST, SEND))
_ASK, _ARRIVED, _COMPUTE, _SEND = range(len(_COLUMNS))


def asynchronous(order: Order, messages: Messages) -> Entries:
    """GPU frameworks: an action requests its inputs, waits for them, and sends its result without waiting."""
    slots = np.full((len(order), len(_COLUMNS)), -1, dtype=np.int32)
    slots[:, _ASK] = slots[:, _ARRIVED] = messages.of_target
    slots[:, _COMPUTE] = np.arange(len(order))
    slots[:, _SEND] = messages.of_source
    op, index, side, where = _flatten(slots)
    return Entries(op, order.stage[where], index, side)


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
            f"runtime deepspeed runs schedule 1f1b without virtual stages, got {schedule.name} with "
            f"{schedule.virtual_stages} of them"
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


def _flatten(slots: Ints, columns: Sequence[tuple[int, int]] = _COLUMNS) -> tuple[Ints, Ints, Ints, NDArray[np.int64]]:
    """Op, index and side of the non-empty slots, row by row, and their rows."""
    where, column = np.nonzero(slots >= 0)
    op, side = np.array(columns, dtype=np.int32)[column].T
    return op, slots[where, column], side, where


def _waits(messages: Ints) -> tuple[Ints, Ints, Ints]:
    """Waits for sent messages, without the -1."""
    sent = messages[messages >= 0]
    return np.full_like(sent, WAIT), sent, np.full_like(sent, SEND)


def _gpipe(schedule: Schedule, stage: int, own: Ints, messages: Messages) -> tuple[Ints, ...]:
    """``ScheduleGPipe``: sends of a pass are waited for at the end of the pass."""
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
    pieces = [_flatten(slots, _PAIRED)[:3], _waits(send[backward[-1:]])]
    return tuple(np.concatenate([piece[field] for piece in pieces]) for field in range(3))


_LOOPS = {"gpipe": _gpipe, "1f1b": _one_f_one_b}
