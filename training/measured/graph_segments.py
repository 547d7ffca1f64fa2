"""Traced runs as training reads them: through the graph dataset, and no other way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from stepsight.dataset.trace import TracedSegment


def segments_by_run(folders: Sequence[Path]) -> list[tuple[TracedSegment, ...]]:
    """Segments of each traced run: a dataset of them is made in a temporary folder, and read.

    Args:
        folders: Run folders, each with traces.

    Raises:
        TraceError: If a folder is no run, or its traces cannot be read.
    """
    if not folders:
        return []
    from stepsight.dataset.imported.graph_dataset import make_dataset
    from stepsight.dataset.imported.learning_segments import learning_segments
    from stepsight.dataset.imported.trace_graphs import TraceGraphs

    with TemporaryDirectory(prefix="stepsight-") as scratch:
        make_dataset(folders, Path(scratch) / "dataset", scopes=("segment",))
        graphs = TraceGraphs(Path(scratch) / "dataset")
        found: list[list[TracedSegment]] = [[] for _ in folders]
        for source, segment in zip(graphs.values("source"), learning_segments(graphs), strict=True):
            found[source].append(segment)
    return [tuple(segments) for segments in found]
