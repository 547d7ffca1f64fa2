"""Capture the scripts of the families on a CPU, and measure their calls alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from stepsight.dataset.capture.captured import MANIFEST, Captured, read_captured, write_captured
from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
from stepsight.dataset.harness.progress import Progress
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.event_file import read_event_file
from stepsight.experiments.studies.architectures.family_runs import SCRIPT
from stepsight.experiments.tasks.collecting import collect_ops
from stepsight.training.measured.measured import calls_alone

_TIMEOUT_S = 300.0


def program_folder(out: Path, family: str, configuration: int) -> Path:
    """Folder of the captured program of a script."""
    return out / "programs" / f"{family}-{configuration}"


def capture_programs(
    out: Path,
    families: Sequence[str],
    configurations: Sequence[int],
    *,
    seconds: float = float("inf"),
    progress: bool = True,
) -> int:
    """Capture missing scripts; return how many are left.

    Args:
        out: Folder of the study.
        families: Their names.
        configurations: Of each family.
        seconds: Begin no further script after so long.
        progress: Whether to report it on stderr.
    """
    asked = [(family, number) for number in configurations for family in families]
    left = [each for each in asked if not (program_folder(out, *each) / MANIFEST).exists()]
    bar, began = Progress(len(left), shown=progress, verb="capture"), time.monotonic()
    while left and time.monotonic() - began < seconds:
        family, number = left.pop(0)
        request = CaptureRequest(SCRIPT, (family, str(number)), 1, 1, warm_up=2, device="cpu", timeout_s=_TIMEOUT_S)
        write_captured(capture(request), program_folder(out, family, number))
        bar.update(f"{family}-{number}", 1)
    bar.close(f"{len(asked) - len(left)} of {len(asked)} scripts are captured")
    return len(left)


def measure_programs(
    out: Path,
    families: Sequence[str],
    configurations: Sequence[int],
    *,
    seconds: float = float("inf"),
    progress: bool = True,
) -> int:
    """Measure the slowest calls of captured scripts, as ``collect --ops`` does; return how many scripts are left."""
    asked = [(family, number) for number in configurations for family in families]
    left = [each for each in asked if not _alone(out, *each).exists()]
    bar, began = Progress(len(left), shown=progress, verb="measure"), time.monotonic()
    while left and time.monotonic() - began < seconds:
        family, number = left.pop(0)
        collect_ops(
            read_program(out, family, number), None, _alone(out, family, number).parents[1], 30.0, progress=False
        )
        bar.update(f"{family}-{number}", 1)
    bar.close(f"calls of {len(asked) - len(left)} of {len(asked)} scripts are measured")
    return len(left)


def read_alone(out: Path, family: str, configuration: int) -> dict[tuple[str, Op], tuple[float, float]]:
    """Shortest and longest seconds of a script's calls, measured alone, by label and op."""
    return calls_alone(read_event_file(_alone(out, family, configuration)))


def _alone(out: Path, family: str, configuration: int) -> Path:
    return out / "alone" / f"{family}-{configuration}" / "events" / "ops.json"


def read_program(out: Path, family: str, configuration: int) -> Captured:
    """The captured program of a script."""
    return read_captured(program_folder(out, family, configuration))
