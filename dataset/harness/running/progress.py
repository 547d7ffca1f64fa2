"""How far a collection is: finished rounds of runs on disk, and progress on standard error.

A killed collection loses at most the round it was in.  Progress is one line on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ..base.atomic_files import read_json
from ..plan.plan_checks import is_of

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
    state: Any = None
    with suppress(OSError, ValueError):
        state = read_json(rounds_path(out, run["name"]))
    return state if _is_state(state, run) else {"rounds": [], "losses": [], "records": []}


def least_certain(rounds: Mapping[str, Sequence[Sequence[float]]]) -> str | None:
    """The run whose median step is least certain by its rounds, an unmeasured one first; None if all are certain."""
    unsure = {name: uncertainty(of) for name, of in rounds.items()}
    return max((name for name in unsure if unsure[name] > CERTAIN), key=unsure.__getitem__, default=None)


def uncertainty(rounds: Sequence[Sequence[float]]) -> float:
    """Estimate the relative error of the median step: half the interquartile range over the root of the rounds."""
    steps = [seconds for each in rounds for seconds in each]
    if len(steps) < 2:
        return 1.0
    low, middle, high = statistics.quantiles(steps, n=4, method="inclusive")
    return float((high - low) / (2.0 * middle * len(rounds) ** 0.5))


def _is_state(state: Any, run: dict[str, Any]) -> bool:
    """Whether these are finished rounds of a run."""
    if not isinstance(state, dict) or set(state) != {"rounds", "losses", "records"}:
        return False
    rounds, losses, records = state["rounds"], state["losses"], state["records"]
    if not all(isinstance(column, list) for column in (rounds, losses, records)) or not rounds:
        return False
    columns = [(losses, run["warmup"] + run["steps"]), *((seconds, run["steps"]) for seconds in rounds)]
    whole = all(isinstance(column, list) and len(column) == count for column, count in columns)
    numbers = whole and all(is_of(value, float) for column, _ in columns for value in column)
    return numbers and min(map(min, rounds)) > 0 and len(records) == (len(rounds) if "sleeps" in run else 0)


ROUND_UNITS = 40  # a round of a run takes about as long as this many signatures


class Progress:
    """Counts units of work: one per signature, ``ROUND_UNITS`` per round of a run; lines begin with ``verb``."""

    def __init__(
        self, total: int, done: int = 0, *, shown: bool = True, stream: TextIO | None = None, verb: str = "collect"
    ) -> None:
        self._verb, self._shown, self._stream = verb, shown, stream or sys.stderr
        self._total, self._done, self._earlier = total, done, done
        self._terminal, self._open = self._stream.isatty(), False
        self._start, self._last = time.monotonic(), float("-inf")

    def update(self, doing: str, done: int = 0) -> None:
        """Add finished units, and show what runs now."""
        self._done += done
        now = time.monotonic()
        if self._shown and now - self._last >= (0.1 if self._terminal else 5.0):
            self._last = now
            self._write(doing)

    def close(self, text: str) -> None:
        """Write the last line."""
        if self._shown:
            self._write(text, last=True)

    def end_line(self) -> None:
        """End the updating line, because other output follows."""
        if self._open:
            self._stream.write("\n")

    def _write(self, text: str, *, last: bool = False) -> None:
        percent, elapsed = 100 * self._done // max(1, self._total), time.monotonic() - self._start
        new, left = self._done - self._earlier, self._total - self._done
        told = f"{elapsed:.0f}s, {elapsed * left / new:.0f}s left" if new > 0 and left > 0 else f"{elapsed:.0f}s"
        line = f"{self._verb} {percent:3d}% {told} {text}"
        if self._terminal:
            line = "\r\x1b[K" + f"[{'#' * (percent // 5):<20}] {line}"[:110]
        self._open = self._terminal and not last
        self._stream.write(line if self._open else line + "\n")
        self._stream.flush()
