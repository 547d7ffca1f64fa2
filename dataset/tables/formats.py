"""Formats of tables: published ones, a user's own and collections; how a file or a folder of one is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.bounded import parsing, read_file
from stepsight.dataset.base.errors import TableError
from stepsight.dataset.base.files import check_output_file, digest_files, preset
from stepsight.dataset.base.registry import Registry, check_takes, instance_of
from stepsight.dataset.kinds import benchmark_names
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, Collective, Op
from stepsight.dataset.runs.run_folder import read_collection, read_event_file
from stepsight.dataset.runs.run_manifest import read_object
from stepsight.dataset.tables import measurements, nccl_tests, published

_VERSIONS = ("cuda", "nccl", "driver")
_WORDS = preset("table_names.toml")["csv"]
_UNITS: dict[str, float] = _WORDS["units"]
_QUANTITIES = ("time", "latency", "duration")
# Columns that may hold the time, and the seconds of their unit.
TIMES = {**_UNITS, **{f"{what}_{unit}": seconds for what in _QUANTITIES for unit, seconds in _UNITS.items()}}
_NAMES = ("op", "kind", "operation", "kernel")
_SIZES = ("m", "n", "k")


def read_own(rows: measurements.Rows) -> None:
    """A user's own table: CSV with one row for each measurement.

    Columns ``op, dims, dtype, microseconds`` for ops (dims as ``4096x4096x1024``, in the order of the kind's
    sizes), and ``op, num_bytes, group_size, ranks_per_node, microseconds`` for collectives; both may stand in one
    file, what does not apply left empty.  ``device``, ``fabric`` and ``software`` are optional; versions in
    ``cuda``, ``nccl`` and ``driver`` are added to the software's name.  A time may have another unit
    (``milliseconds``, ``time_ns``), a matrix product its sizes in columns ``m, n, k`` (rows, columns of the result,
    what is summed over), and words are those of PyTorch and of benchmarks too: ``gemm``, ``bfloat16``,
    ``alltoall``.
    """
    named, time = "", ""
    for line in measurements.read_csv(rows, ()):
        if line.number == 1 or not named:
            named, time = _own_header(rows, line)
        with rows.row(line.number):
            kind = _kind(line.text(named))
            needs = ("num_bytes", "group_size", "ranks_per_node") if kind in COLLECTIVE_KINDS else ("dims",)
            if kind == "linear" and "dims" not in line.cells:
                needs = _SIZES
            if missing := [name for name in needs if name not in line.cells]:
                raise ValueError(f"{kind} needs columns {', '.join(needs)}; {', '.join(missing)} missing")
            work = _collective(line, kind) if kind in COLLECTIVE_KINDS else _op(line, kind)
            told = {name: line.cells.get(name, "").strip() for name in ("device", "fabric", "software")}
            versions = [f"{name} {text}" for name in _VERSIONS if (text := line.cells.get(name, "").strip())]
            told["software"] = " ".join(filter(None, [told["software"], *versions]))
            rows.add(work, line.real(time) * TIMES[time], **told)
    if not len(rows) and rows.skipped.keys() <= {measurements.NO_TIME}:
        raise rows.error(f"a table must hold a row with a time, got none ({rows.skipped.total()} rows without)")


def _own_header(rows: measurements.Rows, line: measurements.Line) -> tuple[str, str]:
    """Columns of a user's own table that name the op and that hold the time."""
    named = next((name for name in _NAMES if name in line.cells), "")
    if not named:
        add = ": add a column op (gemm for products of m, n, k)" if set(_SIZES) <= line.cells.keys() else ""
        raise rows.error(f"the header must have a column op, which names the op or collective{add}")
    times = [name for name in TIMES if name in line.cells]
    if len(times) != 1:
        rule = f"one column with the time ({', '.join(_UNITS)} or time_us, latency_ms ...)"
        found = f"{' and '.join(times) or 'none'}{': rename or remove the others' if times else ''}"
        raise rows.error(f"the header must have {rule}, got {found}")
    return named, times[0]


