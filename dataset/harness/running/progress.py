"""How far a collection is: finished rounds of runs on disk, and progress on standard error.

A killed collection loses at most the round it was in.  Progress is one line on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..base.atomic_files import read_json

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
    """The run whose median step is least certain by its rounds, an unmeasured one first; None if all are certain."""
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


ROUND_UNITS = 40  # a round of a run takes about as long as this many signatures


class Progress:
    """Counts units of work: one per signature, ``ROUND_UNITS`` per round of a run; lines begin with ``verb``."""

    def __init__(
        self, total: int, done: int = 0, *, shown: bool = True, stream: TextIO | None = None, verb: str = "collect"
    ) -> None:
        self._verb = verb
        self._total, self._done, self._earlier = total, done, done
        self._stream = stream or sys.stderr
        self._shown, self._terminal = shown, self._stream.isatty()
        self._start, self._last = time.monotonic(), float("-inf")
        self._open = False

    def update(self, doing: str, done: int = 0) -> None:
        """Add finished units, and show what runs now."""
        self._done += done
        now = time.monotonic()
        if not self._shown or now - self._last < (0.1 if self._terminal else 5.0):
            return
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
        percent = 100 * self._done // max(1, self._total)
        line = f"{self._verb} {percent:3d}% {self._left()} {text}"
        if self._terminal:
            bar = "#" * (percent // 5)
            self._stream.write(f"\r\x1b[K{f'[{bar:<20}] {line}'[:110]}")
            self._open = not last
            if last:
                self._stream.write("\n")
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def _left(self) -> str:
        elapsed, new = time.monotonic() - self._start, self._done - self._earlier
        if new <= 0 or self._done >= self._total:
            return f"{elapsed:.0f}s"
        return f"{elapsed:.0f}s, {elapsed * (self._total - self._done) / new:.0f}s left"
