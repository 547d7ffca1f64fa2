"""Rows of one file, as a reader finds them: cells in, measurements out; and names of devices as drivers give them."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepsight.dataset.base.bounded import read_unpacked, reason
from stepsight.dataset.base.errors import TableError
from stepsight.dataset.hardware.hardware import reported_devices
from stepsight.dataset.kinds.op import MOST_SIZE, Collective, Op
from stepsight.dataset.tables.measurements import Measurements, SourceFile


def device_name(told: str) -> str:
    """Preset of a device as drivers name it; where none is known, its name in lower case with dashes."""
    told = told.strip()
    return reported_devices().get(told) or re.sub(r"[^a-z0-9]+", "-", told.removeprefix("NVIDIA ").lower()).strip("-")


NO_TIME = "no time"
COPY = "equal in all to another row"
MOST_SECONDS = 1e6  # of one call: larger values are typing mistakes


class Rows:
    """The rows and facts that a reader finds in one file.

    Attributes:
        path: The file, for errors and for what only its place tells.
        skipped: Rows left out, by reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped: Counter[str] = Counter()
        self._shared: dict[Op | Collective, Op | Collective] = {}
        self._rows: dict[tuple[Op | Collective, float, str, str, str, str], None] = {}  # each once, in order

    def add(
        self, work: Op | Collective, seconds: float, *, device: str, software: str, fabric: str = "", part: str = ""
    ) -> None:
        """A measurement; one without a time, or equal in all to another of its part, is counted as skipped."""
        if not (math.isfinite(seconds) and seconds > 0):
            self.skipped[NO_TIME] += 1
            return
        sizes = work.dims if isinstance(work, Op) else (work.num_bytes, work.group_size)
        if max(sizes) > MOST_SIZE or seconds > MOST_SECONDS:
            raise self.error(
                f"sizes must be <= {MOST_SIZE} and a time <= {MOST_SECONDS:g} s, got {work!s:.80}, {seconds} s"
            )
        work = self._shared.setdefault(work, work)
        row = (work, seconds, device, fabric, software, part)
        if row in self._rows:
            self.skipped[COPY] += 1
        else:
            self._rows[row] = None

    def __len__(self) -> int:
        return len(self._rows)

    def skip(self, reason: str, count: int = 1) -> None:
        self.skipped[reason] += count

    def error(self, rule: str, row: int | None = None) -> TableError:
        """An error that names the file and the row."""
        where = "" if row is None else f", row {row}"
        return TableError(f"{self.path}{where}: {rule}")

    def table(self, source: str, file: SourceFile) -> Measurements:
        works, seconds, device, fabric, software, _ = zip(*self._rows, strict=True) if self._rows else ((),) * 6
        return Measurements(
            works,
            np.array(seconds, float),
            device,
            fabric,
            software,
            source=(source,) * len(works),
            files={source: file},
            skipped=dict(self.skipped),
        )


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a CSV file.

    Attributes:
        rows: Where it belongs to.
        number: From 1, the header not counted.
        cells: Text by column.
    """

    rows: Rows
    number: int
    cells: dict[str, str]

    def text(self, column: str) -> str:
        return self.cells[column].strip()

    def real(self, column: str) -> float:
        """A number; NaN where the cell is empty."""
        text = self.text(column)
        try:
            return float(text) if text else math.nan
        except ValueError:
            raise self.rows.error(f"{column} must be a number, got {text!r:.80}", self.number) from None

    def whole(self, column: str, least: int = 1) -> int:
        """An integer of at least ``least``."""
        value = self.real(column)
        if not (math.isfinite(value) and value == int(value) and value >= least):
            raise self.rows.error(
                f"{column} must be a whole number >= {least}, got {self.text(column)!r:.80}", self.number
            )
        return int(value)


def read_text(rows: Rows) -> str:
    """Text of a file, packed or not."""
    try:
        return read_unpacked(rows.path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise rows.error(f"must be a whole text file ({reason(error)})") from None


def read_csv(rows: Rows, columns: Sequence[str]) -> Iterator[Line]:
    """Lines of a CSV file with a header that holds at least some columns.

    Raises:
        TableError: If a column is missing or there twice, or a row has another number of cells than the header.
    """
    text = read_text(rows).splitlines()
    first = text[0] if text else ""
    lines = csv.reader(text, delimiter=next((mark for mark in ",;\t" if mark in first), ","))
    try:
        header = [name.strip() for name in next(lines, [])]
        missing = [name for name in columns if name not in header]
        if missing:
            raise rows.error(f"the header must have columns {', '.join(columns)}; {', '.join(missing)} missing")
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise rows.error(f"a table has a column once, got twice {', '.join(twice)}")
        for number, cells in enumerate(lines, 1):
            if len(cells) != len(header):
                raise rows.error(f"a row must have {len(header)} cells, got {len(cells)}", number)
            yield Line(rows, number, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise rows.error(f"must be CSV ({error})") from None
