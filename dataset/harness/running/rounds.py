"""A run's finished rounds on disk, so that a killed collection loses at most the round it was in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..atomic_files import read_json, write_json


def rounds_path(out: Path, name: str) -> Path:
    return out / ".rounds" / f"{name}.json"


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


def write_rounds(out: Path, run: dict[str, Any], state: dict[str, Any]) -> None:
    """What ``read_rounds`` reads back."""
    write_json(rounds_path(out, run["name"]), state)


def _is_state(state: Any, run: dict[str, Any]) -> bool:
    if not isinstance(state, dict) or set(state) != {"rounds", "losses", "records"}:
        return False
    rounds, losses, records = state["rounds"], state["losses"], state["records"]
    if not isinstance(records, list) or len(records) != (len(rounds) if "sleeps" in run else 0):
        return False
    if not isinstance(rounds, list) or not 0 < len(rounds) <= run["rounds"]:
        return False
    if not all(_are_numbers(seconds, run["steps"]) and min(seconds) > 0 for seconds in rounds):
        return False
    return _are_numbers(losses, run["warmup"] + run["steps"])


def _are_numbers(column: Any, count: int) -> bool:
    """Whether these are finite numbers, as many as expected."""
    if not isinstance(column, list) or len(column) != count:
        return False
    return all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < float("inf") for x in column)
