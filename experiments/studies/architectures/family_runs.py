"""Collect scripts of many families of models on this machine: each one a collection of ``stepsight collect --script``.

``OUT/repeatN/FAMILY-CONFIGURATION`` is one collection; a repeat goes over all scripts before the next one begins, so
that drift shows.  A stopped study goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepsight.dataset.harness.progress import Progress
from stepsight.experiments.tasks.script_collecting import Script, collect_script
from stepsight.training.measured.graph_segments import read_graphs
from stepsight.training.measured.host_steps import HostStep

SCRIPT = Path(__file__).with_name("family_script.py")
CONFIGURATIONS = 3
COUNTS = {"warmup": 3, "rounds": 4, "steps": 6, "profile_steps": 4}
_TIMEOUT_S = 180.0
_TOGETHER = 32  # runs whose graphs are in memory at once


@dataclass(frozen=True)
class FamilyRun:
    """One collected script.

    Attributes:
        family: Of the model.
        configuration: 0, 1, …
        repeat: When it was collected: 0 first.
        folder: The collection.
    """

    family: str
    configuration: int
    repeat: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.family}-{self.configuration}"


def collect_runs(
    out: Path, families: Sequence[str], repeats: int, *, seconds: float = float("inf"), progress: bool = True
) -> int:
    """Collect every configuration of the families a number of times, one after the other.

    Args:
        out: Folder of the study.
        families: Their names.
        repeats: How often each script is collected.
        seconds: Begin no further script after so long.
        progress: Whether to report it on stderr.

    Returns:
        Number of scripts that are left to collect.
    """
    asked = list(_asked(out, families, repeats))
    left = [run for run in asked if not (run.folder / "plan.json").exists()]
    bar, began = Progress(len(left), shown=progress), time.monotonic()
    while left and time.monotonic() - began < seconds:
        run = left.pop(0)
        bar.update(f"{run.name}, repeat {run.repeat}", 0)
        arguments = (run.family, str(run.configuration))
        script = Script(SCRIPT, arguments, None, COUNTS, _TIMEOUT_S, "train")
        collect_script(script, run.folder, 0.0, progress=False)
        bar.update(run.name, 1)
    bar.close(f"{len(asked) - len(left)} of {len(asked)} scripts are collected")
    return len(left)


def read_runs_of_families(out: Path, families: Sequence[str]) -> list[FamilyRun]:
    """The collections of the families."""
    repeats = len(list(out.glob("repeat*")))
    return [run for run in _asked(out, families, repeats) if (run.folder / "plan.json").exists()]


def steps_of(runs: Sequence[FamilyRun]) -> Iterator[tuple[FamilyRun, HostStep]]:
    """What the host did in a step of each run; runs whose steps were not timed are left out."""
    for begin in range(0, len(runs), _TOGETHER):
        part = runs[begin : begin + _TOGETHER]
        folders = [next(run.folder.glob("runs/*")) for run in part]
        for run, graphs in zip(part, read_graphs(folders, ("step",)), strict=True):
            if graphs.host is not None and graphs.host.ranks == 1:
                yield run, graphs.host


def _asked(out: Path, families: Sequence[str], repeats: int) -> Iterator[FamilyRun]:
    for repeat in range(repeats):
        for configuration in range(CONFIGURATIONS):
            for family in families:
                yield FamilyRun(family, configuration, repeat, out / f"repeat{repeat}" / f"{family}-{configuration}")
