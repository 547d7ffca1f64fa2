"""Collect the task *pairs*: steps of two real ranks, and the same steps of one rank alone.

Two ranks compute on a core each and reduce over gloo.  Alone, rank 0 is one of the same world of two, so that all
shapes are equal, but the other rank does not run and its collectives take no time (``dataset.harness.emulation``).
Both are measured by turns, so that drift of the machine shows.  A collection that stops goes on where it was.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import write_json
from stepsight.dataset.harness.plan_error import HarnessError
from stepsight.dataset.harness.scripts.launch import Ranks, run_ranks
from stepsight.experiments.studies.pairs.pair_jobs import JOBS
from stepsight.experiments.tasks.emulating import telling

SCRIPT = Path(__file__).with_name("pair_script.py")
COUNTS: Mapping[str, Any] = {"warmup": 2, "rounds": 1, "steps": 6, "profile_steps": 5, "timeout_s": 120.0}
ALONE, PAIR = "alone", "pair"
RESULT = "ranks.json"


def collect_pairs(out: Path, repeats: int, jobs: Sequence[str] = tuple(JOBS), *, seconds: float = float("inf")) -> int:
    """Collect every job a number of times, alone and on two ranks.

    Args:
        out: Folder of the task.
        repeats: How often.
        jobs: Names in ``JOBS``.
        seconds: Begin no further run after so long.

    Returns:
        Number of runs that are left.

    Raises:
        CollectError: If a run failed.
    """
    asked = [(name, f"{mode}{turn}") for turn in range(repeats) for name in jobs for mode in (ALONE, PAIR)]
    left = [each for each in asked if not (out / each[0] / each[1] / RESULT).exists()]
    total, began = len(left), time.monotonic()
    while left and time.monotonic() - began < seconds:
        name, run = left.pop(0)
        print(f"{total - len(left)}/{total} {name} {run}", file=sys.stderr, flush=True)
        try:
            _collect(name, out / name / run, alone=run.startswith(ALONE))
        except HarnessError as error:
            raise CollectError(f"job {name} must run on {run}: {error}") from None
    return len(left)


def _collect(name: str, folder: Path, *, alone: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"script": str(SCRIPT), "arguments": [name], **COUNTS}
    log = folder / "script.log"
    if alone:
        settings["emulate"] = {"ranks": [0], "devices_per_node": 2, "virtual": False}
        with telling(lambda collective: 0.0) as pipes:
            found = run_ranks(settings, folder, log, Ranks.emulated({0: pipes}, 2, 2), lambda doing: None)
    else:
        found = run_ranks(settings, folder, log, Ranks.as_torchrun(2), lambda doing: None)
    for trace in folder.glob("*.et.json.gz"):
        trace.unlink()
    write_json(folder / RESULT, found)
