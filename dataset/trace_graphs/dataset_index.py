"""Index of a graph dataset: its runs, the meaning of features, and the parts of stored graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import digest, digest_files, read_json
from stepsight.dataset.graph.graph_files import read_graph
from stepsight.dataset.graph.rank_graph import RankGraph
from stepsight.dataset.graph.rendezvous import meetings
from stepsight.dataset.job.job import Job
from stepsight.dataset.runs.run_manifest import RunManifest
from stepsight.dataset.trace_graphs.graph_parts import RankParts
from stepsight.dataset.trace_graphs.graph_schema import DTYPES, WORK_TYPES, GraphPart, kind_names
from stepsight.dataset.trace_graphs.segment_files import read_segments
from stepsight.dataset.trace_graphs.segment_parts import SegmentParts

_LEAST_TOLD = 8  # least number of nodes that identifies a graph
INDEX = "runs.json"
SCOPES = ("step", "segment")
FORM = 4  # version of features and relations: changing it makes every dataset a new version


def describe_run(name: str, job: Job | None, graphs: Sequence[RankGraph], timed_s: float = 0.0) -> dict[str, Any]:
    """Metadata of a run, which splits use. Without a job, model and strategy are derived from its ops.

    ``timed_s``: a step without a profiler; 0 if not timed.
    """
    first = graphs[0]
    model, strategy = _of_graphs(graphs) if job is None else _of_job(job)
    group = digest(*(part.tobytes() for graph in graphs for part in (graph.start_s, graph.duration_s)))
    return {
        "run": name,
        "model": model,
        "strategy": strategy,
        "scale": str(first.world_size),
        "hardware": first.device_name or first.device,
        "group": group,
        "timed_s": timed_s,
    }


def _of_graphs(graphs: Sequence[RankGraph]) -> tuple[str, str]:
    kinds = sorted({work.kind for work in graphs[0].works})
    groups = sorted({str(ranks or name) for name, ranks in graphs[0].groups})
    return digest(*kinds, *sorted(graphs[0].names)), digest(str(graphs[0].world_size), *groups)


def _of_job(job: Job) -> tuple[str, str]:
    tables = job.to_dict()
    model = job.model.name or digest(str(sorted(tables["model"].items())))
    return model, digest(str(sorted(tables["parallel"].items())))


def describe_own_run(run: RunManifest) -> dict[str, Any]:
    """Metadata of a run of the harness by its manifest, without its graphs."""
    model, strategy = _of_job(run.job)
    files = [run.folder / name for rank in sorted(run.traces) for name in sorted(run.traces[rank].values())]
    return {
        "run": run.name,
        "model": model,
        "strategy": strategy,
        "scale": str(run.world_size),
        "hardware": run.job.hardware_name,
        "group": digest_files(files),
        "timed_s": run.iteration_time_s if run.whole else 0.0,
    }


def read_index(root: Path) -> dict[str, Any]:
    """Index of a dataset.

    Raises:
        TraceError: If the folder holds none, or one of another form.
    """
    path = Path(root) / "raw" / INDEX
    try:
        index = read_json(path)
        if index["form"] != FORM:
            raise ValueError(f"form must be {FORM}, got {index['form']!r:.40}")
        if (
            tuple(index["kinds"]) != kind_names()
            or tuple(index["dtypes"]) != DTYPES
            or not all(isinstance(run["folder"], str) for run in index["runs"])
        ):
            raise ValueError("its kinds of ops are not those of this version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{root} must be a dataset that `stepsight dataset` made: {error}") from None
    return dict(index)


def run_parts(folder: Path, run: dict[str, Any]) -> Iterator[tuple[dict[str, Any], GraphPart]]:
    """Metadata and parts of a stored run: every step and segment of every rank."""
    graphs = [read_graph(folder, stem) for stem in run["ranks"]]
    names = ("source", "run", "role", "model", "strategy", "scale", "hardware", "group", "timed_s")
    about = {name: run[name] for name in names}
    if graphs:
        met = meetings(graphs)[0]
        for place, graph in enumerate(graphs):
            for part in RankParts(graphs, place, met).parts():
                yield {**about, "rank": graph.rank, "digest": part_digest(part)}, part
    if run["segments"]:
        segments = read_segments(folder)
        for segment, part in zip(segments, SegmentParts(segments).parts(), strict=True):
            yield {**about, "rank": segment.rank, "digest": part_digest(part)}, part


def part_digest(part: GraphPart) -> str:
    """Digest of the nodes and their durations; empty for few nodes, which may be equal by chance."""
    if sum(len(part.kind[name]) for name in WORK_TYPES) < _LEAST_TOLD:
        return ""
    columns: list[Any] = [each[name] for name in WORK_TYPES for each in (part.kind, part.signature)]
    columns += [part.y[name][:, 1] for name in WORK_TYPES]
    return digest(*(np.ascontiguousarray(column).tobytes() for column in columns))
