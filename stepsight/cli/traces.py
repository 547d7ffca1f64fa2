"""Verbs for traces of any PyTorch job: import, replay, what-if, dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepsight.cli.options import Answer, Written, progress
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.registry import did_you_mean
from stepsight.experiments.tasks.settings import TraceChanges


def import_command(
    format: str,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…")],
    *,
    out: Path | None = None,
    et: list[Path] | None = None,
    job: Path | None = None,
) -> Answer:
    """Import traces of any PyTorch job into a collection, or published measurements into a table.

    Traces become graphs of ops, streams and dependencies, which `replay`, `show`, `dataset` and `train` read. A trace
    needs no annotations and no job file. For a table, the summary lists its ops, sizes, devices and software, and the
    rows that were left out, in common units and names. The shipped predictors are trained on such tables
    (`python -m stepsight.training.shipped.catalogue`). Examples:

        stepsight import kineto examples/collection/runs/gpt-2L-192h*/rank?.kineto.json.gz --out runs/theirs
        stepsight import chakra traces/chakra.*.et --out runs/theirs
        stepsight import nccl-tests logs/ --out collectives.parquet

    Args:
        format: Traces: kineto (PyTorch's profiler), chakra (execution traces with durations, .et or JSON), or a
            registered format of your own. Tables: aiconfigurator, neusight, vidur, simumax, nccl-tests (logs or
            parsed), vtrain, aicb, or csv (your own, with columns op, dims (4096x4096x1024), dtype, microseconds).
        paths: Files of that format, or a folder. Traces: one file for each rank. Tables: a single file.
        out: Traces: the collection to write. Tables: the file to write (.parquet).
        et: Traces: execution trace of a rank, for data dependencies. Repeatable.
        job: Traces: job file of the run, if you have it; it must match.
    """
    from stepsight.dataset.traces.import_traces import TRACE_READERS

    if format in TRACE_READERS:
        return _import_traces(format, paths, out, et or [], job)
    from stepsight.dataset.tables import FORMATS, check_table_output, read_table, summary, summary_text

    traces, tables = (", ".join(registry.names()) for registry in (TRACE_READERS, FORMATS))
    if format not in FORMATS:
        near, known = did_you_mean(format, f"{traces}, {tables}".split(", ")), f"({traces}) or of tables ({tables})"
        raise StepsightError(f"the format must be of traces {known}, got {format!r:.80}{near}")
    if len(paths) != 1:
        raise StepsightError(f"import {format} takes one file or folder, got {len(paths)}")
    if et or job is not None:
        raise StepsightError(f"--et and --job belong to traces ({traces}), got format {format!r:.80}")
    if out is None:
        told = summary(read_table(format, paths[0]))
        return Answer(told, summary_text(told))
    check_table_output(format, paths[0], out)
    found = read_table(format, paths[0])
    if not len(found):
        why = "; ".join(f"{count} times: {reason}" for reason, count in found.skipped.items()) or "it has no rows"
        raise StepsightError(f"no measurement of {paths[0]} could be read, so {out} was not written ({why})")
    found.to_parquet(out)
    told = summary(found)
    text = f"{summary_text(told)}\n\nwrote {len(found)} measurements to {out}"
    return Answer({**told, "out": str(out)}, text)


def _import_traces(
    format: str, paths: list[Path], out: Path | None, executions: list[Path], job: Path | None
) -> Answer:
    from stepsight.dataset.base.files import check_writable
    from stepsight.dataset.graph.rank_trace import Placement
    from stepsight.dataset.runs.run_folder import write_imported
    from stepsight.dataset.traces.import_traces import import_ranks, summary
    from stepsight.experiments.reports.run_texts import import_text

    if out is None:
        raise StepsightError(f"import {format} needs --out: the folder of the collection to write")
    check_writable(out)
    read = placement = None
    if job is not None:
        from stepsight.dataset.job.job import Job

        read = Job.from_file(job)
        degrees = read.parallel
        placement = Placement(devices_per_node=read.cluster.devices_per_node, tp=degrees.tp, dp=degrees.dp)
    found = import_ranks(paths, executions, placement, progress("traces read"), form=format)
    if read is not None:
        from stepsight.experiments.questions.job_check import check_job

        check_job(read, found.graphs)
    told = summary(found)
    run = write_imported(found.graphs, found.sources, out, read, told["warnings"])
    told |= {"run": run.name, "out": str(out)}
    return Answer(told, import_text(told))


def replay_command(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    *,
    job: Path | None = None,
    timeline: Annotated[Path | None, Written((".json",), rb'\{"displayTimeUnit":')] = None,
) -> Answer:
    """Replay traced steps from durations and dependencies, and compare the replay with the measured steps.

    The replay uses durations and dependencies, but no recorded start times. A small error therefore shows that the
    dependencies of the graph are right. Idle time that no dependency explains is reported as unexplained.

    With --job, ops and collectives of the traced step are compared with those of the job's program. The table lists
    missing, extra and different ones, with counts and seconds. A job that cannot have produced the trace is an error.

    The answer also has the causes of a slow step, the critical path, kernels by name, and delays of launches. Examples:

        stepsight replay examples/collection
        stepsight replay runs/theirs --job job.toml
        stepsight replay runs/theirs --timeline step.json

    Args:
        run: A run folder, or a collection: all of its runs.
        job: Job file of the run: also compare the traced step with the program of the job.
        timeline: Write the traced step to this file for ui.perfetto.dev, annotated: critical path, causes of idle time,
            outstanding launches, predicted durations. One run only.
    """
    from stepsight.dataset.job.job import Job
    from stepsight.dataset.runs.run_folder import run_folders, run_graphs
    from stepsight.experiments.questions.job_check import check_job, compare, comparison_text
    from stepsight.experiments.questions.traced_runs import replay_runs, replay_text, write_timeline

    told = replay_runs(run)
    text = replay_text(told)
    if timeline is not None:
        told["timeline"] = write_timeline(run, timeline)
        text += f"\n\n{told['timeline']}"
    if job is not None:
        folders = run_folders(run)
        if len(folders) != 1:
            raise StepsightError(f"--job takes one run, got {len(folders)} in {run}: name one folder of its runs/")
        read, graphs = Job.from_file(job), run_graphs(folders[0]).graphs
        check_job(read, graphs)
        compared = compare(read, graphs)
        told, text = {**told, "job": compared}, f"{text}\n\n{comparison_text(compared)}"
    return Answer(told, text)


def dataset_command(
    collections: Annotated[list[Path] | None, typer.Argument(metavar="DIR…")] = None,
    *,
    out: Annotated[Path, "-o"],
    job: list[Path] | None = None,
) -> Answer:
    """Make a graph dataset of traced runs: one graph for each rank and step, and one for each segment.

    Jobs and captured scripts give the same graphs without targets, for a network that was trained on the others.

    The folder is a PyTorch Geometric dataset with a data card (`README.md`) and the graphs as Parquet files:

        from stepsight.dataset import TraceGraphs
        graphs = TraceGraphs("data/mine")

    Example:

        stepsight dataset examples/collection --out data/mine
        stepsight dataset --job examples/local-gpt-tp2.toml --out data/asked

    Args:
        collections: Collections or run folders with traces.
        out: Folder of the dataset to write.
        job: A job file, or the folder of a captured script. Repeatable.
    """
    from stepsight.dataset.trace_graphs.graph_dataset import make_dataset
    from stepsight.experiments.reports.run_texts import dataset_text
    from stepsight.simulator.replay.job_programs import unmeasured_run

    if not collections and not job:
        raise StepsightError("dataset needs collections or run folders, or jobs with --job FILE")
    unmeasured = [unmeasured_run(path) for path in job or ()]
    told = make_dataset(collections or (), out, on_run=progress("runs read"), unmeasured=unmeasured)
    return Answer(told, dataset_text(told))


def what_if_command(run: Annotated[Path, typer.Argument(metavar="RUN")], *, changes: TraceChanges) -> Answer:
    """Replay a traced step with changes: faster kernels, no host, another batch, bucket size, scale, fabric or device.

    For another batch, fabric or device, each duration is multiplied by the ratio of two predictions: after and before
    the change. The answer states for which share of the device's time this was possible; the rest is scaled by a
    constant factor. Examples:

        stepsight what-if examples/collection/runs/gpt-2L-192h* --faster gemm=1.5
        stepsight what-if runs/theirs --hardware h100-sxm --batch 2x

    Args:
        run: A run folder, or a collection of one run.
    """
    from stepsight.experiments.questions.what_if import what_if, what_if_text

    told = what_if(run, changes)
    return Answer(told, what_if_text(told))
