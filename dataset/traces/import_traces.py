"""``stepsight import``: formats of traces, the rank of each file, checks that ranks belong together, a summary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import StepsightError, TraceError, repeated
from stepsight.dataset.base.registry import Registry, check_takes
from stepsight.dataset.graph.program import COLLECTIVE, Dependency, Program
from stepsight.dataset.graph.rank_trace import Placement, RankTrace, meetings, numbered_alike, rank_trace
from stepsight.dataset.traces.assembly import graph_of_trace
from stepsight.dataset.traces.read_rank import read_kineto, read_rank

_JSON = (".json", ".json.gz")
_SUFFIXES = {"kineto": _JSON, "chakra": (".et", ".et.gz", *_JSON)}  # of files in a folder, by format
_RANK = re.compile(r"(?:rank|worker|gpu|proc|node)[-_.]?(\d+)|[-_.](\d+)(?=[-_.]|$)", re.IGNORECASE)
_MOST_TOLD = 8  # most ranks listed in a message
_LEAST_ALIKE = 0.5  # share of the collectives of two ranks of a job that must be of one kind

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Imported:
    """Traces that were read: the graphs by rank, their files, and warnings with the rank."""

    graphs: tuple[Program, ...]
    sources: tuple[Path, ...]
    warnings: tuple[str, ...]


def trace_files(paths: Sequence[Path], suffixes: tuple[str, ...] = _JSON) -> list[Path]:
    """The given files, and the files of given folders with one of the suffixes."""
    found: list[Path] = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = sorted(each for each in path.iterdir() if each.name.endswith(suffixes) and each.is_file())
        if not inside:
            raise TraceError(f"a folder of traces must hold files that end in {' or '.join(suffixes)}: {path}")
        found += inside
    if twice := repeated(map(str, found)):
        raise TraceError(f"every trace must be named once, got {twice} twice")
    return found


def import_ranks(
    paths: Sequence[Path],
    executions: Sequence[Path] = (),
    placement: Placement | None = None,
    on_file: Progress | None = None,
    *,
    form: str = "kineto",
) -> Imported:
    """Read the traces of one job's ranks: a file for each, or folders of them, and execution traces of some or all.

    Raises ``TraceError`` if there is no such format, a file is no whole trace, or the ranks are not of one job.
    """
    place = replace(placement or Placement(), rank=None)
    _ = TRACE_READERS[form]  # it is known
    if executions and form != "kineto":
        raise TraceError(f"import {form} takes no execution traces (--et), got {len(executions)}")
    files = trace_files(paths, _SUFFIXES.get(form, ("",)))
    if form == "chakra":  # all ranks together, since they hold no times of their own
        from stepsight.dataset.traces.chakra_graph import read_chakra  # other formats need no reader of them

        ranks = _ranks_of(files)
        _check_once(ranks, files)
        graphs = read_chakra(files, ranks, on_file)
    else:
        joined, graphs = _execution_of(files, trace_files(executions) if executions else []), []
        for number, path in enumerate(files, 1):
            if form == "kineto":
                graphs.append(read_rank(path, place, joined.get(path)))
            else:
                graphs.append(graph_of_trace(read_rank_trace(form, path, place)))
            if on_file is not None:
                on_file(number, len(files))
    ranks = [graph.rank for graph in graphs]
    if len(graphs) > 1 and all(graph.world_size == 1 for graph in graphs):  # files that do not tell of others
        if len(set(ranks)) == 1:
            named = _ranks_of(files)
            ranks = named if len(set(named)) == len(named) else list(range(len(files)))
        world = max(len(files), 1 + max(ranks))
        graphs = [graph.replace(rank=rank, world_size=world) for graph, rank in zip(graphs, ranks, strict=True)]
    _check_once(ranks, files)
    order = sorted(range(len(graphs)), key=ranks.__getitem__)
    ordered = [graphs[number] for number in order]
    ranked = {graph.rank: f"rank {graph.rank}: " if len(graphs) > 1 else "" for graph in ordered}
    warnings = [ranked[graph.rank] + told for graph in ordered for told in graph.warnings]
    return Imported(tuple(ordered), tuple(files[number] for number in order), (*warnings, *_check_ranks(ordered)))


def _execution_of(files: Sequence[Path], executions: Sequence[Path]) -> dict[Path, Path]:
    """Execution trace of each file: by the rank in their names, else by their order."""
    if not executions:
        return {}
    if len(executions) > len(files):
        raise TraceError(f"each trace takes at most one execution trace, got {len(executions)} for {len(files)}")
    by_rank = {_rank_in(path): path for path in executions}
    found = {path: by_rank[_rank_in(path)] for path in files if _rank_in(path) in by_rank}
    if len(files) > 1 and None not in by_rank and len(by_rank) == len(found) == len(executions):
        return found
    if len(executions) != len(files):
        rule = "execution traces must have the numbers of their ranks in their names"
        raise TraceError(f"{rule}, or be as many as traces")
    return dict(zip(files, executions, strict=True))


def _rank_in(path: Path) -> int | None:
    """Rank in a file's name."""
    match = _RANK.search(re.sub(r"\.(json|et)(\.gz)?$", "", path.name))
    return int(match[1] or match[2]) if match else None


def _ranks_of(files: Sequence[Path]) -> list[int]:
    """Ranks by the numbers in the files' names, if every file has one; otherwise by their order."""
    named = [_rank_in(path) for path in files]
    return [int(rank or 0) for rank in named] if None not in named else list(range(len(files)))


def _check_once(ranks: Sequence[int], files: Sequence[Path]) -> None:
    seen: dict[int, Path] = {}
    for rank, path in zip(ranks, files, strict=True):
        if seen.setdefault(rank, path) is not path:
            told = f"got rank {rank} twice: {seen[rank]} and {path}"
            raise TraceError(f"every rank must have one trace, {told}; import different runs one by one")


