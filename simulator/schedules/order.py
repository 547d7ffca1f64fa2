"""An order in which all actions of a schedule can run, the entries of ranks, and users' schedules as tables.

Entries are computations, posts and waits.  A post is never blocking: a side says that it is ready to send or to
receive.  A message passes when both sides have posted it.  A wait ends when the message has passed.

A table is the compute-only action CSV of ``torch.distributed.pipelining``.  A row is a rank, a cell an action: ``3B1``
is the backward of model part 3 on micro-batch 1.  Empty cells, time steps in which a rank waits, carry no meaning here.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.bounded import read_file, read_text, reason
from stepsight.dataset.base.caching import cached, compiled
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import write_text
from stepsight.dataset.job.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KIND_NAMES,
    Actions,
    Ints,
    Schedule,
    find_schedule,
)


@dataclass(frozen=True, eq=False)
class Order:
    """All actions of a schedule in one order that respects every dependency; arrays of shape ``(num_actions,)``."""

    # stage, kind, micro_batch, part: of each action
    stage: Ints
    kind: Ints
    micro_batch: Ints
    part: Ints
    source: Ints  # index of the action on another part whose result it needs, -1 if none
    own: Ints  # index of the action on its own part that it needs, -1 if none
    first: Ints  # actions of stage s, in its order, are by_stage[first[s]:first[s + 1]]
    by_stage: Ints  # index of every action, stage after stage

    def __len__(self) -> int:
        return len(self.stage)

    def name(self, action: int) -> str:
        """The action in readable form, for messages."""
        return f"{KIND_NAMES[self.kind[action]]}{self.micro_batch[action]} of part {self.part[action]}"


def order_actions(schedule: Schedule) -> Order:
    """Check a schedule and sort its actions into an order that can run.

    Raises:
        JobError: If an action is missing, repeated or out of range, or if stages deadlock; the
            message says who waits for what.
    """
    lengths = [len(rows) for rows in schedule.actions]
    rows = np.concatenate(schedule.actions)
    stage = np.repeat(np.arange(schedule.num_stages, dtype=np.int32), lengths)
    part_of = schedule.part_of
    _check_ranges(schedule, rows, stage, part_of)
    kind, micro_batch = np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])
    part = part_of[stage, rows[:, 2]]
    index = _index(schedule, kind, micro_batch, part)
    # Actions whose results each action needs, from another part and from its own; -1 if none.
    forward, backward = index[FORWARD], np.maximum(index[BACKWARD], index[BACKWARD_INPUT])
    needs = np.full((2, *index.shape), -1, dtype=np.int32)
    needs[0, FORWARD, 1:] = forward[:-1]
    needs[0, BACKWARD, :-1] = needs[0, BACKWARD_INPUT, :-1] = backward[1:]
    needs[1, BACKWARD] = needs[1, BACKWARD_INPUT] = forward
    needs[1, BACKWARD_WEIGHT] = backward
    source, own = needs[:, kind, part, micro_batch]
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    order = np.full(len(rows), -1, dtype=np.int32)
    position = np.full(len(rows), -1, dtype=np.int32)
    _sweep(first, source, own, order, position)
    alone = Order(stage, kind, micro_batch, part, source, own, first, np.arange(len(rows), dtype=np.int32))
    if len(order) and order[-1] < 0:
        raise JobError(waiting(alone, position >= 0, (source, own)))
    source, own = (np.where(index >= 0, position[index], -1) for index in (source[order], own[order]))
    return Order(stage[order], kind[order], micro_batch[order], part[order], source, own, first, position)


def _check_ranges(schedule: Schedule, rows: Actions, stage: Ints, part_of: Ints) -> None:
    limits = np.array([len(KIND_NAMES), schedule.num_micro_batches, part_of.shape[1]])
    if len(rows) and (rows.min() < 0 or (rows.max(axis=0) >= limits).any()):
        wrong = ((rows < 0) | (rows >= limits)).any(axis=1)
    else:
        wrong = part_of[stage, rows[:, 2]] < 0
    if wrong.any():
        at = int(np.argmax(wrong))
        limit = f"kind < 4, micro_batch < {schedule.num_micro_batches} and a chunk that the stage holds"
        rule = f"a schedule's actions are (kind, micro_batch, chunk) with {limit}"
        raise JobError(f"{rule}, got {tuple(map(int, rows[at]))} on stage {stage[at]}")


def _index(schedule: Schedule, kind: Ints, micro_batch: Ints, part: Ints) -> Ints:
    """Index of each kind of action of each part and micro-batch, -1 if missing; shape ``(4, num_parts,
    num_micro_batches)``.
    """
    parts, micro = schedule.num_parts, schedule.num_micro_batches
    index = np.full((4, parts, micro), -1, dtype=np.int32)
    flat = (kind * parts + part) * micro + micro_batch
    index.ravel()[flat] = np.arange(len(kind), dtype=np.int32)
    there = index >= 0
    whole, split = there[BACKWARD], there[BACKWARD_INPUT]
    good = there[FORWARD] & (whole != split) & (there[BACKWARD_WEIGHT] == split)
    if not good.all() or len(kind) != np.count_nonzero(there):
        counts = np.bincount(flat, minlength=index.size).reshape(index.shape)
        good &= (counts <= 1).all(axis=0)
        where = tuple(np.argwhere(~good)[0])
        seen = ", ".join(f"{int(counts[number][where])} {name}" for number, name in enumerate(KIND_NAMES))
        rule = "every part runs each micro-batch once forward (F) and once backward (B, or I and W)"
        raise JobError(f"{rule}, got {seen} for part {where[0]}, micro-batch {where[1]}")
    return index


@compiled
def _sweep(first: Ints, source: Ints, own: Ints, order: Ints, position: Ints) -> None:
    """Advance every stage as far as possible, round after round."""
    pointer = first[:-1].copy()
    placed = 0
    moved = True
    while moved:
        moved = False
        for stage in range(len(pointer)):
            at = pointer[stage]
            while at < first[stage + 1]:
                if source[at] >= 0 and position[source[at]] < 0:
                    break
                if own[at] >= 0 and position[own[at]] < 0:
                    break
                order[placed] = at
                position[at] = placed
                placed += 1
                at += 1
            if at != pointer[stage]:
                moved = True
                pointer[stage] = at


def waiting(order: Order, done: NDArray[np.bool_], needs: Sequence[Ints], fused: Sequence[bool] = ()) -> str:
    """Say which stages wait for what.

    ``needs``: actions that each one waits for, -1 if none; ``fused``: as in ``Schedule``, stage after stage.
    """
    waits = []
    for stage in range(len(order.first) - 1):
        places = np.arange(order.first[stage], order.first[stage + 1])
        left = places[~done[order.by_stage[places]]]
        for at in order.by_stage[left[: 2 if len(fused) and len(left) and fused[left[0]] else 1]].tolist():
            names = " and ".join(order.name(need[at]) for need in needs if need[at] >= 0 and not done[need[at]])
            if names:
                waits.append(f"stage {stage} at {order.name(at)} waits for {names}")
    return "a schedule must not deadlock, got: " + "; ".join(waits)


COMPUTE, POST, WAIT = range(3)
SEND, RECEIVE = range(2)


class Entries(NamedTuple):
    """Entries of all ranks, in one order that can run; arrays of shape ``(num_entries,)``."""

    op: Ints  # COMPUTE, POST or WAIT
    stage: Ints  # the rank whose entry it is
    item: Ints  # the action that is computed, or the message that is posted or waited for
    side: Ints  # SEND or RECEIVE of a message

    def unsigned(self) -> Entries:
        """The entries as unsigned integers for the clock's loops: signed indices cost a fifth of the time."""
        fields: Iterator[Any] = (field.view(np.uint32) for field in self)
        return Entries(*fields)


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages of an order of actions."""

    # source, target: actions that make and need each, shape (num_messages,)
    source: Ints
    target: Ints
    # of_source, of_target: message that each action makes and needs, -1 if none, shape (num_actions,)
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


FIRST, MIDDLE, LAST = range(3)


def turns(order: Order) -> Ints:
    """FIRST for the first time that a part runs each action's pass, LAST for the last time (also if it is the first),
    MIDDLE between, shape ``(num_actions,)``.

    Passes are forwards, split input gradients, and backwards that give weight gradients (B and W together).
    """
    group = order.part * 3 + np.array([0, 2, 1, 2], dtype=np.int32)[order.kind]
    numbers = np.arange(len(order))
    first = np.zeros(int(group.max()) + 1, dtype=np.int64)
    last = first.copy()
    first[group[::-1]] = numbers[::-1]  # the last write wins
    last[group] = numbers
    turn = np.full(len(order), MIDDLE, dtype=np.int32)
    turn[first[group]] = FIRST
    turn[last[group]] = LAST
    return turn


AROUND = ((POST, RECEIVE), (WAIT, RECEIVE), (COMPUTE, 0), (POST, SEND))  # the possible entries around an action


def asynchronous(order: Order, messages: Messages) -> Entries:
    """GPU frameworks: an action requests its inputs, waits for them, and sends its result without waiting."""
    actions = np.arange(len(order), dtype=np.int32)
    slots = np.stack([messages.of_target, messages.of_target, actions, messages.of_source], axis=1)
    op, item, side, where = flatten(slots, AROUND)
    return Entries(op, order.stage[where], item, side)


def flatten(slots: Ints, columns: Sequence[tuple[int, int]]) -> tuple[Ints, Ints, Ints, NDArray[np.int64]]:
    """Op, item and side of the slots that are not -1, row by row, and their rows; ``columns``: op and side of each."""
    where, column = np.nonzero(slots >= 0)
    op, side = np.array(columns, dtype=np.int32)[column].T
    return op, slots[where, column], side, where


ACTION = 2**20  # ticks


def by_end(entries: Entries, num_stages: int, num_messages: int) -> Entries:
    """Sort entries by end times as if all actions took equally long, so that repeating parts repeat for each
    micro-batch.
    """
    ends = np.empty(len(entries.op), dtype=np.int64)
    _count_ticks(entries, num_stages, num_messages, ends)
    places = np.argsort(ends * num_stages + entries.stage, kind="stable")  # sorted runs: merging is faster
    return Entries(*(field[places] for field in entries))


@compiled
def _count_ticks(entries: Entries, num_stages: int, num_messages: int, ends: NDArray[np.int64]) -> None:
    """Give every entry a tick later than the ticks of its dependencies.

    An action ends at the next multiple of ``ACTION``, a post or a wait one tick later, so that the ticks of one round
    of actions differ from those of the round before by ``ACTION`` alone.  This is an order, not a time.
    """
    op, stage, item, side = entries
    clocks, posted = np.zeros(num_stages, dtype=np.int64), np.zeros((num_messages, 2), dtype=np.int64)
    for entry in range(len(op)):
        at, s = item[entry], stage[entry]
        if op[entry] == WAIT:
            clocks[s] = max(clocks[s], posted[at, 0], posted[at, 1])
        clocks[s] = (clocks[s] // ACTION + 1) * ACTION if op[entry] == COMPUTE else clocks[s] + 1
        if op[entry] == POST:
            posted[at, side[entry]] = clocks[s]
        ends[entry] = clocks[s]


_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule from torch's CSV of actions; parts are on the ranks of their actions.

    Raises:
        JobError: If the file is no such table, or if what it says cannot run.
    """
    path = Path(path)
    try:
        rows = list(csv.reader(io.StringIO(read_text(path), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise JobError(f"a schedule is a CSV of actions like 0F0, got {path}: {reason(error)}") from None
    ranks = [_read_row(path, rank, row) for rank, row in enumerate(rows)]
    if not any(actions for actions, _ in ranks):
        raise JobError(f"a schedule is a CSV of actions like 0F0, got none in {path}")
    placement, chunk_of = _place(path, [actions for actions, _ in ranks])
    num_micro_batches = 1 + max(micro for actions, _ in ranks for _, _, micro in actions)
    count = sum(len(actions) for actions, _ in ranks)
    if count < 2 * len(placement) * num_micro_batches:
        rule = f"{len(placement)} parts and {num_micro_batches} micro-batches need a forward and a backward each"
        raise JobError(f"{rule}, got {count} < 2 * {len(placement)} * {num_micro_batches} actions in {path}")
    tables = tuple(
        np.array([(kind, micro, chunk_of[part]) for part, kind, micro in actions], dtype=np.int32).reshape(-1, 3)
        for actions, _ in ranks
    )
    fused = tuple(np.array(pairs, dtype=np.bool_) for _, pairs in ranks)
    if not any(flags.any() for flags in fused):
        fused = ()
    schedule = Schedule(tables, num_micro_batches, placement, path.name, fused)
    try:
        order_actions(schedule)
    except JobError as error:
        raise JobError(f"{path}: {error}") from error
    return schedule


def schedule_of(
    name: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1, flushes: int = 1
) -> Schedule:
    """The schedule that a job names: a known one, or a user's table, which is read again after it was changed.

    With several ``flushes`` it runs as often, each time with an equal part of the micro-batches.

    Raises:
        JobError: If there is none, it cannot run, or its numbers are not the job's.
    """
    path, own = Path(name), num_micro_batches // (flushes if num_stages > 1 else 1)
    if name.endswith(".csv"):
        changed = path.stat().st_mtime_ns if path.is_file() else 0
        once = _table_of_job(path, changed, num_stages, own, virtual_stages)
    else:
        once = find_schedule(name, num_stages, own, virtual_stages)
    return once if own == num_micro_batches else _repeated(once, flushes)


@cached(64)
def _repeated(once: Schedule, flushes: int) -> Schedule:
    ahead = [np.array([0, flush * once.num_micro_batches, 0], dtype=np.int32) for flush in range(flushes)]
    actions = tuple([np.concatenate([rows + more for more in ahead]) for rows in once.actions])
    fused = tuple([np.tile(pairs, flushes) for pairs in once.fused])
    return replace(once, actions=actions, num_micro_batches=flushes * once.num_micro_batches, fused=fused)


@cached(64)
def _table_of_job(path: Path, changed: int, stages: int, micro_batches: int, virtual_stages: int) -> Schedule:
    with suppress(OSError):  # the reader reports a path that is no file
        ranks = sum(1 for _ in islice(io.BytesIO(read_file(path)), stages + 1))
        if ranks != stages:
            got = ranks if ranks < stages else "more"
            raise JobError(f"{path} must hold a row for each of pp = {stages} ranks, got {got}")
    schedule = read_schedule(path)
    has = (schedule.num_stages, schedule.num_micro_batches, schedule.num_parts)
    if has != (stages, micro_batches, stages * virtual_stages):
        parts = f"pp * virtual_stages = {stages * virtual_stages} parts"
        rule = f"{path} must hold pp = {stages} ranks, {micro_batches} micro-batches and {parts}"
        raise JobError(f"{rule}, got {has[0]}, {has[1]} and {has[2]}")
    return schedule


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule as torch's CSV of actions."""
    part_of = schedule.part_of
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    for stage, rows in enumerate(schedule.actions):
        names = [f"{part_of[stage, chunk]}{KIND_NAMES[kind]}{micro}" for kind, micro, chunk in rows.tolist()]
        if schedule.fused:
            for at in np.flatnonzero(schedule.fused[stage])[::-1].tolist():
                names[at : at + 2] = [f"({names[at]};{names[at + 1]})OVERLAP_F_B"]
        writer.writerow(names)
    write_text(Path(path), text.getvalue())


def _read_row(path: Path, rank: int, row: list[str]) -> tuple[list[tuple[int, int, int]], list[bool]]:
    """``(part, kind, micro_batch)`` of a rank's actions, and whether each runs as one with the next."""
    actions: list[tuple[int, int, int]] = []
    fused: list[bool] = []
    for column, cell in enumerate(row):
        text = cell.strip()
        if not text:
            continue
        pair = _PAIR.fullmatch(text)
        found = [_ACTION.fullmatch(word.strip()) for word in (pair.groups() if pair else [text])]
        kinds = [KIND_NAMES.index(match[2]) for match in found if match]
        if len(kinds) < len(found) or (pair and kinds != [FORWARD, BACKWARD]):
            rule = "a cell must be empty, part + F, B, I or W + micro-batch (3B1), or (0F1;3B0)OVERLAP_F_B"
            raise JobError(f"{rule}, got {text!r:.60} in row {rank + 1}, column {column + 1} of {path}")
        actions += [(int(match[1]), kind, int(match[3])) for match, kind in zip(found, kinds, strict=True) if match]
        fused += [True, False] if pair else [False]
    return actions, fused


def _place(path: Path, ranks: list[list[tuple[int, int, int]]]) -> tuple[Actions, dict[int, int]]:
    """Stage and chunk of every part, shape ``(num_parts, 2)``, and the chunks by part."""
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for part in dict.fromkeys(part for part, _, _ in actions):
            if rank_of.setdefault(part, rank) != rank:
                where = f"rows {rank_of[part] + 1} and {rank + 1} of {path}"
                raise JobError(f"a model part runs on one rank, got part {part} in {where}")
    missing = next((part for part in range(max(rank_of)) if part not in rank_of), None)
    if missing is not None:
        raise JobError(f"parts must be numbered from 0 without a gap, got none numbered {missing} in {path}")
    if [] in ranks:
        raise JobError(f"every rank must have an action, got none in row {ranks.index([]) + 1} of {path}")
    held = [sorted(part for part, at in rank_of.items() if at == rank) for rank in range(len(ranks))]
    chunks = {part: chunk for own in held for chunk, part in enumerate(own)}
    return np.array([(rank_of[part], chunks[part]) for part in range(len(rank_of))], dtype=np.int32), chunks
