"""Plain text tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell; numbers to the right, words to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    numeric = [all(not isinstance(row[i], str) for row in rows) and bool(rows) for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if right else v.ljust(w) for v, w, right in zip(values, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(list(header)), line(["-" * w for w in widths]), *map(line, cells)])


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
