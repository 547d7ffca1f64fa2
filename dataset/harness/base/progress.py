"""Progress on standard error: one line that updates on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

ROUND_UNITS = 40  # a round of a run takes about as long as this many signatures


class Progress:
    """Counts units of work: one per signature, ``ROUND_UNITS`` per round of a run.

    Args:
        total: Units in all.
        done: Units that an earlier collection did.
        shown: Whether to write anything at all.
        stream: Where to.
        verb: What goes on, as lines begin.
    """

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
