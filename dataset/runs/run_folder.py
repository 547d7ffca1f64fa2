"""Run folders, event files and collections, as the harness and ``stepsight import`` write them.

What is missing, truncated or inconsistent is refused with a ``TraceError``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepsight.dataset.base.bounded import parsing, read_file
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import IF_SET, OPTIONAL, UNSAVED, Saved, digest, new_folder, read_json, write_json
from stepsight.dataset.graph.graph_files import write_graph
from stepsight.dataset.graph.program import Program
from stepsight.dataset.graph.rank_trace import Placement, RankTrace
from stepsight.dataset.hardware.hardware_facts import Hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import MOST_SIZE, Collective, Op
from stepsight.dataset.runs.run_manifest import SCHEMA, Box, RunManifest, number, read_manifest, read_object, typed
from stepsight.dataset.runs.trace import Trace
from stepsight.dataset.traces.import_traces import read_rank_files, trace_format


@dataclass(frozen=True)
class Collection:
    """What of a collection folder is there."""

    folder: Path
    runs: tuple[RunManifest, ...]  # manifests of the complete runs, by name
    absent: tuple[str, ...] = ()  # names of planned runs that are not there
    events: tuple[Path, ...] = ()  # event files that are there
    absent_events: tuple[str, ...] = ()  # names of planned event files that are not there
    imported: tuple[Path, ...] = ()  # folders of runs that were imported from other people's traces

    def __iter__(self) -> Iterator[RunManifest]:
        return iter(self.runs)

    @property
    def missing(self) -> list[str]:
        """What was planned and is not there."""
        return [*(f"runs/{name}" for name in self.absent), *(f"events/{name}.json" for name in self.absent_events)]

    def traces(self, role: str | None = None) -> Iterator[Trace]:
        """Read the complete runs (of a role) that have traces, one after the other."""
        for manifest in self.runs:
            if manifest.traces and role in (None, manifest.role):
                yield read_run(manifest.folder)


def read_run(folder: Path, executions: bool = False) -> Trace:
    """Read a run folder whole; with ``executions``, data dependencies from its execution traces too."""
    manifest = read_manifest(Path(folder))
    if not manifest.traces:
        raise TraceError(f"a run must have traces to be read, got none in {manifest.folder}")
    parallel, devices = manifest.job.parallel, manifest.job.cluster.devices_per_node
    traces: list[RankTrace] = []
    graphs: list[Program] = []
    for rank, files in sorted(manifest.traces.items()):
        name = files[trace_format(files, rank, manifest.folder)]
        path, wanted = manifest.folder / name, manifest.digests.get(name)
        if wanted is not None and path.is_file() and (found := hashlib.sha256(read_file(path)).hexdigest()) != wanted:
            raise TraceError(f"a trace must be as it was written: SHA-256 {wanted:.16}…, got {found:.16}… of {path}")
        place = Placement(rank=rank, devices_per_node=devices, tp=parallel.tp, dp=parallel.dp * parallel.cp)
        trace, graph = read_rank_files(files, manifest.folder, place, executions)
        traces.append(trace)
        graphs.append(graph)
    return Trace(manifest, tuple(traces), tuple(graphs))


def read_collection(folder: Path) -> Collection:
    """List what of a collection is complete and what is absent."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TraceError(f"a collection must be a folder, got {folder}")
    plan = read_object(folder / "plan.json") if (folder / "plan.json").exists() else {}
    if not plan and not (folder / "runs").is_dir():
        raise TraceError(f"a collection must hold plan.json or runs/, got neither in {folder}")
    folders = [path for path in _entries(folder / "runs") if path.is_dir()]
    imported = tuple(path for path in folders if is_imported(path))
    runs = tuple(read_manifest(path) for path in folders if path not in imported)
    events = tuple(path for path in _entries(folder / "events") if path.suffix == ".json")
    there = {"runs": {manifest.name for manifest in runs}, "events": {path.stem for path in events}}
    with parsing(f"{folder / 'plan.json'} must hold lists of runs and events with names", TraceError):
        entries = {key: [typed(entry, dict, f"one of {key}") for entry in plan.get(key, ())] for key in there}
        absent, absent_events = (
            tuple(name for entry in entries[key] if (name := typed(entry.get("name"), str, "name")) not in names)
            for key, names in there.items()
        )
    return Collection(folder, runs, absent, events, absent_events, imported)


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, by name; what is being written has a leading dot and is not there yet."""
    return sorted(path for path in folder.glob("*") if not path.name.startswith("."))


MANIFEST = "manifest.json"


@dataclass(frozen=True)
class ImportedRun(Saved):
    """The manifest of an imported run."""

    folder: Path = field(metadata=UNSAVED)
    name: str
    ranks: Mapping[int, str]  # stem of the graph's files by rank
    job: Job | None = field(default=None, metadata=OPTIONAL)  # the job that ran; None if unknown
    sources: tuple[str, ...] = field(default=(), metadata=OPTIONAL)  # names of the traces
    warnings: tuple[str, ...] = field(default=(), metadata=OPTIONAL)  # about all ranks
    role: str = field(default="train", metadata=OPTIONAL)  # ``train``, ``heldout`` or what else the user called it
    hardware: str = field(default="", metadata=OPTIONAL)
    # seconds of each step that was timed without a profiler, by round; empty where there were none
    rounds: tuple[tuple[float, ...], ...] = field(default=(), metadata=IF_SET)

    @property
    def timed_s(self) -> float:
        """Median seconds of a step that was timed without a profiler; 0 if none was."""
        steps = [seconds for each in self.rounds for seconds in each]
        return float(np.median(steps)) if steps else 0.0

    def graphs(self) -> list[Program]:
        """Graphs of all ranks, in order."""
        return [Program.load(self.folder / stem) for _, stem in sorted(self.ranks.items())]


def is_imported(folder: Path) -> bool:
    """Whether a run folder holds an imported run."""
    path = Path(folder) / MANIFEST
    try:
        tree = read_json(path) if path.is_file() else {}
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and tree.get("imported") is True


def read_imported(folder: Path) -> ImportedRun:
    """Read the manifest of an imported run."""
    path = Path(folder) / MANIFEST
    with parsing(f"{path} must be the manifest of an imported run", TraceError):
        tree = read_json(path)
        if tree.get("schema") != SCHEMA or tree.get("imported") is not True:
            raise ValueError(f"schema must be {SCHEMA} and imported true")
        run = ImportedRun.from_dict(tree, folder=Path(folder))
        if not run.ranks or not all(re.fullmatch(r"rank\d+", stem) for stem in run.ranks.values()):
            raise ValueError(f"ranks must name their files rank0, rank1 …, got {tree['ranks']!r:.80}")
        return run


def write_imported(
    graphs: Sequence[Program],
    sources: Sequence[Path],
    collection: Path,
    job: Job | None,
    warnings: Sequence[str],
    *,
    name: str = "",
    more: Mapping[str, Any] | None = None,
) -> ImportedRun:
    """Write a run into a collection; a run of the same traces, which give it a name if it has none, is replaced.

    ``more``: what else the manifest says, such as ``rounds``: seconds of steps that were timed without a profiler.
    """
    if not name:
        stem = re.sub(r"(\.pt)?(\.trace)?(\.json)?(\.gz)?$", "", sources[0].name)
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:60] or "trace"
        name = f"{stem}-{digest(*(_sha256(source) for source in sources))[:8]}"
    folder = Path(collection) / "runs" / name
    ranks = {graph.rank: f"rank{graph.rank}" for graph in graphs}
    names, hardware = tuple(path.name for path in sources), graphs[0].device_name
    run = ImportedRun(folder, name, ranks, job, names, tuple(warnings), hardware=hardware)
    told = {"schema": SCHEMA, "imported": True, "world_size": graphs[0].world_size, **run.to_dict(), **(more or {})}
    with new_folder(folder) as part:
        for graph in graphs:
            write_graph(graph, part, ranks[graph.rank])
        write_json(part / MANIFEST, told)
    return run


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run_folders(path: Path) -> list[Path]:
    """Run folders of a collection, or the run folder itself."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return [path]
    found = [folder for folder in _entries(path / "runs") if (folder / MANIFEST).is_file()]
    if not found:
        rule = "a run folder or a collection with runs is needed"
        raise TraceError(f"{rule}, got {path}: `stepsight import kineto` makes one")
    return found


