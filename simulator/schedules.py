"""Pipeline schedules as data: for every stage the order in which it runs its actions.

One format for all: an array of rows ``(kind, micro_batch, chunk)`` per stage.  A chunk is one of the stage's virtual
stages; ``placement`` says which stage and chunk hold the model's n-th part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.errors import JobError

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)
KIND_NAMES = ("F", "B", "I", "W")

Actions = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Schedule:
    """What every stage does, in order.

    Attributes:
        actions: Per stage an int32 array of shape ``(num_actions, 3)``: kind, micro-batch, chunk.
        num_micro_batches: Of one iteration.
        placement: Shape ``(num_parts, 2)``: stage and chunk of every part of the model, in model order.
        name: For people.
    """

    actions: tuple[Actions, ...]
    num_micro_batches: int
    placement: NDArray[np.int32]
    name: str = ""

    @property
    def num_stages(self) -> int:
        return len(self.actions)

    @property
    def num_parts(self) -> int:
        return len(self.placement)


@dataclass(frozen=True, eq=False)
class Order:
    """All actions of a schedule in one order that respects every dependency; arrays of shape ``(num_actions,)``.

    Attributes:
        stage, kind, micro_batch, part: Of each action.
        source: Index of the action on another part whose result it needs, -1 if none.
    """

    stage: NDArray[np.int32]
    kind: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    part: NDArray[np.int32]
    source: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.stage)


def _one_chunk(num_stages: int) -> NDArray[np.int32]:
    stages = np.arange(num_stages, dtype=np.int32)
    return np.stack([stages, np.zeros_like(stages)], axis=1)


def _rows(kinds: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> Actions:
    return np.stack([kinds, micro_batches, np.zeros_like(kinds)], axis=1).astype(np.int32)


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """Every forward, then every backward (Huang et al. 2019, arXiv:1811.06965), in the order of micro-batches."""
    micro_batches = np.arange(num_micro_batches)
    rows = _rows(np.repeat([FORWARD, BACKWARD], num_micro_batches), np.tile(micro_batches, 2))
    return Schedule((rows,) * num_stages, num_micro_batches, _one_chunk(num_stages), "gpipe")


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Warm-up forwards, then one forward and one backward in turn (Narayanan et al. 2021, arXiv:2104.04473)."""
    stages = []
    for stage in range(num_stages):
        warm_up = min(num_stages - stage - 1, num_micro_batches)
        steady = num_micro_batches - warm_up
        kinds = np.concatenate(
            [np.full(warm_up, FORWARD), np.tile([FORWARD, BACKWARD], steady), np.full(warm_up, BACKWARD)]
        )
        micro_batches = np.empty(2 * num_micro_batches, dtype=np.int64)
        micro_batches[kinds == FORWARD] = np.arange(num_micro_batches)
        micro_batches[kinds == BACKWARD] = np.arange(num_micro_batches)
        stages.append(_rows(kinds, micro_batches))
    return Schedule(tuple(stages), num_micro_batches, _one_chunk(num_stages), "1f1b")


_BUILDERS = {"gpipe": gpipe, "1f1b": one_f_one_b}


