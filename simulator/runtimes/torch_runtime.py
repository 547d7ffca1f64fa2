"""How ``_PipelineScheduleRuntime`` of ``torch.distributed.pipelining`` 2.13 lowers actions to entries."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.errors import JobError
from stepsight.simulator.clock.engine import compiled
from stepsight.simulator.clock.entries import COMPUTE, POST, RECEIVE, SEND, WAIT, Messages
from stepsight.simulator.schedules.base import BACKWARD, BACKWARD_WEIGHT, Ints, Schedule
from stepsight.simulator.schedules.order import Order

UNSHARDED_PARTS = 3  # that torch's lowering keeps at once, whether or not anything is sharded


def torch_lowered(schedule: Schedule, order: Order, messages: Messages) -> tuple[Ints, Ints, Ints, Ints]:
    """Op, index and side of every rank's entries, and where each rank's begin.

    Ranks take turns to lower an action, and whoever sends has the other side ask: receives are posted long before they
    are needed.  Sends are waited for at the very end, the last one first.
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