class TracedRun(NamedTuple):
    """A run with the graphs of its ranks."""

    name: str
    job: Job | None  # the job that ran; None if unknown
    graphs: list[Program]  # of its ranks, in order
    role: str  # ``heldout`` for one that must never train
    iteration_s: float = 0.0  # a step without a profiler; 0 if not timed


def has_traces(folder: Path) -> bool:
    """Whether a run was traced: runs may only have been timed."""
    return is_imported(folder) or bool(read_manifest(Path(folder)).traces)


def run_graphs(folder: Path) -> TracedRun:
    """Graphs of a run: an imported one, or one that the harness traced (then its files are read)."""
    if is_imported(folder):
        run = read_imported(folder)
        return TracedRun(run.name, run.job, run.graphs(), run.role)
    return traced_run(read_run(folder, executions=True))


def traced_run(trace: Trace) -> TracedRun:
    """A run that the harness traced, with the graphs of its ranks."""
    manifest = trace.manifest
    timed = manifest.iteration_time_s if manifest.whole else 0.0
    return TracedRun(manifest.name, manifest.job, list(trace.graphs), manifest.role, timed)


# Fields of ``Hardware`` that may be measured.
_MEASURED = (
    "memory_bandwidth_bytes_per_s", "memory_bytes", "compute_efficiency", "memory_efficiency", "op_latency_s",
    "comm_compute_share",
)  # fmt: skip
_RANGES = {each.name: each.metadata["range"] for each in fields(Hardware) if each.name in _MEASURED}  # least and most
PEAKS = "peak_flops"  # the fact that is a table by dtype


