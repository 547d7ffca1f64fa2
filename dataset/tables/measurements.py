"""Measurements: times of ops and collectives by signature; the rows of one file from which readers make them."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.base.bounded import parsing, read_parquet, read_unpacked, reason
from stepsight.dataset.base.errors import MALFORMED, TableError, repeated, shorten
from stepsight.dataset.base.files import new_file
from stepsight.dataset.hardware.hardware import HARDWARE, canonical_hardware, find_hardware, reported_devices
from stepsight.dataset.kinds.op import MOST_SIZE, Collective, Op

if TYPE_CHECKING:
    import pyarrow as pa


_TEXTS = ("device", "fabric", "software", "source")
_META = b"stepsight.measurements"
_SIGNATURE = ("kind", "dims", "dtype", "num_bytes", "group_size", "ranks_per_node")  # "" or 0 where a work has none
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6  # of one call: others are mistakes of typing or of units


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that was read."""

    licence: str  # SPDX identifier, or "unknown"
    digest: str  # ``files.digest_files`` of it


@dataclass(frozen=True, eq=False)
class Measurements:
    """A table of measurements, one row each."""

    works: tuple[Op | Collective, ...]  # what was measured, ``[rows]``; equal signatures may come many times
    seconds: np.ndarray  # of one call, float64 ``[rows]``
    device: tuple[str, ...]  # hardware preset, or a name of that style; "" where the source names none
    fabric: tuple[str, ...]  # fabric preset of a collective, or a name of that style; "" for an op
    software: tuple[str, ...]  # framework or library with its version, and the kernel where the source tells it
    source: tuple[str, ...]  # key of ``files``: format and path within what was read
    files: Mapping[str, SourceFile]  # that the rows come from
    skipped: Mapping[str, int] = field(default_factory=dict)  # rows of those files that are not here, by reason

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("works", "seconds", *_TEXTS)}
        assert len(set(lengths.values())) == 1, lengths
        if unknown := ", ".join(map(repr, set(self.source) - set(self.files))):
            raise TableError(f"the source of every row must be one of the files, got {unknown:.200}")
        if not all(isinstance(text, str) for name in _TEXTS for text in set(getattr(self, name))):
            raise TableError(f"{', '.join(_TEXTS)} of a measurement must be texts")
        if not ((self.seconds >= LEAST_SECONDS) & (self.seconds <= MOST_SECONDS)).all():
            raise TableError(f"seconds of a measurement must be from {LEAST_SECONDS:g} to {MOST_SECONDS:g}")

    def __len__(self) -> int:
        return len(self.works)

    def take(self, rows: np.ndarray | Sequence[int]) -> Measurements:
        """Some rows, by a boolean mask or by index; what was skipped is left behind."""
        rows = np.asarray(rows)
        index = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        works, device, fabric, software, source = (
            tuple(getattr(self, name)[i] for i in index) for name in ("works", *_TEXTS)
        )
        files = {name: self.files[name] for name in dict.fromkeys(source)}
        return Measurements(works, self.seconds[index], device, fabric, software, source, files)

    def where(
        self, kind: str | Collection[str] | None = None, device: str | Collection[str] | None = None
    ) -> Measurements:
        """Rows of one or several kinds (of ops or of collectives) and devices."""
        pairs = (kind, [work.kind for work in self.works]), (device, self.device)
        masks = [np.isin(names, [*([of] if isinstance(of, str) else of)]) for of, names in pairs if of is not None]
        return self.take(np.logical_and.reduce([np.ones(len(self), bool), *masks]))

    @staticmethod
    def concat(tables: Iterable[Measurements]) -> Measurements:
        """Join the rows of some tables, in order."""
        tables = list(tables)
        files = {name: file for table in tables for name, file in table.files.items()}
        skipped: Counter[str] = Counter()
        for table in tables:
            skipped.update(table.skipped)
        works, device, fabric, software, source = (
            tuple(value for table in tables for value in getattr(table, name)) for name in ("works", *_TEXTS)
        )
        seconds = np.concatenate([np.empty(0), *(table.seconds for table in tables)])
        return Measurements(works, seconds, device, fabric, software, source, files, dict(skipped))

    def to_parquet(self, path: Path) -> None:
        """Write the table whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        signatures: list[tuple[Any, ...]] = []
        for work in self.works:
            sizes = (0, 0, 0) if isinstance(work, Op) else (work.num_bytes, work.group_size, work.ranks_per_node)
            signatures.append((work.kind, getattr(work, "dims", ()), getattr(work, "dtype", ""), *sizes))
        columns = [list(column) for column in zip(*signatures, strict=True)] or [[]] * 6
        texts = [list(getattr(self, name)) for name in _TEXTS]
        table = pa.table([*columns, self.seconds, *texts], schema=_schema())
        meta = {"files": {name: asdict(file) for name, file in self.files.items()}, "skipped": dict(self.skipped)}
        with new_file(path) as temporary:
            pq.write_table(table.replace_schema_metadata({_META: json.dumps(meta).encode()}), temporary)

    @staticmethod
    def from_parquet(path: Path) -> Measurements:
        """Read what ``to_parquet`` wrote."""
        with parsing(f"cannot read table {path}", TableError):
            table = read_parquet(path)
        meta = (table.schema.metadata or {}).get(_META)
        if meta is None or table.schema.remove_metadata() != _schema():
            rule = f"a table of measurements must have columns {', '.join(_schema().names)}"
            got = f"{', '.join(table.column_names)} in {path}"
            raise TableError(f"{rule} and what stepsight wrote beside them, got {got}")
        shared: dict[tuple[Any, ...], Op | Collective] = {}
        works: list[Op | Collective] = []
        with parsing(str(path), TableError):
            *signatures, seconds, device, fabric, software, source = (tuple(each.to_pylist()) for each in table.columns)
            for kind, dims, dtype, *sizes in zip(*signatures, strict=True):  # equal rows share one object
                key = (kind, *dims, dtype, *sizes)
                if key not in shared:
                    shared[key] = Collective(kind, *sizes) if sizes[1] else Op(kind, tuple(dims), dtype)
                works.append(shared[key])
            said = json.loads(meta)
            files = {name: SourceFile(str(of["licence"]), str(of["digest"])) for name, of in said["files"].items()}
            skipped = {str(why): int(count) for why, count in said["skipped"].items()}
            times = np.array(seconds, float)
            return Measurements(tuple(works), times, device, fabric, software, source, files, skipped)


def _schema() -> pa.Schema:
    import pyarrow as pa

    kinds = pa.string(), pa.list_(pa.int64()), pa.string(), pa.int64(), pa.int64(), pa.int64()
    columns = [*zip(_SIGNATURE, kinds, strict=True), ("seconds", pa.float64())]
    return pa.schema([*columns, *((name, pa.string()) for name in _TEXTS)])


def summary(table: Measurements) -> dict[str, Any]:
    """Counts by kind, device, fabric, software and file; times in microseconds."""
    kinds = np.array([work.kind for work in table.works], str)
    microseconds = table.seconds * 1e6
    rows_of, skipped = Counter(table.source), dict(sorted(table.skipped.items()))
    files = {name: {"rows": rows_of[name], **asdict(table.files[name])} for name in sorted(table.files)}
    by_kind = [(str(kind), microseconds[kinds == kind]) for kind in np.unique(kinds)]
    return {
        "rows": len(table),
        "kinds": {k: {"rows": len(us), "min_us": float(us.min()), "max_us": float(us.max())} for k, us in by_kind},
        **{f"{name}s": dict(sorted(Counter(getattr(table, name)).items())) for name in ("device", "fabric")},
        "software": dict(sorted(Counter(table.software).items())),
        "files": files,
        "skipped": skipped,
        "rows_used": len(table),
        "rows_left_out": skipped,
    }


def summary_text(told: dict[str, Any]) -> str:
    """The summary as text for people."""
    lines = [f"{told['rows']} measurements from {len(told['files'])} files", ""]
    lines += [f"{'kind':<24}{'rows':>9}{'least':>17}{'most':>17}"]
    for kind, of in told["kinds"].items():
        lines.append(f"{kind:<24}{of['rows']:>9}{of['min_us']:>14.2f} us{of['max_us']:>14.2f} us")
    titles = {"devices": "device", "fabrics": "fabric", "software": "software", "skipped": "rows skipped, and why"}
    for key, title in titles.items():
        if named := {name: count for name, count in told[key].items() if name}:
            lines += ["", title, *(f"{count:>9}  {name}" for name, count in named.items())]
    return "\n".join(lines)


def device_name(told: str) -> str:
    """Preset of a device as drivers name it; where none is known, its name in lower case with dashes."""
    told = told.strip()
    return reported_devices().get(told) or re.sub(r"[^a-z0-9]+", "-", told.removeprefix("NVIDIA ").lower()).strip("-")


def is_other_device(told: str, name: str) -> bool:
    """Whether the device that a trace names (``cpu``, as drivers name it, or "" for one without a name) cannot be a
    hardware: one of them is a CPU, or the chips differ.  The memory may differ: it changes no duration.
    """
    name = canonical_hardware(name)
    facts, named = find_hardware(name), find_hardware(device_name(told)) if told else None
    differs = named is not None and name in HARDWARE and chip_name(name) != chip_name(named.name)
    return facts is not None and (differs or (facts.kind == "cpu") != (told == "cpu"))


def chip_name(name: str) -> str:
    """A preset's name without its memory."""
    return re.sub(r"-\d+gb$", "", name)


