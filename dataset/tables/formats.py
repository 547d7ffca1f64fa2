"""Formats of published tables, and how a file or a folder of one is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepsight.dataset.base.bounded import read_file
from stepsight.dataset.base.errors import StepsightError, TableError
from stepsight.dataset.base.files import check_output_file, digest_files
from stepsight.dataset.base.registry import Registry, check_takes, instance_of
from stepsight.dataset.tables import aiconfigurator, nccl_tests, own_csv, published
from stepsight.dataset.tables.measurements import Measurements, SourceFile
from stepsight.dataset.tables.rows import Rows


@dataclass(frozen=True, slots=True)
class Format:
    """A format of tables of measurements; a user adds one with ``FORMATS.register``.

    Attributes:
        read: Reads a file into rows.
        names: Pattern of the paths, within a folder, of the files that are read.
        licence: SPDX identifier under which it was published; "unknown" for what users measured.
        runs: Pattern of the paths of files that hold one run each: of a folder, one that cannot be read is left out.

    Raises:
        TableError: On construction, if ``read`` does not take the rows, or ``names`` is no regular expression.
    """

    read: Callable[[Rows], None]
    names: str
    licence: str
    runs: str = r"(?!)"

    def __post_init__(self) -> None:
        check_takes("read of a table format", self.read, ("rows",), TableError)
        for name, pattern in (("names", self.names), ("runs", self.runs)):
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise TableError(
                    f"{name} of a table format must be a regular expression, got {pattern!r:.80}: {error}"
                ) from None
        if not isinstance(self.licence, str) or not self.licence:
            raise TableError(f'licence of a table format must be a text such as "unknown", got {self.licence!r:.80}')


FORMATS: Registry[Format] = Registry(
    "table format",
    {
        "aiconfigurator": Format(aiconfigurator.read, r"_perf\.parquet$", "Apache-2.0"),
        "neusight": Format(published.read_neusight, r"^(?!.*(label|summary)/).*\.csv(\.gz)?$", "MIT"),
        "vidur": Format(published.read_vidur, r"(^|/)(mlp|all_reduce|send_recv)\.csv(\.gz)?$", "MIT"),
        "simumax": Format(published.read_simumax, r"^(?!.*docs/).*\.json(\.gz)?$", "Apache-2.0"),
        "nccl-tests": Format(nccl_tests.read, nccl_tests.FILES, "unknown", nccl_tests.LOGS),
        "vtrain": Format(published.read_vtrain, r"(^|/)AR_GPU\d+_[^/]*LUT$", "MIT"),
        "aicb": Format(published.read_aicb, r"\.csv(\.gz)?$", "Apache-2.0"),
        "csv": Format(own_csv.read, r"\.csv(\.gz)?$", "unknown"),
    },
    group="stepsight.table_readers",
    check=instance_of(Format),
    error=TableError,
)
_LICENCES = {"Apache License": "Apache-2.0", "Permission is hereby granted, free of charge": "MIT"}
_NO_DATA = re.compile(r"(^|/)(LICENSE|NOTICE|README|SOURCE)[^/]*$|\.(md|yaml)$|(^|/)\.")


def read_table(name: str, path: Path) -> Measurements:
    """Measurements of a file, or of all files of a folder that have the format.

    Raises:
        TableError: If there is no such format or path, nothing of the format is there, or a file is malformed.
    """
    path, form = Path(path), FORMATS[name]
    if path.is_file():
        return _read_file(name, path, path.name, path.parent)
    if not path.is_dir():
        raise TableError(f"a table must be a file or a folder, got {path}")
    inside = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    wanted = {place: file for place, file in inside.items() if re.search(form.names, place)}
    if not wanted:
        raise TableError(f"the folder must hold files of format {name}, got none in {path}")
    others = Counter(
        f"a file that is no table of this format ({file.suffix or 'no suffix'})"
        for place, file in inside.items()
        if place not in wanted and not _NO_DATA.search(place)
    )
    tables, broken = [], []
    for place, file in wanted.items():
        try:
            tables.append(_read_file(name, file, place, path))
        except TableError as error:
            if not re.search(form.runs, place):
                raise
            broken.append(error)
    if not tables:
        raise broken[0]
    if broken:
        others[f"a log that cannot be read, such as {broken[0]!s:.200}"] = len(broken)
    found = Measurements.concat(tables)
    return found if not others else found.with_skipped(others)


def check_table_output(name: str, path: Path, out: Path) -> None:
    """What is read of format ``name`` from ``path`` may be written to ``out``; to be asked before long work.

    Raises:
        StepsightError: If not: nothing is written over what is read.
    """
    if out.suffix != ".parquet":
        raise TableError(f"measurements are written to a .parquet file, got {out}")
    check_output_file(out)
    own, new = path.resolve(), out.resolve()
    inside = own in new.parents and name in FORMATS and re.search(FORMATS[name].names, new.relative_to(own).as_posix())
    if own == new or (inside and new.exists()):
        raise TableError(f"measurements are not written over what they are read from, got {out} for those of {path}")


def _read_file(name: str, path: Path, place: str, root: Path) -> Measurements:
    rows = Rows(path)
    try:
        FORMATS[name].read(rows)
    except StepsightError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise rows.error(f"must be a table of format {name}, got {type(error).__name__}: {error!s:.200}") from None
    licence = _licence_beside(path, root) or FORMATS[name].licence
    return rows.table(f"{name}/{place}", SourceFile(licence, digest_files([path])))


def _licence_beside(path: Path, root: Path) -> str:
    """The licence of a file by the nearest LICENSE up to the folder that was given, or ""."""
    for folder in path.parents:
        text = folder / "LICENSE"
        if text.is_file():
            head = read_file(text).decode("utf-8", "replace")
            return next((name for phrase, name in _LICENCES.items() if phrase in head), "")
        if folder == root:
            break
    return ""