@dataclass(frozen=True)
class EventFile:
    """Ops and collectives that were measured alone."""

    path: Path
    busy: int  # ranks that computed at the same time
    works: tuple[Op | Collective, ...]  # what was measured
    seconds: tuple[float, ...]  # of each
    host_seconds: tuple[float, ...]  # what the host took to launch each, 0 where that was not measured
    fresh_seconds: tuple[float, ...]  # of each with fresh memory for its results, 0 where that was not measured
    calls: tuple[str, ...]  # name of the framework call that was measured, "" where it was the op by its dims
    hardware: Mapping[str, Any]  # fields of ``Hardware`` that were measured
    box: Box | None = None  # that it was measured in, None outside of one
    device: str = ""  # that measured it, ``cpu`` or as drivers name it; "" if the file does not say it


def read_event_file(path: Path, tree: dict[str, Any] | None = None) -> EventFile:
    """What an event file holds (``tree``, if it is read already); raises ``TraceError`` if it is none."""
    tree = read_object(path) if tree is None else tree
    if tree.get("schema") != SCHEMA:
        raise TraceError(f"an event file must have schema = {SCHEMA}, got {tree.get('schema')!r:.80} in {path}")
    with parsing(f"{path} must be an event profile", TraceError):
        if not (busy := _size(tree.get("busy"), "busy")):
            raise ValueError(f"busy must be >= 1, got {busy}")
        records = [typed(record, dict, "a record") for record in typed(tree.get("records"), list, "records")]
        works = tuple(_work(record) for record in records)
        seconds = tuple(_positive(record.get("seconds"), "seconds") for record in records)
        host, fresh = (
            tuple(_positive(record[name], name) if name in record else 0.0 for record in records)
            for name in ("host_seconds", "fresh_seconds")
        )
        facts = _facts(typed(tree.get("hardware", {}), dict, "hardware"))
        box = Box.from_dict(tree["box"]) if "box" in tree else None
        if box is not None and (size := tree.get("world_size")) != box.num_ranks:
            raise ValueError(f"world_size must equal the box's ranks, got {size!r:.80} != {box.num_ranks}")
        device = typed(typed(tree.get("fingerprint", {}), dict, "fingerprint").get("device", ""), str, "device")
        told = [(record.get("op") or {}).get("call", [""]) for record in records]
        calls = tuple(typed(typed(call, list, "call")[0], str, "name of a call") for call in told)
        return EventFile(path, busy, works, seconds, host, fresh, calls, facts, box, device)


def _work(record: dict[str, Any]) -> Op | Collective:
    if "op" in record:
        op = typed(record["op"], dict, "op")
        dims = typed(op["dims"], list, "dims")
        return Op(typed(op["kind"], str, "kind"), tuple(_size(dim, "dims") for dim in dims), op["dtype"])
    table = dict(typed(record["collective"], dict, "collective"))
    kind = typed(table.pop("kind"), str, "kind")
    return Collective(kind, **{name: _size(value, name) for name, value in table.items()})


def _size(value: Any, name: str) -> int:
    if not 0 <= typed(value, int, name) <= MOST_SIZE:
        raise ValueError(f"{name} must lie within 0 and {MOST_SIZE}, got {value}")
    return int(value)


def _positive(value: Any, name: str) -> float:
    if not number(value, name) > 0:
        raise ValueError(f"{name} must be > 0, got {value}")
    return float(value)


def _facts(hardware: dict[str, Any]) -> dict[str, Any]:
    """The known fields; unknown fields of later versions are dropped."""
    facts: dict[str, Any] = {name: number(hardware[name], name, *_RANGES[name]) for name in _RANGES if name in hardware}
    if PEAKS in hardware:
        peaks = typed(hardware[PEAKS], dict, PEAKS)
        facts[PEAKS] = {dtype: _positive(peak, f"{PEAKS}.{dtype}") for dtype, peak in peaks.items()}
    return facts
