"""Tables of measured runs: their columns, with usual names and units, and one row for each run as text."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stepsight.dataset.base.bounded import read_unpacked, reason
from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError, TableError, shorten
from stepsight.dataset.base.files import preset
from stepsight.experiments.reports.text_table import table

MOST = 1e18  # of any number: larger ones are typing mistakes
SHORTEST_S, LONGEST_S = 1e-6, 1e7  # of an iteration
_OF_TRANSFORMERS = ("family", "layers", "hidden", "seq_len", "micro_batch", "precision")
UNKNOWN = ("", "nan", "na", "none?")
_DEGREES = frozenset(("tp", "pp", "cp", "ep", "dp", "zero_stage"))
_CELLS = [
    ([(name, re.compile(words, re.IGNORECASE)) for name, words in told["when"].items()], told["set"])
    for told in preset("published_rows.toml")["cells"]
]
_ASKED_FIRST = ("hardware", "gpus", "iteration_time_s")  # by all that take a row


@dataclass(frozen=True, slots=True)
class Column:
    """A column that is read, a line of ``dataset/presets/run_columns.csv``."""

    name: str  # as stepsight calls it
    needed: bool  # whether a table must have it
    unit: str  # key of ``UNITS`` that its name stands for; empty: a number or a text without one
    example: str  # A cell of the template
    others: tuple[str, ...]  # names that others give it; with a unit at their end where the column has one
    meaning: str  # for people


# How many of the column's own unit one of another is, by kind of unit.
UNITS: dict[str, dict[str, float]] = {
    "s": {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0},
    "gb": {"gb": 1.0, "gib": 1.073741824, "mb": 1e-3, "mib": 1.048576e-3, "bytes": 1e-9},
}

_UNIT = re.compile(r"[ _]*(?:\(([a-z]+)\)|\[([a-z]+)\])$")


@cached(1)
def columns() -> tuple[Column, ...]:
    """All columns, in the order of the template."""
    rows = ((row, row["needed"] == "yes", tuple(row["others"].split())) for row in preset("run_columns.csv"))
    return tuple(Column(**{**row, "needed": needed, "others": others}) for row, needed, others in rows)


@cached(1)
def _known_names() -> dict[str, tuple[Column, float]]:
    """Every name of a column, also with a unit at its end, and the factor from that unit to the column's."""
    known: dict[str, tuple[Column, float]] = {}
    for column in columns():
        for name in (column.name, *column.others):
            known.setdefault(name, (column, 1.0))
        for suffix, factor in UNITS.get(column.unit, {}).items():
            for name in (column.name.removesuffix(f"_{column.unit}"), *column.others):
                known.setdefault(f"{name}_{suffix}", (column, factor))
    return known


def read_header(names: Sequence[str]) -> list[tuple[str, float]]:
    """Stepsight's name of each column, and the factor from its unit to stepsight's. A column that is not known keeps
    its name, in lower case, and so does another name of a column that is there itself.
    """
    plain, found = dict.fromkeys(name.strip().lower() for name in names), list[tuple[str, float]]()
    for written in names:
        lower = written.strip().lower()
        stated = _UNIT.search(lower)
        unit = next(filter(None, stated.groups()), "") if stated else ""
        bare = re.sub(r"[ -]+", "_", _UNIT.sub("", lower).strip())
        column, factor = _known_names().get(lower) or _known_names().get(bare) or (None, 1.0)
        units = UNITS.get(column.unit, {}) if column else {}
        if unit and units and column and bare in (column.name, *column.others):
            if unit not in units:
                raise TableError(f"the unit of {written.strip()!r:.80} must be one of {', '.join(units)}")
            factor = units[unit]
        own = column.name if column else lower
        found.append((lower, 1.0) if own in plain and own != lower else (own, factor))
    for name, count in Counter(name for name, _ in found).most_common(1):
        if count > 1:
            same = [shorten(text.strip()) for text, (other, _) in zip(names, found, strict=True) if other == name]
            raise TableError(f"a table has a column once, got twice {shorten(name)} ({', '.join(same[:3])})")
    return found


def template() -> str:
    """A table with one made-up run, to be filled in."""
    filled = [column for column in columns() if column.example]
    header, row = (",".join(getattr(column, key) for column in filled) for key in ("name", "example"))
    return f"{header}\n{row}"


