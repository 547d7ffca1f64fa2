"""``stepsight emulate``: one rank of a user's script for real, in a world whose other ranks are modelled delays."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepsight.dataset.errors import CollectError
from stepsight.dataset.harness.plan_error import HarnessError
from stepsight.dataset.harness.progress import Progress
from stepsight.dataset.harness.scripts.script_launch import Ranks, run_ranks
from stepsight.experiments.emulation_delays import Delay, telling
from stepsight.experiments.reports.text_table import Number, table


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """A script and the world of which it is one rank.

    Attributes:
        path: The script.
        arguments: Its own.
        world_size: Ranks of the world.
        rank: The one that runs.
        devices_per_node: Ranks that share a node.
        virtual: On a virtual clock.
        counts: ``warmup``, ``rounds`` and ``steps``.
        timeout_s: Within which all its measured steps must be through.
    """

    path: Path
    arguments: Sequence[str] = ()
    world_size: int
    rank: int = 0
    devices_per_node: int = 8
    virtual: bool = False
    counts: dict[str, int] = field(default_factory=lambda: {"warmup": 2, "rounds": 3, "steps": 4})
    timeout_s: float = 600.0

    def check(self) -> None:
        """Check the numbers.

        Raises:
            CollectError: If there is no such rank, or no script.
        """
        if not self.path.is_file():
            raise CollectError(f"emulate takes a Python file, got no file {self.path}")
        if not 0 <= self.rank < self.world_size:
            raise CollectError(f"0 <= --rank < --world-size must hold, got {self.rank} and {self.world_size}")


def emulate(asked: Emulation, delay: Delay, *, progress: bool = True) -> dict[str, Any]:
    """Run a rank of a script in an emulated world.

    Args:
        asked: What to run.
        delay: Seconds of each collective.
        progress: Say on standard error what goes on.

    Returns:
        ``step_seconds``, ``rounds``, ``iteration_s`` (their median), ``spread_percent`` over rounds, and
        ``collectives`` of a step: kind, bytes, group, ``calls_per_step`` and modelled ``seconds`` of each.

    Raises:
        CollectError: If the script cannot be emulated; with its own line.
    """
    asked.check()
    bar = Progress(asked.counts["warmup"] + asked.counts["rounds"] + 1, shown=progress, verb="emulate")
    world = {"devices_per_node": asked.devices_per_node, "virtual": asked.virtual}
    settings = {
        "script": str(asked.path),
        "arguments": list(asked.arguments),
        "timeout_s": asked.timeout_s,
        "emulate": world,
        "profile_steps": 0,
        **asked.counts,
    }
    left = [1] * (asked.counts["warmup"] + asked.counts["rounds"] + 1)

    def say(doing: str) -> None:
        bar.update(doing, left.pop() if left else 0)

    with tempfile.TemporaryDirectory(prefix="stepsight-") as temporary, telling(delay) as pipes:
        folder = Path(temporary)
        ranks = Ranks.emulated(asked.rank, asked.world_size, asked.devices_per_node, pipes)
        log = folder / "script.log"
        try:
            (found,) = run_ranks(
                settings, folder, log, ranks, lambda doing: bar.update(doing, left.pop() if left else 0)
            )
        except HarnessError as error:
            bar.end_line()
            output = log.read_text("utf-8", errors="replace")[-_SHOWN:].strip() if log.exists() else ""
            output = " | ".join(output.splitlines())  # an error is one line
            told = str(error).removesuffix(f"; see {log}")
            raise CollectError(told + (f"; the end of its output: {output}" if output else "")) from None
    bar.close(f"{asked.path.name}: steps by {found['steps_by']}")
    return _summary(asked, found)


_SHOWN = 500  # characters of a failed script's output


def _summary(asked: Emulation, found: dict[str, Any]) -> dict[str, Any]:
    rounds = found["rounds"]
    seconds = [each for steps in rounds for each in steps]
    medians, whole = [statistics.median(steps) for steps in rounds], statistics.median(seconds)
    collectives = [_per_step(each, len(seconds)) for each in found["collectives"]]
    told = {
        "script": str(asked.path),
        "world_size": asked.world_size,
        "rank": asked.rank,
        "clock": "virtual" if asked.virtual else "real",
        "steps_by": found["steps_by"],
        "iteration_s": whole,
        "spread_percent": 100 * (max(medians) - min(medians)) / whole if whole else 0.0,
        "rounds": rounds,
        "step_seconds": seconds,
        "collectives": collectives,
    }
    return {**told, "text": _text(told)}


def _per_step(collective: dict[str, Any], steps: int) -> dict[str, Any]:
    told = {name: value for name, value in collective.items() if name != "calls"}
    return {**told, "calls_per_step": collective["calls"] / steps}


def _text(told: dict[str, Any]) -> str:
    cells = [
        [
            each["kind"],
            each["num_bytes"],
            each["group_size"],
            each["ranks_per_node"],
            Number(each["calls_per_step"]),
            Number(1e3 * each["seconds"], 3),
            Number(1e3 * each["seconds"] * each["calls_per_step"], 3),
        ]
        for each in told["collectives"]
    ]
    titles = ["collective", "bytes", "ranks", "per node", "calls per step", "ms each", "ms per step"]
    return (
        f"rank {told['rank']} of {told['world_size']}, {told['clock']} clock, steps by {told['steps_by']}\n"
        f"iteration {1e3 * told['iteration_s']:.2f} ms, spread {told['spread_percent']:.1f} % over rounds\n"
        + (table(titles, cells) if cells else "no collectives")
    )