NO_TIME = "no time"
COPY = "equal in all to another row"


class Rows:
    """The rows and facts that a reader finds in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path  # for errors, and for what only its place tells
        self.skipped: Counter[str] = Counter()  # rows left out, by reason
        self._broken: dict[str, tuple[int, str]] = {}  # by rule: the first row that breaks it, and the whole message
        self._shared: dict[Op | Collective, Op | Collective] = {}
        self._rows: dict[tuple[Op | Collective, float, str, str, str, str], None] = {}  # each once, in order

    def add(
        self, work: Op | Collective | str, seconds: float, *, device: str, software: str, fabric: str = "",
        part: str = "",
    ) -> None:  # fmt: skip
        """A measurement, or why a row is none; one without a time, or equal to another of its part, is skipped."""
        if isinstance(work, str):
            return self.skip(work)
        if not (math.isfinite(seconds) and seconds > 0):
            return self.skip(NO_TIME)
        sizes = work.dims if isinstance(work, Op) else (work.num_bytes, work.group_size)
        if max(sizes) > MOST_SIZE or not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            limits = f"sizes must be <= {MOST_SIZE} and a time from {LEAST_SECONDS:g} to {MOST_SECONDS:g} s"
            raise self.error(f"{limits}, got {work!s:.80}, {seconds} s")
        work = self._shared.setdefault(work, work)
        row = (work, seconds, device, fabric, software, part)
        if row in self._rows:
            return self.skip(COPY)
        self._rows[row] = None
        return None

    def __len__(self) -> int:
        return len(self._rows)

    def skip(self, reason: str, count: int = 1) -> None:
        self.skipped[reason] += count

    @contextmanager
    def row(self, number: int) -> Iterator[None]:
        """Read one row: one that breaks a rule is left out, and counted by the rule."""
        try:
            yield
        except MALFORMED as error:
            plain = isinstance(error, ValueError | RecursionError)
            text = reason(error) if plain else f"{type(error).__name__}: {error}"
            text = text.removeprefix(str(self.path)).removeprefix(f", row {number}").removeprefix(": ")
            rule = text.split(", got ")[0]
            self._broken.setdefault(rule, (number, text))
            self.skip(rule)

    def error(self, rule: str, row: int | None = None) -> TableError:
        """An error that names the file and the row."""
        return TableError(f"{self.path}{'' if row is None else f', row {row}'}: {rule}")

    def table(self, source: str, file: SourceFile) -> Measurements:
        """What was found."""
        if self._broken and not self._rows:
            number, text = next(iter(self._broken.values()))
            raise self.error(text, number)
        said = {
            rule: f"{shorten(text, 200)} (the first in row {number})" for rule, (number, text) in self._broken.items()
        }
        works, seconds, device, fabric, software, _ = zip(*self._rows, strict=True) if self._rows else ((),) * 6
        skipped = {said.get(reason, reason): count for reason, count in self.skipped.items()}
        sources, times = (source,) * len(works), np.array(seconds, float)
        return Measurements(works, times, device, fabric, software, sources, {source: file}, skipped)


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a CSV file."""

    rows: Rows  # where it belongs to
    number: int  # from 1, the header not counted
    cells: dict[str, str]  # text by column

    def text(self, column: str) -> str:
        """A cell without spaces around it; an error where the table has no such column."""
        if column not in self.cells:
            raise self.rows.error(f"the row needs column {column}", self.number)
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
            rule = f"{column} must be a whole number >= {least}, got {self.text(column)!r:.80}"
            raise self.rows.error(rule, self.number)
        return int(value)


def read_text(rows: Rows) -> str:
    """Text of a file, packed or not."""
    with parsing(f"{rows.path}: must be a whole text file", TableError):
        return read_unpacked(rows.path).decode("utf-8-sig")


def read_csv(rows: Rows, columns: Sequence[str]) -> Iterator[Line]:
    """Lines of a CSV file, as long as its header, which must hold some columns, and each once."""
    text = read_text(rows).splitlines()
    first = text[0] if text else ""
    lines = csv.reader(text, delimiter=next((mark for mark in ",;\t" if mark in first), ","))
    try:
        header = [name.strip() for name in next(lines, [])]
        if missing := [name for name in columns if name not in header]:
            raise rows.error(f"the header must have columns {', '.join(columns)}; {', '.join(missing)} missing")
        if twice := repeated(header):
            raise rows.error(f"a table has a column once, got twice {twice}")
        for number, cells in enumerate(lines, 1):
            if len(cells) == len(header):
                yield Line(rows, number, dict(zip(header, cells, strict=True)))
            else:
                with rows.row(number):
                    raise ValueError(f"a row must have {len(header)} cells, got {len(cells)}")
    except csv.Error as error:
        raise rows.error(f"must be CSV ({error})") from None
