"""Emulated against real: scripts on all ranks of a cluster in a box, and on one rank that emulates the others."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from stepsight.dataset.harness.scripts.launch import Ranks, run_ranks
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.runs.box_spec import Box
from stepsight.experiments.tasks.emulating import Emulation, emulate

FOLDER = Path(__file__).parent
VALUES = (150_000, 300_000, 600_000)  # of the calls that are timed one by one
LAYERS, FORWARD_S, BACKWARD_S = 8, 0.08, 0.16
COUNTS = {"warmup": 2, "rounds": 2, "steps": 3}


def compare(box: Box) -> list[dict[str, Any]]:
    """Seconds of calls and of training steps: real, and emulated with the measured durations of the real calls."""
    calls = _calls(box)
    delays = {4 * int(values): statistics.median(seconds) for values, seconds in calls.items()}

    def delay(collective: Collective) -> float:
        return delays.get(collective.num_bytes, 1e-3)

    emulated = _calls(box, delay)
    rows = [
        {
            "what": f"all_reduce of {4 * int(values) / 1e6:g} MB",
            "real_s": statistics.median(seconds),
            "emulated_s": statistics.median(emulated[values]),
        }
        for values, seconds in calls.items()
    ]
    for values in VALUES[1:]:
        words = ["ddp", str(LAYERS), str(FORWARD_S), str(BACKWARD_S), str(values)]
        real = _real(box, "sleeping_script.py", words)
        found = emulate(_emulation(box, "sleeping_script.py", words), delay, progress=False)
        rows.append(
            {
                "what": f"DDP step, {LAYERS} buckets of {4 * values / 1e6:g} MB",
                "real_s": statistics.median(real),
                "emulated_s": found["iteration_s"],
            }
        )
    return [{"box": box.name, **row, "error_percent": _error(row)} for row in rows]


def _error(row: dict[str, Any]) -> float:
    return float(100 * (row["emulated_s"] / row["real_s"] - 1))


def _calls(box: Box, delay: Any = None) -> dict[str, list[float]]:
    """Seconds of single calls by number of values, without those of the first steps."""
    with tempfile.TemporaryDirectory(prefix="stepsight-") as temporary:
        out = Path(temporary) / "calls.json"
        words = [str(out), *map(str, VALUES)]
        if delay is None:
            _real(box, "call_times_script.py", words)
        else:
            emulate(_emulation(box, "call_times_script.py", words), delay, progress=False)
        return {values: seconds[COUNTS["warmup"] :] for values, seconds in json.loads(out.read_text()).items()}


def _emulation(box: Box, script: str, words: list[str]) -> Emulation:
    return Emulation(
        path=FOLDER / script,
        arguments=words,
        world_size=box.num_ranks,
        devices_per_node=box.ranks_per_node,
        counts=COUNTS,
    )


def _real(box: Box, script: str, words: list[str]) -> list[float]:
    """Seconds of each step, of the slowest rank."""
    settings = {"script": str(FOLDER / script), "arguments": words, "timeout_s": 600, "profile_steps": 0, **COUNTS}
    with tempfile.TemporaryDirectory(prefix="stepsight-") as temporary:
        folder = Path(temporary)
        ranks = run_ranks(settings, folder, folder / "log", Ranks.in_box(box.to_dict()), lambda doing: None)
    steps = [[seconds for steps in rank["rounds"] for seconds in steps] for rank in ranks]
    return [max(column) for column in zip(*steps, strict=True)]