def _check_ranks(graphs: Sequence[Program]) -> list[str]:
    """Warnings about ranks that do not belong together."""
    for what, name in (("world size", "world_size"), ("kind of device", "device")):
        values = {getattr(graph, name) for graph in graphs}
        if len(values) > 1:
            raise TraceError(f"ranks must be of one job, got different values of {what}: {sorted(values)}")
    world, ranks = graphs[0].world_size, [graph.rank for graph in graphs]
    warnings = []
    if max(ranks) >= world > 1:
        raise TraceError(f"ranks must be below the world size {world}, got rank {max(ranks)}")
    if 1 < world != len(ranks):
        absent = [rank for rank in range(min(world, max(ranks) + _MOST_TOLD + 2)) if rank not in ranks]
        told = ", ".join(map(str, absent[:_MOST_TOLD])) + (" …" if world - len(ranks) > _MOST_TOLD else "")
        warnings.append(f"ranks are missing: {world - len(ranks)} of {world} ({told}); what others wait for is unknown")
    counts = [len(graph.steps_s) for graph in graphs]
    if min(counts) < max(counts):
        warnings.append(f"numbers of steps differ: {min(counts)} to {max(counts)} by rank")
    collectives = [int(((g.columns["kind"] == COLLECTIVE) & (g.columns["group"] >= 0)).sum()) for g in graphs]
    if len(graphs) < 2 or not all(collectives):
        return warnings
    numbered, met = numbered_alike(graphs), meetings(graphs)[0]
    if len(numbered) < _LEAST_ALIKE * min(collectives) and len(graphs) == world:
        rule = f"ranks must be of one job, got {len(numbered)} collectives in common of {max(collectives)}"
        raise TraceError(f"{rule}: the traces are of different jobs or of different steps")
    if len(met) < len(numbered):
        told = f"{len(numbered) - len(met)} of {len(numbered)} do not end together, and count as different ones"
        cause = "" if met else ": the traces may be of different jobs or different steps"
        warnings.append(f"collectives of the ranks differ: {told}{cause}")
    return warnings


def summary(found: Imported) -> dict[str, Any]:
    """The output of ``stepsight import FORMAT --json``."""
    graphs = found.graphs
    device = sum(graph.device_time_s for graph in graphs)
    counts = Counter({Dependency.RENDEZVOUS.value: sum(len(members) - 1 for members in meetings(graphs)[0])})
    for graph in graphs:
        counts.update(graph.dependency_counts())
    opaque = sum(float(graph.duration_s[graph.on_device & (graph.columns["known"] < 1)].sum()) for graph in graphs)
    share = 100.0 * opaque / device if device else 0.0
    return {
        "ranks": len(graphs),
        "steps": min(len(graph.steps_s) for graph in graphs),
        "device_time_s": device,
        "recognised_percent": 100.0 - share if device else 0.0,
        "opaque_percent": share,
        "dependencies": {why.value: counts[why.value] for why in Dependency},
        "warnings": list(found.warnings),
        "nodes": sum(len(graph) for graph in graphs),
        "events": sum(graph.events for graph in graphs),
        "world_size": graphs[0].world_size,
        "hardware": graphs[0].device_name,
    }


# Takes the path of one rank's file and the rank's place in its job, and returns its trace or raises ``TraceError``.
# The name is that under which a run's manifest lists the file: ``"traces": {"0": {"kineto": "rank0.json.gz"}}``.
TraceReader = Callable[[Path, Placement], RankTrace]


def _refuse_rank(path: Path, placement: Placement) -> RankTrace:
    raise TraceError(f"a Chakra trace has no times of its own, so nothing can be learned from {path}: import it")


TRACE_READERS: Registry[TraceReader] = Registry(
    "trace format",
    {"kineto": read_kineto, "chakra": _refuse_rank},
    group="stepsight.trace_readers",
    check=lambda name, reader: check_takes("a reader of traces", reader, ("path", "placement")),
    error=TraceError,
)


def read_rank_trace(form: str, path: Path, placement: Placement) -> RankTrace:
    """Read one rank's file with the reader of its format."""
    reader = TRACE_READERS[form]
    try:
        trace = reader(path, placement)
    except (StepsightError, OSError):
        raise
    except Exception as error:  # a user's own reader may raise anything
        raise TraceError(f"trace format {form}: cannot read {path}: {type(error).__name__}: {error}") from error
    if not isinstance(trace, RankTrace):
        raise TraceError(f"trace format {form}: a reader must return a RankTrace, got {trace!r:.80} for {path}")
    return trace


def read_rank_files(
    files: Mapping[str, str], folder: Path, placement: Placement, executions: bool
) -> tuple[RankTrace, Program]:
    """Trace and graph of a rank of a run folder, from the first of its files that has a known format.

    ``executions``: read the rank's execution trace too, if there is one, for the data dependencies of the graph.
    """
    form = trace_format(files, placement.rank, folder)
    if form == "kineto":
        execution = folder / files["et"] if executions and "et" in files else None
        graph = read_rank(folder / files[form], placement, execution)
        return rank_trace(graph), graph
    trace = read_rank_trace(form, folder / files[form], placement)
    return trace, graph_of_trace(trace)


def trace_format(files: Mapping[str, str], rank: int | None, folder: Path) -> str:
    """The first known format among a rank's files, which are listed by format."""
    form = next((name for name in files if name in TRACE_READERS), None)
    if form is None:
        rule = f"rank {rank} must have a trace of a known format ({', '.join(TRACE_READERS.names())})"
        raise TraceError(f"{rule}, got {sorted(files)} in {folder}")
    return form
