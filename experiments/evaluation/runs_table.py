"""Tables of measured runs: one row per run with its configuration, as text."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stepsight.dataset.base.bounded import read_unpacked, reason
from stepsight.dataset.base.errors import JobError, TableError
from stepsight.experiments.evaluation.run_columns import read_header

MOST = 1e18  # of any number: larger ones are typing mistakes
SHORTEST_S, LONGEST_S = 1e-6, 1e7  # of an iteration
NEEDED = (
    "source", "hardware", "gpus", "framework", "family", "layers", "hidden", "seq_len", "micro_batch", "global_batch",
    "precision", "iteration_time_s",
)  # fmt: skip
UNKNOWN = ("", "nan", "na", "none?")


class RowError(JobError):
    """A row that cannot be expressed as a job; the message is a reason that rows share."""


@dataclass(frozen=True)
class Row:
    """One measured run.

    Attributes:
        cells: Text by column; an empty or absent cell is unknown.
    """

    cells: Mapping[str, str]

    def text(self, key: str) -> str:
        """A cell, or an empty string if it is unknown."""
        value = (self.cells.get(key) or "").strip()
        return "" if value.lower() in UNKNOWN else value

    def real(self, key: str) -> float | None:
        """A number, or None if it is unknown.

        Raises:
            RowError: If it is no number, or beyond ``MOST``.
        """
        text = self.text(key)
        return number_in(text, key) if text else None

    def whole(self, key: str) -> int | None:
        """A whole number, or None if it is unknown."""
        value = self.real(key)
        if value is not None and value != round(value):
            raise RowError(f"{key} must be a whole number, got {value}")
        return None if value is None else int(value)

    def known(self, key: str) -> int:
        """A whole number that must be there."""
        value = self.whole(key)
        if value is None:
            raise RowError(f"{key} is unknown")
        return value

    def flag(self, key: str) -> bool | None:
        """Yes or no, or None if it is unknown."""
        value = self.text(key).lower()
        if value in ("", "true", "yes", "false", "no"):
            return value in ("true", "yes") if value else None
        return (self.real(key) or 0.0) > 0

    @property
    def row_id(self) -> int | str:
        """Id of the row as in the table; a number if it is one."""
        text = self.text("row_id")
        return int(float(text)) if re.fullmatch(r"[0-9]{1,15}(\.0*)?", text) else text

    @property
    def source(self) -> str:
        return self.text("source") or "unnamed"

    @property
    def software(self) -> str:
        """The framework, in the words of the source."""
        return self.text("framework")

    @cached_property
    def gpus(self) -> int:
        return self.known("gpus")

    @property
    def measured_s(self) -> float:
        """Iteration time in seconds."""
        value = self.real("iteration_time_s")
        if value is None:
            raise RowError("iteration_time_s is unknown")
        if not SHORTEST_S <= value <= LONGEST_S:
            raise RowError(f"iteration_time_s must lie within {SHORTEST_S:g} and {LONGEST_S:g}, got {value:g}")
        return value

    @property
    def notes(self) -> str:
        return self.text("notes")

    @property
    def suspect(self) -> bool:
        """Whether the collector of the row doubts it."""
        return "SUSPECT" in self.notes

    @property
    def weak(self) -> bool:
        """Whether its grade says that more than one field was guessed."""
        return self.text("quality").upper() == "C"


def number_in(text: str, name: str) -> float:
    """A number from a cell or a part of one.

    Raises:
        RowError: If it is none, or beyond ``MOST``.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= MOST:
        raise RowError(f"{name} must be a number, got {text!r:.40}")
    return value


def read_runs_table(path: Path) -> list[Row]:
    """Rows of a ``.csv`` or ``.csv.gz`` file with the columns ``NEEDED`` and as many of the others as are known.

    A row without a ``row_id`` has the number of its line; a column's name may be written in capitals.

    Raises:
        TableError: If it is no such table; the message says which file and why.
    """
    try:
        return list(_rows(path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"cannot read runs from {path}: {reason(error)}") from None


def _rows(path: Path) -> Iterator[Row]:
    with io.StringIO(read_unpacked(path).decode("utf-8-sig"), newline="") as stream:
        reader = csv.DictReader(stream)
        try:
            found = read_header(reader.fieldnames or ())
        except TableError as error:
            raise TableError(f"{path}: {error}") from None
        reader.fieldnames = names = [name for name, _ in found]
        factors = {name: factor for name, factor in found if factor != 1.0}
        missing = [name for name in NEEDED if name not in names]
        if missing:
            raise TableError(
                f"a table of runs has columns {', '.join(NEEDED)}; {path} lacks {', '.join(missing)}: "
                "`stepsight evaluate --explain-columns` says what else they may be called"
            )
        for cells in reader:
            if None in cells or None in cells.values():
                raise TableError(f"{path}, line {reader.line_num}: more or fewer cells than columns")
            for name, factor in factors.items():
                cells[name] = _scaled(cells[name], factor)
            yield Row(cells if (cells.get("row_id") or "").strip() else {**cells, "row_id": str(reader.line_num)})


def _scaled(cell: str, factor: float) -> str:
    """A number in the unit of the column; other text stays as it is, and its reader refuses it."""
    try:
        return repr(float(cell) * factor) if cell.strip() else cell
    except ValueError:
        return cell