def explanation() -> str:
    """Every column, for the terminal."""
    rows = [[c.name, "yes" * c.needed, c.meaning, ", ".join(c.others)] for c in columns()]
    units = "; ".join(f"{', '.join(units)} for {kind}" for kind, units in UNITS.items())
    legend = f"a unit may stand at the end of a name, as step_time_ms, or behind it, as step_time (ms): {units}"
    return f"{table(['column', 'needed', 'meaning', 'also called'], rows)}\n{legend}"


class RowError(JobError):
    """A row that cannot be expressed as a job; the message is a reason that rows share."""


@dataclass(frozen=True)
class Row:
    """One measured run."""

    cells: Mapping[str, str]  # text by column; an empty or absent cell is unknown
    wrong: str = ""  # why none of its cells can be read
    unread: tuple[str, ...] = ()  # the table's columns that no row is read from

    def __post_init__(self) -> None:
        """Fill in cells that the source of its table states elsewhere (``published_rows.toml``)."""
        named = {**self.cells, "plain_name": plain_name(self)}
        for when, stated in _CELLS:
            if all(words.search(named.get(name) or "") for name, words in when):
                object.__setattr__(self, "cells", {**self.cells, **stated})
                named = {**self.cells, "plain_name": plain_name(self)}

    def text(self, key: str) -> str:
        """A cell, or an empty string if it is unknown."""
        if self.wrong and key in _ASKED_FIRST:
            raise RowError(self.wrong)
        value = (self.cells.get(key) or "").strip()
        return "" if value.lower() in UNKNOWN else value

    def real(self, key: str, rule: str = "a number") -> float | None:
        """A number, or None if it is unknown; ``rule``: what the cell must be."""
        text = self.text(key)
        return number_in(text, key, rule) if text else None

    def whole(self, key: str) -> int | None:
        """A whole number, or None if it is unknown."""
        value = self.real(key, "a whole number")
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
        words = {"": None, **dict.fromkeys(("true", "yes", "1", "1.0"), True)}
        words |= dict.fromkeys(("false", "no", "0", "0.0"), False)
        if (value := self.text(key).lower()) not in words:
            raise RowError(f"{key} must be yes or no, got {value!r:.40}")
        return words[value]

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
        return self.text("framework")

    @cached_property
    def gpus(self) -> int:
        return self.known("gpus")

    @property
    def measured_s(self) -> float:
        """Iteration time in seconds."""
        value, rate = self.real("iteration_time_s"), self.real("tokens_s_device")
        if value is None and rate:
            value = self.known("global_batch") * self.known("seq_len") / (rate * self.gpus)
        if value is None:
            raise RowError("iteration_time_s is unknown")
        if not SHORTEST_S <= value <= LONGEST_S:
            raise RowError(f"iteration_time_s must lie within {SHORTEST_S:g} and {LONGEST_S:g}, got {value:g}")
        return value

    @property
    def suspect(self) -> bool:
        """Whether the collector of the row doubts it."""
        return "SUSPECT" in self.text("notes")

    @property
    def weak(self) -> bool:
        """Whether its grade says that more than one field was guessed."""
        return self.text("quality").upper() == "C"


def number_in(text: str, name: str, rule: str = "a number") -> float:
    """A number from a cell or a part of one; ``rule``: what the cell must be."""
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan  # float reads 1_0, too
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise RowError(f"{name} must be {rule}, got {text!r:.40}")
    if abs(value) > MOST:
        raise RowError(f"{name} must lie within +-{MOST:g}, got {text!r:.40}")
    return value


def read_runs_table(path: Path) -> list[Row]:
    """Rows of a ``.csv`` or ``.csv.gz`` file with the needed columns and as many of the others as are known. A row
    without a ``row_id`` has the number of its line; a column's name may be written in capitals.
    """
    rows = list[Row]()
    try:
        reader = csv.DictReader(io.StringIO(read_unpacked(path).decode("utf-8-sig"), newline=""))
        found = read_header(written := reader.fieldnames or ())
        if not found:
            raise TableError("a table of runs has a line of column names and rows, but the file is empty")
        reader.fieldnames = names = [name for name, _ in found]
        known = {column.name for column in columns()} | {"row_id", "iter_time_derivation"}
        known |= {name for when, _ in _CELLS for name, _ in when}
        unread = tuple(name.strip() for name, (own, _) in zip(written, found, strict=True) if own not in known)
        for cells in reader:
            if None in cells or None in cells.values():
                own = {"row_id": str(reader.line_num), "source": cells.get("source") or ""}
                rows.append(Row(own, "it has more or fewer cells than columns"))
                continue
            for name, factor in found:
                if factor != 1.0 and cells[name].strip():
                    with suppress(ValueError):  # other text stays as it is, and its reader refuses it
                        cells[name] = repr(float(cells[name]) * factor)
            numbered = cells if (cells.get("row_id") or "").strip() else {**cells, "row_id": str(reader.line_num)}
            rows.append(Row(numbered, unread=unread))
        _check_columns({*names}.union(*(row.cells for row in rows)))
    except TableError as error:
        raise TableError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"cannot read runs from {path}: {reason(error)}") from None
    return rows


