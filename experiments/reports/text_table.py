"""Plain text for the terminal and notebooks: tables, a progress bar, and words of the field for keys of files."""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from importlib import resources
from typing import Any

from stepsight.dataset.base.errors import shorten

_LONGEST = 400  # characters of a cell


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell; numbers to the right, words to the left.

    Cells are one line: names in traces may hold any character.
    """
    cells = [list(header), *([shorten(str(cell), _LONGEST) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    pads = [str.ljust if not rows or any(isinstance(row[i], str) for row in rows) else str.rjust
            for i in range(len(header))]  # fmt: skip
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(p(c, w) for p, c, w in zip(pads, line, widths, strict=True)).rstrip() for line in cells)


Column = Callable[[Any], object]  # the cell of a row
Columns = dict[str, str | Column]  # by title: a key of the rows, or a function of a row


def table_of(rows: Sequence[Any], columns: Mapping[str, str | Column], decimals: int = 1) -> str:
    """A table with a row for each of ``rows``; ``decimals``: of floats.

    Seconds print in the unit that the title ends in, and None as "-".
    """

    def cell(title: str, row: Any) -> object:
        column = columns[title]
        value = row[column] if isinstance(column, str) else column(row)
        if not isinstance(value, float) or isinstance(value, Number):
            return "-" if value is None else value
        return Number(1e3 * value if title.endswith(" ms") else value, 3 if title.endswith(" s") else decimals)

    return table(list(columns), [[cell(title, row) for title in columns] for row in rows])


MOST_PRINTED = 1e12


class Number(float):
    """A float that prints with a fixed number of decimals, or with an exponent from ``MOST_PRINTED`` on."""

    decimals: int

    def __new__(cls, value: float, decimals: int = 1) -> Number:
        number = super().__new__(cls, value)
        number.decimals = decimals
        return number

    def __str__(self) -> str:
        return f"{float(self):.{self.decimals}f}" if abs(self) < MOST_PRINTED else f"{float(self):.3g}"


_QUIET_S, _PAUSE_S = 0.5, 0.2  # before the first output, and between updates


class NotebookBar(AbstractContextManager["NotebookBar"]):
    """A bar that updates below a notebook's cell; outside of notebooks (``active``) it does nothing."""

    def __init__(self, what: str) -> None:
        """``what``: the counted things, such as ``strategies``."""
        ipython = sys.modules.get("IPython")
        self.active = getattr(ipython and ipython.get_ipython(), "kernel", None) is not None
        self._what, self._text, self._handle = what, "", None
        self._last = time.monotonic() + _QUIET_S - _PAUSE_S

    def show(self, done: int, of: int = 0, more: str = "") -> None:
        """Update the bar; ``of``: the total, 0 if it is unknown."""
        count = f"{done} of {of}" if of else str(done)
        bar = f'<progress value="{done}" max="{of}"></progress> ' if of else ""
        self._text = f"{bar}{escape(f'{count} {self._what}  {more}'.rstrip())}"
        if time.monotonic() - self._last >= _PAUSE_S or (self._handle is not None and done == of):
            self._update()

    def _update(self) -> None:
        if self.active:
            display: Any = sys.modules["IPython.display"]  # a kernel has imported it
            self._last, text = time.monotonic(), display.HTML(self._text)
            if self._handle is None:
                self._handle = display.display(text, display_id=True)
            else:
                self._handle.update(text)

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._update()  # the last counts


_WORDS: Mapping[str, str] = tomllib.loads(resources.files(__package__).joinpath("words.toml").read_text("utf-8"))


def words(key: str) -> str:
    """A key as people say it: ``ZeRO stage`` for ``parallel.zero_stage``."""
    return _WORDS.get(key) or key.rpartition(".")[2].replace("_", " ").capitalize()


def shown(value: Any) -> str:
    """A value as people write it; of a list of tables only their number."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        nested = any(isinstance(each, list | tuple | dict) for each in value)
        return f"{len(value)} entries" if nested else ", ".join(map(shown, value)) or "-"
    return "-" if value is None or value == "" else str(value)
