"""Users' schedules as tables: the compute-only action CSV of ``torch.distributed.pipelining``.

A row is a rank, a cell an action: ``3B1`` is the backward of model part 3 on micro-batch 1.  Empty cells are time steps
in which a rank waits; they carry no meaning here.
"""

from __future__ import annotations

import csv
import io
import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from stepsight.dataset.base.bounded import read_file, read_text, reason
from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import write_text
from stepsight.dataset.job.schedules import BACKWARD, FORWARD, KIND_NAMES, Actions, Schedule, find_schedule
from stepsight.simulator.schedules.order import order_actions

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
        raise JobError(
            f"{len(placement)} parts and {num_micro_batches} micro-batches need a forward and a backward each, "
            f"got {count} < 2 * {len(placement)} * {num_micro_batches} actions in {path}"
        )
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


def schedule_of(name: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """The schedule that a job names: a known one, or a user's table, which is read again after it was changed.

    Raises:
        JobError: If there is none, it cannot run, or its numbers are not the job's.
    """
    if not name.endswith(".csv"):
        return find_schedule(name, num_stages, num_micro_batches, virtual_stages)
    path = Path(name)
    changed = path.stat().st_mtime_ns if path.is_file() else 0
    return _table_of_job(path, changed, num_stages, num_micro_batches, virtual_stages)


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
        raise JobError(
            f"{path} must hold pp = {stages} ranks, {micro_batches} micro-batches and pp * virtual_stages = "
            f"{stages * virtual_stages} parts, got {has[0]}, {has[1]} and {has[2]}"
        )
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
            raise JobError(
                "a cell must be empty, part + F, B, I or W + micro-batch (3B1), or (0F1;3B0)OVERLAP_F_B, "
                f"got {text!r:.60} in row {rank + 1}, column {column + 1} of {path}"
            )
        actions += [(int(match[1]), kind, int(match[3])) for match, kind in zip(found, kinds, strict=True) if match]
        fused += [True, False] if pair else [False]
    return actions, fused


def _place(path: Path, ranks: list[list[tuple[int, int, int]]]) -> tuple[Actions, dict[int, int]]:
    """Stage and chunk of every part, shape ``(num_parts, 2)``, and the chunks by part."""
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for part in dict.fromkeys(part for part, _, _ in actions):
            if rank_of.setdefault(part, rank) != rank:
                raise JobError(
                    "a model part runs on one rank, "
                    f"got part {part} in rows {rank_of[part] + 1} and {rank + 1} of {path}"
                )
    missing = sorted(set(range(max(rank_of))) - set(rank_of))
    if missing:
        raise JobError(f"parts must be numbered from 0 without a gap, got none numbered {missing[0]} in {path}")
    idle = [rank + 1 for rank, actions in enumerate(ranks) if not actions]
    if idle:
        raise JobError(f"every rank must have an action, got none in row {idle[0]} of {path}")
    chunks: dict[int, int] = {}
    held = [0] * len(ranks)
    for part in range(len(rank_of)):
        chunks[part] = held[rank_of[part]]
        held[rank_of[part]] += 1
    return np.array([(rank_of[part], chunks[part]) for part in range(len(rank_of))], dtype=np.int32), chunks