@lru_cache(maxsize=256)
def find_schedule(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    """The schedule of that name; with a single stage every micro-batch runs forward and backward in turn.

    Raises:
        JobError: If there is none of that name.
    """
    if name not in _BUILDERS:
        raise JobError(f"schedule must be one of {', '.join(_BUILDERS)}, got {name!r}")
    if num_stages == 1:
        return one_f_one_b(1, num_micro_batches)
    return _BUILDERS[name](num_stages, num_micro_batches)


def order_actions(schedule: Schedule) -> Order:
    """Check a schedule and put its actions in an order that can run.

    Raises:
        JobError: If an action is missing, repeated or out of range, or if stages wait for each other in a circle; the
            message says who waits for what.
    """
    part_of = _parts(schedule)
    lengths = [len(rows) for rows in schedule.actions]
    rows = np.concatenate(schedule.actions)
    stage = np.repeat(np.arange(schedule.num_stages, dtype=np.int32), lengths)
    kind, micro_batch, chunk = rows[:, 0], rows[:, 1], rows[:, 2]
    _check_ranges(schedule, rows, stage, part_of)
    part = part_of[stage, chunk]
    _check_complete(schedule, kind, micro_batch, part)
    needs = _requirements(schedule, kind, micro_batch, part)
    position, placed = _run(np.cumsum([0, *lengths]), needs[0], needs[1])
    if placed < len(rows):
        raise JobError(_deadlock(stage, kind, micro_batch, part, needs, position))
    by_position = np.argsort(position, kind="stable")
    source = np.where(needs[0] >= 0, position[needs[0]], -1)
    return Order(
        stage[by_position], kind[by_position], micro_batch[by_position], part[by_position],
        source[by_position].astype(np.int32),
    )  # fmt: skip


def _parts(schedule: Schedule) -> NDArray[np.int32]:
    """Part of the model that a stage's chunk holds, shape ``(num_stages, num_chunks)``; -1 where there is none."""
    part_of = np.full((schedule.num_stages, int(schedule.placement[:, 1].max()) + 1), -1, dtype=np.int32)
    part_of[schedule.placement[:, 0], schedule.placement[:, 1]] = np.arange(schedule.num_parts)
    return part_of


def _check_ranges(schedule: Schedule, rows: Actions, stage: NDArray[np.int32], part_of: NDArray[np.int32]) -> None:
    limits = np.array([len(KIND_NAMES), schedule.num_micro_batches, part_of.shape[1]])
    wrong = ((rows < 0) | (rows >= limits)).any(axis=1)
    if not wrong.any():
        wrong = part_of[stage, rows[:, 2]] < 0
    if wrong.any():
        at = int(np.argmax(wrong))
        raise JobError(
            "a schedule's actions are (kind, micro_batch, chunk) with kind < 4, "
            f"micro_batch < {schedule.num_micro_batches} and a chunk that the stage holds, "
            f"got {tuple(map(int, rows[at]))} on stage {stage[at]}"
        )


def _check_complete(
    schedule: Schedule, kind: NDArray[np.int32], micro_batch: NDArray[np.int32], part: NDArray[np.int32]
) -> None:
    counts = np.zeros((len(KIND_NAMES), schedule.num_parts, schedule.num_micro_batches), dtype=np.int64)
    np.add.at(counts, (kind, part, micro_batch), 1)
    split = counts[BACKWARD_INPUT] == 1
    good = (counts[FORWARD] == 1) & (counts[BACKWARD] + split == 1) & (counts[BACKWARD_WEIGHT] == split)
    good &= counts[BACKWARD_INPUT] <= 1
    if not good.all():
        where = np.argwhere(~good)[0]
        seen = ", ".join(f"{int(counts[k][tuple(where)])} {name}" for k, name in enumerate(KIND_NAMES))
        raise JobError(
            "every part runs each micro-batch once forward (F) and once backward (B, or I and W), "
            f"got {seen} for part {where[0]}, micro-batch {where[1]}"
        )


def _requirements(
    schedule: Schedule, kind: NDArray[np.int32], micro_batch: NDArray[np.int32], part: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the actions whose results an action needs: from another part, and from its own; -1 if none."""
    parts, micro = schedule.num_parts, schedule.num_micro_batches
    index = np.full((3, parts, micro), -1, dtype=np.int64)  # forward, input gradient, weight gradient
    row = np.select([kind == FORWARD, kind == BACKWARD_WEIGHT], [0, 2], 1)
    index[row, part, micro_batch] = np.arange(len(kind))
    before = np.where(kind == FORWARD, part - 1, part + 1)
    remote = (before >= 0) & (before < parts) & (kind != BACKWARD_WEIGHT)
    other = np.where(remote, index[np.minimum(row, 1), np.clip(before, 0, parts - 1), micro_batch], -1)
    own = np.select(
        [kind == FORWARD, kind == BACKWARD_WEIGHT], [-1, index[1, part, micro_batch]], index[0, part, micro_batch]
    )
    return other, own


def _run(first: NDArray[np.int64], other: NDArray[np.int64], own: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Let every stage go on as far as it can, round after round; positions in the order of completion, -1 if stuck."""
    position = np.full(len(other), -1, dtype=np.int64)
    pointer = [int(value) for value in first[:-1]]
    needs, mine, done = other.tolist(), own.tolist(), [False] * len(other)
    placed, moved = 0, True
    while moved:
        moved = False
        for stage in range(len(pointer)):
            at, end = pointer[stage], int(first[stage + 1])
            while at < end and (needs[at] < 0 or done[needs[at]]) and (mine[at] < 0 or done[mine[at]]):
                position[at] = placed
                done[at] = True
                placed += 1
                at += 1
            moved |= at != pointer[stage]
            pointer[stage] = at
    return position, placed


def _deadlock(
    stage: NDArray[np.int32],
    kind: NDArray[np.int32],
    micro_batch: NDArray[np.int32],
    part: NDArray[np.int32],
    needs: tuple[NDArray[np.int64], NDArray[np.int64]],
    position: NDArray[np.int64],
) -> str:
    def name(at: int) -> str:
        return f"{KIND_NAMES[kind[at]]}{micro_batch[at]} of part {part[at]}"

    waits = []
    for number in dict.fromkeys(stage.tolist()):
        stuck = np.flatnonzero((stage == number) & (position < 0))
        if len(stuck):
            at = int(stuck[0])
            missing = [int(need[at]) for need in needs if need[at] >= 0 and position[need[at]] < 0]
            waits.append(f"stage {number} at {name(at)} waits for {' and '.join(name(m) for m in missing)}")
    return "a schedule must not wait in a circle, got: " + "; ".join(waits)
