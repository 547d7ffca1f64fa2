"""Reading traced runs for training: only through the graph dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.training.measured.host_steps import HostStep, host_step

if TYPE_CHECKING:
    from stepsight.dataset.trace_graphs.learning_segments import StepWorks


class RunGraphs(NamedTuple):
    """Contents of the dataset about a run: its segments and, if requested, the work of its steps.

    ``host``: the step of a host that computes; None where a device does, or where no step was timed.
    """

    segments: tuple[TracedSegment, ...]
    steps: StepWorks
    host: HostStep | None = None


def read_graphs(folders: Sequence[Path], scopes: Sequence[str] = ("segment",)) -> list[RunGraphs]:
    """Read the graphs of each traced run from a dataset that is made in a temporary folder.

    Args:
        folders: Run folders, each with traces.
        scopes: ``segment``, and ``step`` for launches and overlap.

    Raises:
        TraceError: If a folder is no run, or its traces cannot be read.
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
