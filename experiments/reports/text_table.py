"""Plain text tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepsight.dataset.base.errors import shorten

_LONGEST = 400  # characters of a cell


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell; numbers to the right, words to the left.

    Cells are one line: names in traces may hold any character.
    """
    cells = [[shorten(str(cell), _LONGEST) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    numeric = [all(not isinstance(row[i], str) for row in rows) and bool(rows) for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if right else v.ljust(w) for v, w, right in zip(values, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(list(header)), line(["-" * w for w in widths]), *map(line, cells)])


Column = Callable[[Any], object]  # the cell of a row


def table_of(rows: Sequence[Any], columns: Mapping[str, str | Column], decimals: int = 1) -> str:
    """A table with a row for each of ``rows``.

    Args:
        rows: Mappings, or what the functions of ``columns`` take.
        columns: By title: a key of the rows, or a function of a row.  Seconds print in the unit that the title ends in;
            None prints as "-".
        decimals: Of floats.
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
