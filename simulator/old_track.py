"""The track as ``lowering`` still knows it; goes when that reads ``track``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stepsight.simulator.schedules import FORWARD, Order, Schedule, find_schedule, order_actions

FIRST, MIDDLE, LAST = range(3)


@dataclass(frozen=True, eq=False)
class Track:
    """Every action of a schedule in one order that can run, then the optimizer of every stage.

    Attributes:
        schedule: The order of each stage.
        order: The actions, without the optimizers.
        turn: ``FIRST`` for a part's first backward, ``LAST`` for its last (also if it is the first), ``MIDDLE``
            between; 0 for forwards; shape ``(len(order),)``.
        stage: Of each action and optimizer, shape ``(len(order) + num_stages,)``.
        source: Index of the action on another part whose result it needs, -1 if none; same shape.
        previous: Index of the action before it on its stage, -1 if none; same shape.
    """

    schedule: Schedule
    order: Order
    turn: NDArray[np.int64]
    stage: NDArray[np.int32]
    source: NDArray[np.int32]
    previous: NDArray[np.int32]


@lru_cache(maxsize=256)
def find_track(name: str, num_stages: int, num_micro_batches: int) -> Track:
    """The track of a schedule by its name."""
    return track(find_schedule(name, num_stages, num_micro_batches))


def track(schedule: Schedule) -> Track:
    """The track of a schedule.

    Raises:
        JobError: If the schedule cannot run.
    """
    order, num_stages = order_actions(schedule), schedule.num_stages
    stage = np.concatenate([order.stage, np.arange(num_stages, dtype=np.int32)])
    source = np.concatenate([order.source, np.full(num_stages, -1, dtype=np.int32)])
    previous = np.full(len(stage), -1, dtype=np.int32)
    for number in range(num_stages):
        own = np.flatnonzero(stage == number)
        previous[own[1:]] = own[:-1]
    return Track(schedule, order, _turns(order), stage, source, previous)


def _turns(order: Order) -> NDArray[np.int64]:
    turn = np.full(len(order), MIDDLE, dtype=np.int64)
    turn[order.kind == FORWARD] = 0
    backward = order.kind != FORWARD
    for part in range(int(order.part.max()) + 1):
        own = np.flatnonzero(backward & (order.part == part))
        turn[own[0]] = FIRST
        turn[own[-1]] = LAST
    return turn
