"""Index of a graph dataset: its runs, what features mean, and the parts that stored graphs are cut into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stepsight.dataset.errors import TraceError
from stepsight.dataset.files import digest, read_json
from stepsight.dataset.imported.graph_files import read_graph
from stepsight.dataset.imported.graph_parts import GraphPart, RankParts, kind_names
from stepsight.dataset.imported.meetings import meetings
from stepsight.dataset.imported.rank_graph import RankGraph
from stepsight.dataset.job import Job

INDEX = "runs.json"
FORM = 1  # of features and relations: another number is another version of every dataset


def describe_run(name: str, job: Job | None, graphs: Sequence[RankGraph]) -> dict[str, Any]:
    """Metadata of a run: what splits go by.  Without a job, model and strategy are told apart by what ran."""
    first = graphs[0]
    kinds = sorted({work.kind for work in first.works})
    strategy = sorted({str(ranks or name) for name, ranks in first.groups})
    if job is not None:
        tables = job.to_dict()
        model = job.model.name or digest(str(sorted(tables["model"].items())))
        strategy_name = digest(str(sorted(tables["parallel"].items())))
    else:
        model = digest(*kinds, *sorted(first.names))
        strategy_name = digest(str(first.world_size), *strategy)
    group = digest(*(part.tobytes() for graph in graphs for part in (graph.start_s, graph.duration_s)))
    return {
        "run": name,
        "model": model,
        "strategy": strategy_name,
        "scale": str(first.world_size),
        "hardware": first.device_name or first.device,
        "group": group,
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
        if tuple(index["kinds"]) != kind_names() or not all(isinstance(run["folder"], str) for run in index["runs"]):
            raise ValueError("its kinds of ops are not those of this version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{root} must be a dataset that `stepsight dataset` made: {error}") from None
    return dict(index)


def run_parts(folder: Path, run: dict[str, Any]) -> Iterator[tuple[dict[str, Any], GraphPart]]:
    """Metadata and parts of a stored run: every step and segment of every rank."""
    graphs = [read_graph(folder, stem) for stem in run["ranks"]]
    met = meetings(graphs)[0]
    about = {name: run[name] for name in ("run", "role", "model", "strategy", "scale", "hardware", "group")}
    for place, graph in enumerate(graphs):
        for part in RankParts(graphs, place, met).parts():
            yield {**about, "rank": graph.rank}, part