def _kind(word: str) -> str:
    """The kind of an op or a collective, by its own name or by what benchmarks call it."""
    plain = word.lower().replace("-", "_").removeprefix("aten::")
    names = {**benchmark_names(), **{kind.replace("_", ""): kind for kind in COLLECTIVE_KINDS}}
    return "linear" if plain in _WORDS["products"] else names.get(plain.replace("_", ""), names.get(plain, word))


def _op(line: measurements.Line, kind: str) -> Op:
    sizes = line.text("dims") if "dims" in line.cells else "x".join(line.text(name) for name in _SIZES)
    numbers = re.split(r"[x*,;\s\u00d7]+", sizes.lower().strip("()[] "))
    if not all(re.fullmatch(r"\d+", number) for number in numbers):
        raise ValueError(f"dims must be whole numbers joined by x, got {sizes!r:.80}")
    told = line.cells.get("dtype", "").strip().lower().removeprefix("torch.") or "bf16"
    work = Op(kind, tuple(map(int, numbers)), _WORDS["dtypes"].get(told, told))
    record = work.record
    if any(size < 1 for name, size in zip(record.dim_names, work.dims, strict=True) if name not in record.flags):
        raise ValueError(f"dims must be >= 1, got {sizes}")
    return work


def _collective(line: measurements.Line, kind: str) -> Collective:
    size, ranks, per_node = line.whole("num_bytes"), line.whole("group_size", 2), line.whole("ranks_per_node")
    if ranks % per_node:
        raise ValueError(f"ranks_per_node must divide group_size, got {ranks} % {per_node}")
    return Collective(kind, size, ranks, per_node)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of tables of measurements; a user adds one with ``FORMATS.register``."""

    read: Callable[[measurements.Rows], None]  # reads a file into rows
    names: str  # pattern of the paths, within a folder, of the files that are read
    licence: str  # SPDX identifier under which it was published; "unknown" for what users measured

    def __post_init__(self) -> None:
        check_takes("read of a table format", self.read, ("rows",), TableError)
        try:
            re.compile(self.names)
        except (re.error, TypeError) as error:
            got = f"{self.names!r:.80}: {error}"
            raise TableError(f"names of a table format must be a regular expression, got {got}") from None
        if not isinstance(self.licence, str) or not self.licence:
            raise TableError(f'licence of a table format must be a text such as "unknown", got {self.licence!r:.80}')


FORMATS: Registry[Format] = Registry(
    "table format",
    {
        "aiconfigurator": Format(published.read_aiconfigurator, r"_perf\.parquet$", "Apache-2.0"),
        "neusight": Format(published.read_neusight, r"^(?!.*(label|summary)/).*\.csv(\.gz)?$", "MIT"),
        "vidur": Format(published.read_vidur, r"(^|/)(mlp|all_reduce|send_recv)\.csv(\.gz)?$", "MIT"),
        "simumax": Format(published.read_simumax, r"^(?!.*docs/).*\.json(\.gz)?$", "Apache-2.0"),
        "nccl-tests": Format(nccl_tests.read, nccl_tests.FILES, "unknown"),
        "vtrain": Format(published.read_vtrain, r"(^|/)AR_GPU\d+_[^/]*LUT$", "MIT"),
        "aicb": Format(published.read_aicb, r"\.csv(\.gz)?$", "Apache-2.0"),
        "csv": Format(read_own, r"\.csv(\.gz)?$", "unknown"),
    },
    group="stepsight.table_readers",
    check=instance_of(Format),
    error=TableError,
)
_LICENCES = {"Apache License": "Apache-2.0", "Permission is hereby granted, free of charge": "MIT"}
_NO_DATA = re.compile(r"(^|/)(LICENSE|NOTICE|README|SOURCE)[^/]*$|\.(md|yaml)$|(^|/)\.")


def read_table(name: str, path: Path) -> measurements.Measurements:
    """Measurements of a file, or of all files of a folder with the format; those that cannot be read are counted."""
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
            broken.append(error)
    if not tables:
        raise broken[0]
    if broken:
        others[f"a file that cannot be read, such as {broken[0]!s:.200}"] = len(broken)
    found = measurements.Measurements.concat(tables)
    return replace(found, skipped=dict(Counter(found.skipped) + others))


def check_table_output(name: str, path: Path, out: Path) -> None:
    """Check, before long work, that ``out`` can be written and is nothing that format ``name`` reads of ``path``."""
    if out.suffix != ".parquet":
        raise TableError(f"measurements are written to a .parquet file, got {out}")
    check_output_file(out)
    own, new = path.resolve(), out.resolve()
    inside = own in new.parents and name in FORMATS and re.search(FORMATS[name].names, new.relative_to(own).as_posix())
    if own == new or (inside and new.exists()):
        raise TableError(f"measurements are not written over what they are read from, got {out} for those of {path}")


def _read_file(name: str, path: Path, place: str, root: Path) -> measurements.Measurements:
    rows = measurements.Rows(path)
    with parsing(f"{path}: must be a table of format {name}", TableError):
        FORMATS[name].read(rows)
    licence = FORMATS[name].licence  # unless the nearest LICENSE, up to the folder that was given, says another
    above = (*takewhile(lambda folder: folder != root, path.parents), root)
    if nearest := next((folder / "LICENSE" for folder in above if (folder / "LICENSE").is_file()), None):
        head = read_file(nearest).decode("utf-8", "replace")
        licence = next((name for phrase, name in _LICENCES.items() if phrase in head), licence)
    return rows.table(f"{name}/{place}", measurements.SourceFile(licence, digest_files([path])))


def read_collection_table(folder: Path) -> measurements.Measurements:
    """A collection of the harness as a table of the same form as public ones: every event and every traced node.

    One row is one measurement: of a signature alone (source ``events/<name>``), or of a node within a training step
    (source ``runs/<name>/rank<k>/<label>``).  Nodes whose sizes the trace does not record are skipped.
    """
    collection = read_collection(Path(folder))
    rows: list[tuple[Op | Collective, float, str, str, str]] = []
    files: dict[str, measurements.SourceFile] = {}
    skipped: Counter[str] = Counter()
    for path in collection.events:
        file, tree, source = read_event_file(path), read_object(path), f"events/{path.stem}"
        files[source] = measurements.SourceFile("unknown", digest_files([path]))
        origin = _origin(tree.get("fingerprint", {}), tree.get("versions", {}))
        rows += [(work, seconds, *origin, source) for work, seconds in zip(file.works, file.seconds, strict=True)]
    for trace in collection.traces():
        manifest, origin = trace.manifest, _origin(trace.manifest.fingerprint, trace.manifest.versions)
        traced = [manifest.folder / formats["kineto"] for formats in manifest.traces.values() if "kineto" in formats]
        file_of = measurements.SourceFile("unknown", digest_files([manifest.folder / "manifest.json", *traced]))
        for segment in trace.segments():
            source = f"runs/{manifest.name}/rank{segment.rank}/{segment.label}"
            for node, seconds in zip(segment.program.nodes, segment.slot_s.tolist(), strict=True):
                if isinstance(node.work, Op) and 0 in node.work.dims[:2]:
                    skipped["the trace does not record the sizes of the op"] += 1
                else:
                    rows.append((node.work, seconds, *origin, source))
                    files[source] = file_of
    works, seconds_of, device, software, source_of = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    nowhere = ("",) * len(rows)
    return measurements.Measurements(
        works, np.array(seconds_of, float), device, nowhere, software, source_of, files, skipped
    )


def _origin(fingerprint: Any, versions: Any) -> tuple[str, str]:
    """Return the device and the software; "" where the file does not say them."""
    device = fingerprint.get("device", "") if isinstance(fingerprint, Mapping) else ""
    torch = versions.get("torch", "") if isinstance(versions, Mapping) else ""
    return measurements.device_name(str(device)), f"torch {torch}" if torch else ""
