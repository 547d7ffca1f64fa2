"""Clusters in a box: schedules, communication, overlap and topology of up to sixteen ranks, trained on four.

Two folders are kept apart: ``profile`` (event profiles and runs of at most four ranks, which train) and ``judge`` (runs
of eight and sixteen, which nothing is trained on).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.runs.box_spec import HARDWARE, Box
from stepsight.experiments.studies.small_to_large.box_cases import (
    MOST_TRAINING_RANKS,
    BoxCase,
    collectives_of,
    ops_profiled,
    profiled_boxes,
)
from stepsight.experiments.tasks.collecting import run_plan
from stepsight.training.measured.box_plans import SleepingLatency, box_plan

ROUNDS = {"judge": 3, "train": 2}
COUNTS = {"steps": 1, "warmup": 1, "profile_steps": 0}
EVENT_SECONDS = 30.0
PROFILE, JUDGE = "profile", "judge"


def sleeping(box: Box) -> SleepingLatency:
    """Sleeping times of the box's ranks, and its links from their facts."""
    hardware = find_hardware(HARDWARE)
    assert hardware is not None
    return SleepingLatency(hardware, box.links)


def file_name(case: BoxCase) -> str:
    """File name of a run in its collection."""
    return case.name.removeprefix("box/").replace("/", ".").replace("@", "-")


def measure_cases(cases: Sequence[BoxCase], out: Path, *, progress: bool = True, events: bool = True) -> list[str]:
    """Run missing cases, one collection per box; return names of runs that used too much of the cores.

    ``events``: also what ops and collectives take on their own.  Small boxes first.  All of a box's runs take turns, so
    that a drift of the machine touches them alike.
    """
    rejected = []
    for box in profiled_boxes() if events else ():
        plan = box_plan(
            box, [], sleeping(box), collectives=collectives_of(box), ops=ops_profiled(), event_seconds=EVENT_SECONDS
        )
        _collect(plan, out / PROFILE / f"events-{_slug(box)}", progress)
    boxes: dict[Box, list[BoxCase]] = {}
    for case in cases:
        boxes.setdefault(case.box, []).append(case)
    for box, held in sorted(boxes.items(), key=lambda pair: (pair[0].num_ranks, pair[0].name)):
        role = "judge" if held[0].judges else "train"
        runs = [(file_name(case), role, case.job, {**COUNTS, "rounds": ROUNDS[role]}) for case in held]
        names = _collect(box_plan(box, runs, sleeping(box)), folder_of(held[0], out), progress)
        rejected += [case.name for case in held if file_name(case) in names]
    return rejected


def folder_of(case: BoxCase, out: Path) -> Path:
    """The collection of a case."""
    return out / (JUDGE if case.judges else PROFILE) / _slug(case.box)


def training_folders(out: Path) -> list[Path]:
    """Collections for training: all of ``profile``.

    Raises:
        CollectError: If one is of more ranks than may train.
    """
    folders = sorted(folder for folder in (out / PROFILE).iterdir() if (folder / "plan.json").exists())
    for folder in folders:
        ranks = _ranks(folder)
        if ranks > MOST_TRAINING_RANKS:
            raise CollectError(
                f"only boxes of at most {MOST_TRAINING_RANKS} ranks may train, got {ranks} ranks in {folder}"
            )
    return folders


def _ranks(folder: Path) -> int:
    from stepsight.dataset.base.files import read_json

    return Box.from_dict(read_json(folder / "plan.json")["box"]).num_ranks


def _collect(plan: dict[str, Any], folder: Path, progress: bool) -> list[str]:
    summary = run_plan(plan, folder, progress=progress)
    return list(summary["rejected"])


def _slug(box: Box) -> str:
    return box.name.replace("@", "-")
