"""Folders of graph datasets: graphs of runs as Parquet, an index with the version, and the data card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from stepsight.dataset.base.bounded import parsing
from stepsight.dataset.base.caching import without_collection
from stepsight.dataset.base.errors import TraceError, printable, shorten
from stepsight.dataset.base.files import digest, digest_files, new_folder, preset, read_json, write_json, write_text
from stepsight.dataset.graph.graph_table import (
    DTYPES,
    EDGE_NUMBERS,
    NUMBERS,
    TARGETS,
    GraphTable,
    edge_types,
    kind_names,
)
from stepsight.dataset.graph.program import NODE_KINDS, Program
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.job.job import Job
from stepsight.dataset.runs import run_folder
from stepsight.dataset.trace_graphs.call_segments import UnmeasuredRun, call_segments
from stepsight.dataset.trace_graphs.traced_graphs import segment_graphs, step_graphs

Progress = Callable[[int, int], None]
INDEX = "dataset.json"
SCOPES = ("step", "segment")
_OF_RUN = ("run", "model", "strategy", "scale", "hardware", "group", "timed_s")
FORM = 7  # version of features and relations: changing it makes every dataset a new version


def make_dataset(
    collections: Sequence[Path],
    out: Path,
    on_run: Progress | None = None,
    scopes: Sequence[str] = SCOPES,
    unmeasured: Sequence[UnmeasuredRun] = (),
) -> dict[str, Any]:
    """Write a dataset of the runs of some collections; return the output of ``stepsight dataset --json``.

    ``on_run`` is told how many runs are done, of how many; graphs of ``unmeasured`` runs have no targets.  Raises
    ``TraceError`` if ``out`` is another folder, a folder is no collection, a run is named twice, or no step was traced.
    """
    ours = out.is_dir() and (not any(out.iterdir()) or any(map(Path.is_file, (out / INDEX, out / "raw/runs.json"))))
    if out.exists() and not ours:
        raise TraceError(f"--out must be a new folder or a dataset of before, got {out}: choose another")
    folders = [folder for collection in collections for folder in run_folder.run_folders(collection)]
    table, runs, warnings = read_graph_table(folders, scopes, on_run, unmeasured)
    version = digest(str(FORM), "observed steps left out", *sorted(run["group"] for run in runs), *kind_names())
    told = _counts(table) | {"version": version, "runs": len(runs), "warnings": warnings}
    index = {
        "form": FORM,
        "version": told["version"],
        "features": list(NUMBERS),
        "targets": list(TARGETS),
        "edge_features": list(EDGE_NUMBERS),
        "kinds": list(kind_names()),
        "dtypes": list(DTYPES),
        "runs": runs,
    }
    with new_folder(out) as part:
        table.save(part)
        write_json(part / INDEX, index)
        write_text(part / "README.md", _card(told, index))
    return told | {"out": str(out)}


def _counts(table: GraphTable) -> dict[str, Any]:
    """Numbers of graphs by scope, and of nodes and edges by kind."""
    edges: Counter[str] = Counter()
    for key in edge_types():
        edges[key[1]] += len(table.rows[key]["graph"])
    return {
        "graphs": len(table),
        "step_graphs": table.about["scope"].count("step"),
        "segment_graphs": table.about["scope"].count("segment"),
        "nodes": {kind: len(table.rows[kind]["graph"]) for kind in (*NODE_KINDS, "stream")},
        "edges": dict(edges),
    }


def describe_dataset(folder: Path) -> dict[str, Any]:
    """What a dataset holds, as ``make_dataset`` tells it; raises ``TraceError`` if the folder is none."""
    index = read_index(folder)
    return {"dataset": str(folder), **_counts(GraphTable.load(folder)), "version": index["version"],
            "runs": len(index["runs"])}  # fmt: skip


@without_collection()
def read_graph_table(
    folders: Sequence[Path],
    scopes: Sequence[str] = SCOPES,
    on_run: Progress | None = None,
    unmeasured: Sequence[UnmeasuredRun] = (),
) -> tuple[GraphTable, list[dict[str, Any]], list[str]]:
    """Graphs of traced runs, then of unmeasured ones; what is known of each run that has any; and warnings.

    ``source`` of a graph is the number of its run.  Raises ``TraceError`` as ``make_dataset``.
    """
    where = [folder.resolve() for folder in folders]
    if len(set(where)) < len(where):
        raise TraceError(f"every run must be named once, got {len(where) - len(set(where))} twice")
    tables, runs, about_runs = list[GraphTable](), list[dict[str, Any]](), dict[str, list[str]]()
    every: list[Path | UnmeasuredRun] = [*folders, *unmeasured]
    for number, run in enumerate(every):
        if isinstance(run, Path) and not run_folder.has_traces(run):
            about_runs.setdefault("only timed, not traced: left out", []).append(run.name)
            continue
        if isinstance(run, Path):
            found, about = _run_tables(run, scopes, about_runs)
        else:
            group = digest(run.name, *(str(node.work) for graph in run.graphs for node in graph.nodes))
            about = describe_run(run.name, run.job, run.graphs) | {"group": group, "role": ""}
            about["ranks"] = [graph.rank for graph in run.graphs]
            found = _tables(run.graphs, run.segments if "segment" in scopes else (), scopes)
        if not found:
            about_runs.setdefault("no traced step, left out", []).append(run.name)
            continue
        for table in found:
            table.about |= {name: [about.get(name, number)] * len(table) for name in (*_OF_RUN, "role", "source")}
        tables += found
        runs.append({"source": number} | about)
        if on_run is not None:
            on_run(number + 1, len(every))
    if not tables:
        raise TraceError(f"a dataset needs at least one run with a traced step, got none of {len(folders)}")
    warnings = []
    for text, names in about_runs.items():
        own = list(dict.fromkeys(names))
        warnings.append(f"run{'s' * (len(own) > 1)} {shorten(', '.join(own), 200)}: {text}")
    compiled = [run["run"] for run in runs if run.get("compiled")]
    if 0 < len(compiled) < len(runs):
        warnings.append(
            f"eager and compiled runs are mixed, whose ops take other times; compiled: {', '.join(compiled)}"
        )
    return GraphTable.joined(tables), runs, warnings


def _run_tables(
    folder: Path, scopes: Sequence[str], about_runs: dict[str, list[str]]
) -> tuple[list[GraphTable], dict[str, Any]]:
    """Graphs of a run, none if no step of it was traced, and its metadata; ``about_runs``: runs by warning."""
    trace = None if run_folder.is_imported(folder) else run_folder.read_run(folder, executions="step" in scopes)
    run = run_folder.run_graphs(folder) if trace is None else run_folder.traced_run(trace)
    if not any(len(graph.steps_s) for graph in run.graphs):
        return [], {}
    for graph in run.graphs:
        for each in graph.warnings:
            about_runs.setdefault(each, []).append(run.name)
    if trace is None or "step" in scopes:
        timed_s = run_folder.read_imported(folder).timed_s if trace is None else run.iteration_s
        about = describe_run(run.name, run.job, run.graphs, timed_s)
    else:  # by its manifest, without its graphs
        own = trace.manifest
        files = [own.folder / name for rank in sorted(own.traces) for name in sorted(own.traces[rank].values())]
        timed_s, where = own.iteration_time_s if own.whole else 0.0, own.job.hardware_name
        about = _about(own.name, _of_job(own.job), own.world_size, where, digest_files(files), timed_s)
    segments = () if "segment" not in scopes else trace.segments() if trace else call_segments(run.graphs, run.name)
    about |= {"role": run.role, "compiled": trace is not None and trace.manifest.compiled}
    return _tables(run.graphs, segments, scopes), about | {"ranks": [graph.rank for graph in run.graphs]}


def _tables(graphs: Sequence[Program], segments: Sequence[TracedSegment], scopes: Sequence[str]) -> list[GraphTable]:
    found = [step_graphs(graphs)] if "step" in scopes else []
    found += [segment_graphs(segments)] if segments else []
    slowed = {(graph.rank, step) for graph in graphs for step in graph.slowed}
    for table in found:
        steps = zip(table.about["rank"], table.about["step"], strict=True)
        table.about["observed"] = [each in slowed for each in steps]
    return found


def _cell(text: str) -> str:
    """A text of a trace in Markdown: names may hold HTML, bars and control characters."""
    return escape(printable(text).replace("\n", " "), quote=False).replace("|", "&#124;")


def _card(told: dict[str, Any], index: dict[str, Any]) -> str:
    """The data card."""
    runs = "\n".join(
        f"| {_cell(run['run'])} | {_cell(run['hardware'])} | {run['scale']} | {len(run['ranks'])} |"
        for run in index["runs"]
    )
    counts = {kind: "\n".join(f"| {name} | {n} |" for name, n in told[kind].items()) for kind in ("nodes", "edges")}
    names = {name: ", ".join(index[name]) for name in ("features", "dtypes", "edge_features")}
    warnings = "\n".join(f"- {_cell(warning)}" for warning in told["warnings"]) or "none"
    tables = counts | names | {"runs": runs, "warnings": warnings}
    return str(preset("dataset_card.toml")["card"]).format(**told | tables)


def describe_run(name: str, job: Job | None, graphs: Sequence[Program], timed_s: float = 0.0) -> dict[str, Any]:
    """Metadata of a run, which splits use. Without a job, model and strategy are derived from its ops.

    ``timed_s``: a step without a profiler; 0 if not timed.
    """
    one, group = graphs[0], digest(*(part.tobytes() for graph in graphs for part in (graph.start_s, graph.duration_s)))
    if job is None:
        model = digest(*sorted({work.kind for work in one.works}), *sorted(one.names))
        what = model, digest(str(one.world_size), *sorted({str(ranks or each) for each, ranks in one.groups}))
    else:
        what = _of_job(job)
    return _about(name, what, one.world_size, one.device_name or one.device, group, timed_s)


def _about(name: str, what: tuple[str, str], world_size: int, *more: Any) -> dict[str, Any]:
    return dict(zip(_OF_RUN, (name, *what, str(world_size), *more), strict=True))


def _of_job(job: Job) -> tuple[str, str]:
    tables = job.to_dict()
    model = job.model.name or digest(str(sorted(tables["model"].items())))
    return model, digest(str(sorted(tables["parallel"].items())))


def read_index(root: Path) -> dict[str, Any]:
    """Index of a dataset; raises ``TraceError`` if the folder holds none, or one of another form."""
    path = Path(root) / INDEX
    with parsing(f"{root} must be a dataset that `stepsight dataset` made", TraceError):
        index = read_json(path)
        if index["form"] != FORM:
            raise ValueError(f"form must be {FORM}, got {index['form']!r:.40}: make it again")
        if tuple(index["kinds"]) != kind_names() or tuple(index["dtypes"]) != DTYPES:
            raise ValueError("its kinds of ops are not those of this version")
    return dict(index)
