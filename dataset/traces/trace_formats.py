"""Formats of traces: how one rank's file is read, and the files of a whole job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import StepsightError, TraceError
from stepsight.dataset.base.registry import Registry, check_takes
from stepsight.dataset.graph.rank_graph import RankGraph
from stepsight.dataset.graph.rank_trace import RankTrace
from stepsight.dataset.traces.assembly import graph_of_trace
from stepsight.dataset.traces.import_ranks import Imported, Progress, import_chakra, import_ranks, imported, trace_files
from stepsight.dataset.traces.kineto import read_kineto
from stepsight.dataset.traces.placement import Placement
from stepsight.dataset.traces.read_rank import read_rank

# Takes the path of one rank's file and the rank's place in its job, and returns its trace or raises ``TraceError``.
# The name is that under which a run's manifest lists the file: ``"traces": {"0": {"kineto": "rank0.json.gz"}}``.
TraceReader = Callable[[Path, Placement], RankTrace]


@dataclass(frozen=True)
class TraceFormat:
    """How traces of one format are read; a call reads one rank's file as ``RankTrace``.

    Attributes:
        read: Reads one rank's file.
        read_graph: Reads one rank's file, with its execution trace if there is one, as a graph; None: as ``read`` does.
        read_job: Reads files of all ranks, and execution traces of some; None: each file by itself.
    """

    read: TraceReader
    read_graph: Callable[[Path, Placement, Path | None], RankGraph] | None = None
    read_job: Callable[[Sequence[Path], Sequence[Path], Placement | None, Progress | None], Imported] | None = None

    def __call__(self, path: Path, placement: Placement) -> RankTrace:
        return self.read(path, placement)


def _check_reader(name: str, reader: Any) -> TraceReader:
    check_takes("a reader of traces", reader, ("path", "placement"))
    return reader  # type: ignore[no-any-return]


def _refuse_rank(path: Path, placement: Placement) -> RankTrace:
    raise TraceError(f"a Chakra trace has no times of its own, so nothing can be learned from {path}: import it")


TRACE_READERS: Registry[TraceReader] = Registry(
    "trace format",
    {
        "kineto": TraceFormat(read_kineto, read_rank, import_ranks),
        "chakra": TraceFormat(_refuse_rank, read_job=import_chakra),
    },
    group="stepsight.trace_readers",
    check=_check_reader,
    error=TraceError,
)


def find_format(form: str) -> TraceFormat:
    """The format of that name; a reader of the user's own reads each file by itself.

    Raises:
        TraceError: If there is no such format.
    """
    reader = TRACE_READERS[form]
    return reader if isinstance(reader, TraceFormat) else TraceFormat(reader)


def read_rank_trace(form: str, path: Path, placement: Placement) -> RankTrace:
    """Read one rank's file with the reader of its format.

    Raises:
        TraceError: If there is no such format, or if the reader raises or returns something else than a trace.
    """
    reader = find_format(form).read
    try:
        trace = reader(path, placement)
    except (StepsightError, OSError):
        raise
    except Exception as error:  # a user's own reader may raise anything
        raise TraceError(f"trace format {form}: cannot read {path}: {type(error).__name__}: {error}") from error
    if not isinstance(trace, RankTrace):
        raise TraceError(f"trace format {form}: a reader must return a RankTrace, got {trace!r:.80} for {path}")
    return trace


def read_rank_graph(files: Mapping[str, str], folder: Path, placement: Placement) -> RankGraph:
    """The graph of a rank of a run folder, from the first of its files that has a known format.

    Raises:
        TraceError: As ``read_rank_trace``.
    """
    form = trace_format(files, placement.rank, folder)
    read, path = find_format(form).read_graph, folder / files[form]
    if read is None:
        return graph_of_trace(read_rank_trace(form, path, placement))
    return read(path, placement, folder / files["et"] if "et" in files else None)


def trace_format(files: Mapping[str, str], rank: int | None, folder: Path) -> str:
    """The first known format among a rank's files, which are listed by format.

    Raises:
        TraceError: If there is none.
    """
    form = next((name for name in files if name in TRACE_READERS), None)
    if form is None:
        raise TraceError(
            f"rank {rank} must have a trace of a known format ({', '.join(TRACE_READERS.names())}), "
            f"got {sorted(files)} in {folder}"
        )
    return form


def import_traces(
    form: str,
    paths: Sequence[Path],
    executions: Sequence[Path] = (),
    placement: Placement | None = None,
    on_file: Progress | None = None,
) -> Imported:
    """Read the traces of one job's ranks, in any format.

    Args:
        form: Name of the format.
        paths: One file for each rank, or a folder of them.
        executions: PyTorch's execution traces, of all ranks or of some.
        placement: What is known of the job's ranks.
        on_file: Told how many files are read, of how many.

    Raises:
        TraceError: If there is no such format, a file is no whole trace, two are of one rank, or the ranks are of
            different jobs.
    """
    found = find_format(form)
    if found.read_job is not None:
        return found.read_job(paths, executions, placement, on_file)
    if executions:
        raise TraceError(f"import {form} takes no execution traces, got {len(executions)}")
    files, graphs = trace_files(paths, ("",)), []
    for number, path in enumerate(files):
        place = replace(placement or Placement(), rank=None)
        graphs.append(graph_of_trace(read_rank_trace(form, path, place)))
        if on_file is not None:
            on_file(number + 1, len(files))
    world = max(len(files), 1 + max(graph.rank for graph in graphs))
    several = len({graph.rank for graph in graphs}) > 1
    return imported([replace(graph, world_size=world) if several else graph for graph in graphs], files)
