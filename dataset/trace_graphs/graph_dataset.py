"""Folders of graph datasets: graphs of runs as Parquet, an index with the version, and the data card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepsight.dataset.base.caching import without_collection
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import digest, new_folder, write_json, write_text
from stepsight.dataset.graph.graph_files import write_graph
from stepsight.dataset.graph.program import NODE_KINDS
from stepsight.dataset.runs.run_folder import (
    has_traces,
    is_imported,
    read_imported,
    read_run,
    run_folders,
    run_graphs,
    traced_run,
)
from stepsight.dataset.trace_graphs.call_segments import call_segments
from stepsight.dataset.trace_graphs.graph_schema import DTYPES, EDGE_NUMBERS, NUMBERS, TARGETS, edge_types, kind_names
from stepsight.dataset.trace_graphs.segment_parts import write_segments
from stepsight.dataset.trace_graphs.trace_graphs import FORM, INDEX, SCOPES, describe_own_run, describe_run

Progress = Callable[[int, int], None]


@without_collection()
def make_dataset(
    collections: Sequence[Path], out: Path, on_run: Progress | None = None, scopes: Sequence[str] = SCOPES
) -> dict[str, Any]:
    """Write a dataset of the runs of some collections; return the output of ``stepsight dataset --json``.

    Args:
        collections: Collections, or run folders.
        out: Folder of the dataset.
        on_run: Told how many runs are done, of how many.
        scopes: What graphs are of: ``step``, ``segment`` or both.

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
            run = _add_run(part / "raw" / f"run{number}", folder, scopes, warnings)
            if run is None:
                warnings.append(f"run {folder.name}: no traced step, left out")
                continue
            runs.append({"folder": f"run{number}", "source": number} | run)
            if on_run is not None:
                on_run(number + 1, len(folders))
        if not runs:
            raise TraceError(f"a dataset needs at least one run with a traced step, got none in {collections[0]}")
        version = digest(str(FORM), "observed steps left out", *sorted(run["group"] for run in runs), *kind_names())
        index = {
            "form": FORM,
            "version": version,
            "features": list(NUMBERS),
            "targets": list(TARGETS),
            "edge_features": list(EDGE_NUMBERS),
            "kinds": list(kind_names()),
            "dtypes": list(DTYPES),
            "runs": runs,
        }
        write_json(part / "raw" / INDEX, index)
        told = _process(part) | {"version": version, "runs": len(runs), "warnings": list(dict.fromkeys(warnings))}
        write_text(part / "README.md", _card(told, index))
    return told | {"out": str(out)}


def _check_out(out: Path) -> None:
    """Check that only a dataset, or nothing, is replaced."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "raw" / INDEX).is_file())):
        raise TraceError(f"--out must be a new folder or a dataset of before, got {out}: choose another")


def _add_run(raw: Path, folder: Path, scopes: Sequence[str], warnings: list[str]) -> dict[str, Any] | None:
    """Write a run into the dataset; return its metadata, None if no step of it was traced."""
    trace = None if is_imported(folder) else read_run(folder, executions="step" in scopes)
    run = run_graphs(folder) if trace is None else traced_run(trace)
    if not any(len(graph.steps_s) for graph in run.graphs):
        return None
    raw.mkdir(parents=True)
    warnings += [f"run {run.name}: {each}" for graph in run.graphs for each in graph.warnings]
    told: dict[str, Any] = {"ranks": [], "segments": False, "role": run.role}
    if trace is None or "step" in scopes:
        timed_s = read_imported(folder).timed_s if trace is None else run.iteration_s
        told |= describe_run(run.name, run.job, run.graphs, timed_s)
    else:
        told |= describe_own_run(trace.manifest)
    if "step" in scopes:
        told["ranks"] = [f"rank{graph.rank}" for graph in run.graphs]
        for graph, stem in zip(run.graphs, told["ranks"], strict=True):
            write_graph(graph, raw, stem)
    if "segment" in scopes:
        found = call_segments(run.graphs, run.name) if trace is None else trace.segments()
        told["segments"] = bool(found)
        if found:
            write_segments(found, raw)
    return told


def _process(root: Path) -> dict[str, Any]:
    """Let PyTorch Geometric process the raw folder, and count the graphs."""
    from stepsight.dataset.trace_graphs.trace_graphs import TraceGraphs  # and with it PyTorch

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


_HOW = """## How it was made

Durations of steps are as profiled: a profiler slows the host, so gaps between host calls are longer than without it.
In segments of runs that `stepsight collect` made, its overhead is taken off; seconds of an op on a CPU hold the time of
the host before it, and a collective takes as long as on the rank that came last. Dependencies that a trace does not
record are inferred from the order and the times of calls. Steps that an execution-trace observer slowed are left out;
their data dependencies are those of the other steps. Graphs of one trace are never split, and equal traces that
were imported twice share `group`; graphs in which the same ops took the same times share `digest`.
"""


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
optimizer: what predictions are made of, and what `stepsight train` reads).

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
`node`: place in the rank's graph (in a segment, in the order of issue), -1 for a collective of another rank.
`signature`: exact sizes; of an op the index of its type in {", ".join(index["dtypes"])}, then its dims; of a collective
its bytes, ranks, and ranks on a node. `share`: part of the signature's time that a node takes. `launch`: seconds of the
host from the launch before, and calls recorded in them, both as profiled. `beside`: seconds of an op in which a
collective of its rank ran. `call`: of an op that the host runs itself, index into the graph's `calls`, and `recorded`:
calls that the profiler recorded within it. Logarithms of sizes are log(1 + size).

## Edges

| relation | edges |
|---|---|
{edges}

`edge_attr`: {", ".join(index["edge_features"])}.
`distance` counts nodes on one stream. `delay_s` is what passes between the end of the source and the start of the
target where nothing else holds it up.

{_HOW}
Warnings: {warnings}
"""
