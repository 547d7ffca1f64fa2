"""Folders of graph datasets: graphs of runs as Parquet, an index with the version, and the data card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepsight.dataset.errors import TraceError
from stepsight.dataset.files import digest, new_folder, write_json, write_text
from stepsight.dataset.imported.dataset_index import FORM, INDEX, describe_run
from stepsight.dataset.imported.graph_files import write_graph
from stepsight.dataset.imported.graph_parts import (
    EDGE_NUMBERS,
    NUMBERS,
    TARGETS,
    edge_types,
    kind_names,
)
from stepsight.dataset.imported.imported_run import TracedRun, has_traces, run_folders, run_graphs
from stepsight.dataset.imported.rank_graph import NODE_KINDS

Progress = Callable[[int, int], None]


def make_dataset(collections: Sequence[Path], out: Path, on_run: Progress | None = None) -> dict[str, Any]:
    """Write a dataset of the runs of some collections; returns what ``stepsight dataset --json`` prints.

    Raises:
        TraceError: If a folder is no collection, a run is named twice, or no step was traced.
    """
    folders = [folder for collection in collections for folder in run_folders(collection)]
    where = [folder.resolve() for folder in folders]
    if len(set(where)) < len(where):
        raise TraceError(f"every run must be named once, got {len(where) - len(set(where))} twice")
    _check_out(out)
    runs: list[dict[str, Any]] = []
    warnings: list[str] = []
    with new_folder(out) as part:
        for number, folder in enumerate(folders):
            if not has_traces(folder):
                warnings.append(f"run {folder.name}: only timed, not traced: left out")
                continue
            run = run_graphs(folder)
            if not any(len(graph.steps_s) for graph in run.graphs):
                warnings.append(f"run {run.name}: no traced step, left out")
                continue
            warnings += [f"run {run.name}: {told}" for graph in run.graphs for told in graph.warnings]
            runs.append(_add_run(part / "raw", f"run{number}", run))
            if on_run is not None:
                on_run(number + 1, len(folders))
        if not runs:
            raise TraceError(f"a dataset needs at least one run with a traced step, got none in {collections[0]}")
        version = digest(str(FORM), *sorted(run["group"] for run in runs), *kind_names())
        index = {
            "form": FORM,
            "version": version,
            "features": list(NUMBERS),
            "targets": list(TARGETS),
            "edge_features": list(EDGE_NUMBERS),
            "kinds": list(kind_names()),
            "runs": runs,
        }
        write_json(part / "raw" / INDEX, index)
        told = _process(part) | {"version": version, "runs": len(runs), "warnings": list(dict.fromkeys(warnings))}
        write_text(part / "README.md", _card(told, index))
    return told | {"out": str(out)}


def _check_out(out: Path) -> None:
    """Only a dataset, or nothing, may be replaced."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "raw" / INDEX).is_file())):
        raise TraceError(f"--out must be a new folder or a dataset of before, got {out}: choose another")


def _add_run(raw: Path, folder: str, run: TracedRun) -> dict[str, Any]:
    (raw / folder).mkdir(parents=True)
    stems = [f"rank{graph.rank}" for graph in run.graphs]
    for graph, stem in zip(run.graphs, stems, strict=True):
        write_graph(graph, raw / folder, stem)
    return {"folder": folder, "ranks": stems, "role": run.role, **describe_run(run.name, run.job, run.graphs)}


def _process(root: Path) -> dict[str, Any]:
    """Let PyTorch Geometric process the raw folder, and count what came out."""
    from stepsight.dataset.imported.trace_graphs import TraceGraphs  # and with it PyTorch

    dataset = TraceGraphs(root)
    nodes = {kind: int(dataset._data[kind].x.shape[0]) for kind in (*NODE_KINDS, "stream")}
    edges: Counter[str] = Counter()
    for source, relation, target in edge_types():
        edges[relation] += int(dataset._data[source, relation, target].edge_index.shape[1])
    scopes = Counter(dataset._data.scope)
    return {
        "graphs": len(dataset),
        "step_graphs": scopes["step"],
        "segment_graphs": scopes["segment"],
        "nodes": nodes,
        "edges": dict(edges),
    }


def _card(told: dict[str, Any], index: dict[str, Any]) -> str:
    """The data card."""
    runs = "\n".join(
        f"| {run['run']} | {run['hardware']} | {run['scale']} | {len(run['ranks'])} |" for run in index["runs"]
    )
    nodes = "\n".join(f"| {name} | {count} |" for name, count in told["nodes"].items())
    edges = "\n".join(f"| {name} | {count} |" for name, count in told["edges"].items())
    warnings = "\n".join(f"- {warning}" for warning in told["warnings"]) or "none"
    return f"""# Graphs of traced training steps

Version {told["version"]}: the digest of the traces and of what the features mean. {told["graphs"]} graphs:
{told["step_graphs"]} of steps (one for each rank and step) and {told["segment_graphs"]} of segments (forward, backward,
optimizer).

    from stepsight.dataset import TraceGraphs
    graphs = TraceGraphs("this folder")
    train, validate, test = graphs.split(by="run")

## Runs

| run | hardware | ranks of the job | ranks traced |
|---|---|---|---|
{runs}

## Nodes

| type | nodes |
|---|---|
{nodes}

`x` of ops, collectives and host calls: {", ".join(index["features"])}.
`y`: natural logarithm of seconds alone (median of the signature where nothing ran beside it; NaN where that never was)
and in context. `kind`: index into `kinds`.
`node`: place in the rank's graph, -1 for a collective of another rank. Logarithms of sizes are log(1 + size).

## Edges

| relation | edges |
|---|---|
{edges}

`edge_attr`: {", ".join(index["edge_features"])}.
`distance` counts nodes on one stream. `delay_s` is what passes between the end of the source and the start of the
target where nothing else holds it up.

## How it was made

Durations are as profiled: a profiler slows the host, so gaps between host calls are longer than without it.
Dependencies that a trace does not record are inferred from the order and the times of calls. Graphs of one trace are
never split, and equal traces that were imported twice share `group`.

Warnings: {warnings}
"""
