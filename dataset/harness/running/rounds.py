"""A run's finished rounds on disk, so that a killed collection loses at most the round it was in."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.atomic_files import read_json, write_json

CERTAIN = 0.01  # relative error of the median below which a run needs no more rounds


def rounds_path(out: Path, name: str) -> Path:
    return out / ".rounds" / f"{name}.json"


def is_done(out: Path, name: str) -> bool:
    """Return whether a run is finished, also if a box was too busy for it, or memory was too small."""
    return any((out / place / name / "manifest.json").exists() for place in ("runs", "rejected"))


def read_rounds(out: Path, run: dict[str, Any]) -> dict[str, Any]:
    """``{"rounds": seconds of each step, "losses": of each step of the first, "records": of a box's steps, by round}``.

    A damaged file is measured again.
    """
    path = rounds_path(out, run["name"])
    try:
        state = read_json(path)
    except (OSError, ValueError):
        state = None
    return state if _is_state(state, run) else {"rounds": [], "losses": [], "records": []}


def least_certain(rounds: Mapping[str, Sequence[Sequence[float]]]) -> str | None:
    """Return the run whose median step is least certain, an unmeasured one first; None if all are certain.

    Args:
        rounds: Seconds of each step by round, of each run.
    """
    unsure = {name: uncertainty(of) for name, of in rounds.items()}
    worst = max(unsure, key=unsure.__getitem__, default=None)
    return worst if worst is not None and unsure[worst] > CERTAIN else None


def uncertainty(rounds: Sequence[Sequence[float]]) -> float:
    """Estimate the relative error of the median step: half the interquartile range over the root of the rounds."""
    steps = [seconds for each in rounds for seconds in each]
    if len(steps) < 2:
        return 1.0
    low, middle, high = statistics.quantiles(steps, n=4, method="inclusive")
    return float((high - low) / (2.0 * middle * len(rounds) ** 0.5))


def write_rounds(out: Path, run: dict[str, Any], state: dict[str, Any]) -> None:
    """Write the state that ``read_rounds`` reads."""
    write_json(rounds_path(out, run["name"]), state)


def _is_state(state: Any, run: dict[str, Any]) -> bool:
    if not isinstance(state, dict) or set(state) != {"rounds", "losses", "records"}:
        return False
    rounds, losses, records = state["rounds"], state["losses"], state["records"]
    if not isinstance(records, list) or len(records) != (len(rounds) if "sleeps" in run else 0):
        return False
    if not isinstance(rounds, list) or not rounds:
        return False
    if not all(_are_numbers(seconds, run["steps"]) and min(seconds) > 0 for seconds in rounds):
        return False
    return _are_numbers(losses, run["warmup"] + run["steps"])


def _are_numbers(column: Any, count: int) -> bool:
    """Whether these are finite numbers, as many as expected."""
    if not isinstance(column, list) or len(column) != count:
        return False
    return all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < float("inf") for x in column)
