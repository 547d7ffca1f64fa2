"""Traced runs for training, read through the graph dataset alone; ops and collectives of imported ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.hardware.hardware import reported_devices
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_folder import read_imported
from stepsight.dataset.tables.measurements import device_name
from stepsight.training.measured.host_steps import HostStep, host_step

if TYPE_CHECKING:
    from stepsight.dataset.trace_graphs.learning_segments import StepWorks


HELDOUT = "heldout"  # role of runs that judge: they never train


@dataclass(frozen=True)
class ImportedSegments:
    """An imported run, read from the dataset."""

    folder: Path  # the run folder
    name: str  # of the run
    device: str  # name of the device as the trace has it; cpu where the host computed
    job: Job | None  # the job that ran; None if unknown
    segments: tuple[TracedSegment, ...]  # of all steps and ranks
    steps: StepWorks  # what ran in all steps, kernel by kernel
    host: HostStep | None  # the step of a host that computes; None where a device does, or where no step was timed

    whole = False  # its iteration was not timed without a profiler


@dataclass
class ImportedTimes:
    """Seconds of each signature, over all imported runs."""

    # of each op, once for each call; where nothing ran beside it, if that ever was
    ops: dict[Op, list[float]] = field(default_factory=dict)
    # of each collective, from when its last rank came to it
    collectives: dict[Collective, list[float]] = field(default_factory=dict)
    device: str = ""  # cuda or cpu; empty if nothing was imported


def read_imported_segments(folders: Iterable[Path], hardware: str = "") -> list[ImportedSegments]:
    """Read imported runs, except those that judge.

    Raises ``TraceError`` if a run was traced on another hardware than the one named.
    """
    runs = [run for run in map(read_imported, folders) if run.role != HELDOUT]
    for run in runs:
        _check_hardware(run.hardware, hardware, run.folder)
    found = read_graphs([run.folder for run in runs], ("segment", "step"))
    return [
        ImportedSegments(run.folder, run.name, run.hardware or "cuda", run.job, graphs.segments, *graphs[1:])
        for run, graphs in zip(runs, found, strict=True)
    ]


def imported_times(runs: Iterable[ImportedSegments]) -> ImportedTimes:
    """Seconds by signature.

    A collective counts only where all of its ranks were traced: else nobody knows how long it waited for the others.
    """
    found = ImportedTimes()
    for run in runs:
        found.device = "cpu" if run.device == "cpu" else "cuda"
        for segment in run.segments:
            times = zip(segment.program.nodes, segment.alone_s.tolist(), segment.slot_s.tolist(), strict=True)
            for node, alone, inside in times:
                work, seconds = node.work, alone if alone > 0 else inside
                if isinstance(work, Op):
                    if work.kind != "opaque" and min(work.dims, default=0) > 0 and seconds > 0:
                        found.ops.setdefault(work, []).append(seconds)
                elif work.num_bytes > 0 and inside > 0:
                    found.collectives.setdefault(work, []).append(inside)
    return found


def _check_hardware(traced: str, hardware: str, folder: Path) -> None:
    known = hardware in reported_devices().values() or traced in reported_devices()
    if hardware and traced != "cpu" and known and device_name(traced) != hardware:
        raise TraceError(
            f"every run must be on the predictor's hardware: the device must be {hardware!r:.80}, got "
            f"{traced!r:.80} in {folder}"
        )


class RunGraphs(NamedTuple):
    """Contents of the dataset about a run: its segments and, if requested, the work of its steps.

    ``host``: the step of a host that computes; None where a device does, or where no step was timed.
    """

    segments: tuple[TracedSegment, ...]
    steps: StepWorks
    host: HostStep | None = None


def read_graphs(folders: Sequence[Path], scopes: Sequence[str] = ("segment",)) -> list[RunGraphs]:
    """Read the graphs of each traced run from a dataset that is made in a temporary folder.

    ``folders``: run folders, each with traces.  ``scopes``: ``segment``, and ``step`` for launches and overlap.  Raises
    ``TraceError`` if a folder is no run, or its traces cannot be read.
    """
    if not folders:
        return []
    from stepsight.dataset.trace_graphs.graph_dataset import make_dataset
    from stepsight.dataset.trace_graphs.learning_segments import learning_segments, step_works
    from stepsight.dataset.trace_graphs.trace_graphs import TraceGraphs

    with TemporaryDirectory(prefix="stepsight-") as scratch:
        make_dataset(folders, Path(scratch) / "dataset", scopes=scopes)
        graphs = TraceGraphs(Path(scratch) / "dataset")
        scope, source = graphs.values("scope"), graphs.values("source")
        found: list[list[TracedSegment]] = [[] for _ in folders]
        steps: list[list[int]] = [[] for _ in folders]
        for place, run in enumerate(source):
            if scope[place] == "step":
                steps[run].append(place)
        runs = [run for run, each in zip(source, scope, strict=True) if each == "segment"]
        for run, segment in zip(runs, learning_segments(graphs), strict=True):
            found[run].append(segment)
        works = [step_works(graphs, places) for places in steps]
        hosts = [host_step(graphs, places) if places else None for places in steps]
    told = zip(found, works, hosts, strict=True)
    return [RunGraphs(tuple(segments), step, host) for segments, step, host in told]