def _check_columns(there: Collection[str]) -> None:
    needed = [column.name for column in columns() if column.needed]
    if "tables" in there:  # recommendation models have no sizes of transformers
        needed = [name for name in needed if name not in _OF_TRANSFORMERS]
    instead = {"iteration_time_s"} if "tokens_s_device" in there else set[str]()
    if missing := [name for name in needed if name not in instead.union(there)]:
        rule = f"a table of runs has columns {', '.join(needed)}; it lacks {', '.join(missing)}"
        rule += "" if _DEGREES.intersection(there) else f", and states no sharding ({', '.join(sorted(_DEGREES))})"
        raise TableError(f"{rule}: `stepsight evaluate --explain-columns` says what else they may be called")


def plain_name(row: Row) -> str:
    return re.sub("[^a-z0-9]", "", (row.cells.get("model_name") or "").lower())


DEGREES = ("tp", "pp", "vp", "ep", "micro_batch")
FIRST = "25.11"  # release: before it, runs were with all-to-alls and limited capacity


@cached(1)
def recipes() -> tuple[dict[str, str], ...]:
    """Lines of the table of Megatron-Bridge, oldest first.

    Its columns: the ``release`` in which a recipe appeared; the beginning of a ``model``'s name without marks; a word
    of the ``device``; ``precisions``: ``bf16``, ``cs`` and ``sc`` (8 bits), ``mx`` (MXFP8) or ``nvfp4``; ``DEGREES``;
    the ``dispatcher``; ``overlap``: whether all-to-alls run beside another micro-batch; ``graphs``: ``none``,
    ``router``, ``parts`` (attention as well) or ``whole``; modules that it has to ``recompute``.
    """
    return tuple(sorted(preset("megatron_bridge.csv"), key=lambda line: line["release"]))


def recipe_habits(recipe: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a framework's profile that a recipe sets."""
    graphs, dispatcher, modules = recipe["graphs"], recipe["dispatcher"], tuple(recipe["recompute"].split())
    # the host no more than launches one graph, or one of the router where HybridEP sorts on the device
    free = graphs == "whole" or (graphs == "parts" and dispatcher == "hybridep")
    return {
        "dispatcher": dispatcher,
        "overlap_ep": recipe["overlap"] == "yes",
        "fused_experts": graphs == "whole",
        **({"dispatch_calls": 0.0} if free else {}),
        **({"op_calls": 1.0} if graphs == "whole" else {}),
        **({"recompute": "selective", "recompute_modules": modules} if modules else {}),
    }


def find_recipe(row: Row) -> dict[str, str] | None:
    """The recipe that a row is a run of: the one whose degrees are the row's, in its release or before."""
    container = re.search(r"\b(\d\d\.\d\d(?:\.\d\d)?)\b", row.software)
    release, model = container[1] if container else "", plain_name(row)
    kind = next((word for word in ("nvfp4", "bf16", "mx") if word in row.text("precision").lower()), "cs")
    device = re.sub("[^a-z0-9].*", "", row.text("hardware").lower())
    degrees = [str(row.whole(key) or 1) for key in DEGREES]
    alike = [line for line in recipes() if model.startswith(line["model"]) and device == line["device"]]
    same = [line for line in alike if kind in line["precisions"].split()] or alike
    if not same or release < FIRST:
        return None

    def fit(line: Mapping[str, str]) -> tuple[int, bool]:
        return sum(line[key] == own for key, own in zip(DEGREES, degrees, strict=True)), line["release"] <= release

    best = max(map(fit, same))
    newest_last = [line for line in same if fit(line) == best]
    return newest_last[-1] if best[1] else newest_last[0]
