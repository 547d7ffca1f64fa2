"""A progress bar in a notebook, for long calls."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from html import escape
from typing import Any

_QUIET_S, _PAUSE_S = 0.5, 0.2  # before the first output, and between updates


class NotebookBar(AbstractContextManager["NotebookBar"]):
    """A bar that updates below a notebook's cell; outside of notebooks it does nothing.

    Args:
        what: The counted things, such as ``strategies``.
    """

    def __init__(self, what: str) -> None:
        self._what, self._display = what, _display()
        self._handle: Any = None
        self._last = time.monotonic() + _QUIET_S - _PAUSE_S
        self._text = ""

    @property
    def active(self) -> bool:
        """Whether this is a notebook."""
        return self._display is not None

    def show(self, done: int, of: int = 0, more: str = "") -> None:
        """Update the bar; ``of``: the total, 0 if it is unknown."""
        if self._display is None:
            return
        count = f"{done} of {of}" if of else str(done)
        bar = f'<progress value="{done}" max="{of}"></progress> ' if of else ""
        self._text = f"{bar}{escape(f'{count} {self._what}  {more}'.rstrip())}"
        if time.monotonic() - self._last >= _PAUSE_S or (self._handle is not None and done == of):
            self._update()

    def _update(self) -> None:
        assert self._display is not None
        self._last, shown = time.monotonic(), self._display.HTML(self._text)
        if self._handle is None:
            self._handle = self._display.display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._update()  # the last counts


def _display() -> Any:
    """``IPython.display`` in a notebook, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    return sys.modules.get("IPython.display")  # a kernel has imported it
