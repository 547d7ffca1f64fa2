"""Every write of a command fails in turn: nothing half-written is read, nothing finished is lost, the next one works.

A sample of the points runs here; ``make crash`` tries all of them (``CRASH_POINTS=all``).
"""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

import pytest

from tests.crash.commands import COMMANDS, Command
from tests.crash.disk import KILLED, Disk, How, count_points, forked

SAMPLE = os.environ.get("CRASH_POINTS", "2")
IMPORTS = {  # what a command imports, once for all processes that are forked
    "train": ("mlflow", "torch", "stepsight.training.fitting.train_runs"),
    "calibrate": ("stepsight.experiments.calibration.calibrate_runs", "torch"),
    "search": ("optuna", "stepsight.experiments.search.search"),
    "collect": ("torch.distributed", "stepsight.dataset.harness.running.collection"),
    "import": ("pyarrow.parquet",),
}


def sample(points: int) -> list[int]:
    """Points to try: all, or some from the first to the last."""
    if SAMPLE == "all" or int(SAMPLE) >= points:
        return list(range(1, points + 1))
    few = int(SAMPLE)
    return sorted({1 + round(i * (points - 1) / max(few - 1, 1)) for i in range(few)})


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """A folder in which each point starts anew."""
    return tmp_path


def fresh(started: Path, name: str) -> Path:
    """The watched folder with all around it as ``prepare`` left it."""
    place = started / name
    shutil.copytree(started / "ready", place)
    return place / "watched"


def prepared(started: Path, command: Command) -> int:
    """Prepare once, in a process of its own, and count the points."""
    ready = started / "ready"
    (ready / "watched").mkdir(parents=True)
    log = started / "prepare.log"

    def prepare() -> int:
        command.prepare(ready / "watched")
        return 0

    assert forked(prepare, None, log) == 0, log.read_text()
    folder = fresh(started, "count")
    points = count_points(lambda: command.run(folder), folder, started / "count.log")
    command.done(folder)
    return points


def survives(started: Path, command: Command, point: int, how: How) -> None:
    """A failure at a point, what is left, and the command again."""
    folder = fresh(started, f"{how}{point}")
    log = started / "run.log"
    code = forked(lambda: command.run(folder), Disk(folder, point, how), log)
    said = log.read_text(errors="replace")
    if how == "kill":
        assert code in (KILLED, 0), (
            f"exit code {code} at point {point}: {said}"
        )  # 0: a run takes fewer points than another
    else:
        said = said.rsplit("\n", 1)[0]
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in said, f"point {point}: {said}"
        assert code in (0, 2) and len(errors) == (code == 2), f"exit code {code} at point {point}: {said}"
    command.check(folder)
    again = forked(lambda: command.run(folder), None, log)
    assert again == 0, f"the command does not finish after point {point}, {how}: {log.read_text(errors='replace')}"
    command.done(folder)
    shutil.rmtree(folder.parent)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_point_is_survived(name: str, started: Path) -> None:
    """Killed there, and on a disk that is full from there on; of a sample, by turns."""
    command = COMMANDS[name]
    for module in IMPORTS[name]:
        importlib.import_module(module)
    points = prepared(started, command)
    few = sample(points)
    for number, point in enumerate(few):
        for how in ("kill", "full") if SAMPLE == "all" else (("kill", "full")[number % 2],):
            survives(started, command, point, how)
    print(f"{name}: {len(few)} of {points} points")
