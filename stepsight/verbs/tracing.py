"""Verbs for traces of any PyTorch job: replay, what-if, dataset, and the import of traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stepsight.dataset.base.errors import StepsightError
from stepsight.verbs.options import Json, answer, path, progress

TRACES = ("kineto", "chakra")  # formats of traces; every other format is a table of measurements


def import_traces(
    format: str, paths: list[Path], out: Path | None, executions: list[Path], job: Path | None, as_json: bool
) -> None:
    """``stepsight import kineto``, and ``stepsight import chakra``."""
    from stepsight.dataset.base.files import check_writable
    from stepsight.dataset.imported.import_ranks import import_chakra, import_ranks, summary
    from stepsight.dataset.imported.imported_run import write_imported
    from stepsight.dataset.job.job import Job
    from stepsight.dataset.readers.placement import Placement
    from stepsight.experiments.reports.trace_reports import import_text

    if out is None:
        raise StepsightError(f"import {format} needs --out: the folder of the collection to write")
    if out.exists() and not out.is_dir():
        raise StepsightError(f"--out must be a new folder or a collection, got the file {out}")
    check_writable(out)
    read = Job.from_file(job) if job is not None else None
    placement = None
    if read is not None:
        degrees = read.parallel
        placement = Placement(devices_per_node=read.cluster.devices_per_node, tp=degrees.tp, dp=degrees.dp)
    if format == "chakra" and executions:
        raise StepsightError("import chakra takes no --et: a Chakra trace is an execution trace with durations")
    told_of = progress("traces read")
    found = import_chakra(paths, told_of) if format == "chakra" else import_ranks(paths, executions, placement, told_of)
    told = summary(found)
    if read is not None:
        from stepsight.experiments.tasks.job_check import check_job

        check_job(read, found.graphs)
    run = write_imported(found.graphs, found.sources, out, read, told["warnings"])
    told |= {"run": run.name, "out": str(out)}
    answer(told, import_text(told), as_json)


def replay_command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", parser=path, help="A run folder, or a collection: all of its runs.")
    ],
    job: Annotated[
        Path | None,
        typer.Option(
            parser=path, help="Job file of the run: also compare the traced step with the program of the job."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay traced steps from durations and dependencies, and compare the replay with the measured steps.

    The replay uses durations and dependencies, but no recorded start times. A small error therefore shows that the
    dependencies of the graph are right. Idle time that no dependency explains is reported as unexplained.

    With --job, ops and collectives of the traced step are compared with those of the job's program. The table lists
    missing, extra and different ones, with counts and seconds. A job that cannot have produced the trace is an error.
    Examples:

        stepsight import kineto traces/ --out runs/theirs
        stepsight replay runs/theirs
        stepsight replay runs/theirs --job job.toml
    """
    from stepsight.experiments.reports.trace_reports import replay_runs, replay_text

    told = replay_runs(run)
    text = replay_text(told)
    if job is not None:
        compared, shown = _beside(run, job)
        told, text = {**told, "job": compared}, f"{text}\n\n{shown}"
    answer(told, text, as_json)


def _beside(run: Path, job: Path) -> tuple[dict[str, Any], str]:
    """Compare a run with the program of its job, as JSON and as text."""
    from stepsight.dataset.imported.imported_run import run_folders, run_graphs
    from stepsight.dataset.job.job import Job
    from stepsight.experiments.tasks.job_check import check_job, compare, comparison_text

    folders = run_folders(run)
    if len(folders) != 1:
        raise StepsightError(f"--job takes one run, got {len(folders)} in {run}: name one folder of its runs/")
    read, graphs = Job.from_file(job), run_graphs(folders[0]).graphs
    check_job(read, graphs)
    compared = compare(read, graphs)
    return compared, comparison_text(compared)


def dataset_command(
    collections: Annotated[
        list[Path], typer.Argument(metavar="DIR…", parser=path, help="Collections or run folders with traces.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", parser=path, help="Folder of the dataset to write.")],
    as_json: Json = False,
) -> None:
    """Make a graph dataset of traced runs: one graph for each rank and step, and one for each segment.

    The folder is a PyTorch Geometric dataset with a data card (`README.md`) and the graphs as Parquet files:

        from stepsight.dataset import TraceGraphs
        graphs = TraceGraphs("data/mine")

    Example:

        stepsight dataset runs/mine runs/theirs --out data/mine
    """
    from stepsight.dataset.imported.graph_dataset import make_dataset
    from stepsight.experiments.reports.trace_reports import dataset_text

    told = make_dataset(collections, out, on_run=progress("runs read"))
    answer(told, dataset_text(told), as_json)


def what_if_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", parser=path, help="A run folder, or a collection of one run.")],
    *,
    faster: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT=FACTOR",
            help="Divide durations by a factor, for example gemm=1.5; a factor below 1 makes them longer. WHAT is a "
            "kind or family of ops, a kind of collective, `communication`, `host`, or part of a kernel's name. "
            "Repeatable.",
        ),
    ] = None,
    no_host: Annotated[bool, typer.Option("--no-host", help="The host takes no time.")] = False,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Kernel launches take no time; loading data still does.")
    ] = False,
    remove_straggler: Annotated[
        bool, typer.Option("--remove-straggler", help="The slowest rank computes as fast as the median of the others.")
    ] = False,
    batch: Annotated[str, typer.Option(help="Size of micro-batches relative to the trace, for example 2x.")] = "1x",
    replicas: Annotated[
        int, typer.Option(min=1, help="Multiply the number of ranks by this; collectives over all ranks grow with it.")
    ] = 1,
    bucket_mb: Annotated[
        float, typer.Option(min=0, help="Merge gradient all-reduces into buckets of this many MB.")
    ] = 0.0,
    fabric: Annotated[str, typer.Option(help="Replace the fabric: a name or a file.")] = "",
    hardware: Annotated[str, typer.Option(help="Replace the device: a name, the beginning of one, or a file.")] = "",
    on: Annotated[
        str, typer.Option(help="The traced device, if the trace does not name a known one: a name or a file.")
    ] = "",
    on_fabric: Annotated[str, typer.Option(help="The traced fabric, if it is not the device's usual one.")] = "",
    as_json: Json = False,
) -> None:
    """Replay a traced step with changes: faster kernels, no host, another batch, bucket size, scale, fabric or device.

    For another batch, fabric or device, each duration is multiplied by the ratio of two predictions: after and before
    the change. The answer states for which share of the device's time this was possible; the rest is scaled by a
    constant factor. Examples:

        stepsight what-if runs/theirs --faster gemm=1.5 --cuda-graph
        stepsight what-if runs/theirs --hardware h100-sxm --batch 2x
    """
    from stepsight.experiments.reports.trace_reports import what_if_text
    from stepsight.experiments.tasks.what_if import Questions, what_if

    questions = Questions(
        faster=dict(_factor(each) for each in faster or ()),
        no_host=no_host,
        cuda_graph=cuda_graph,
        remove_straggler=remove_straggler,
        batch=_times(batch),
        replicas=replicas,
        bucket_mb=bucket_mb,
        fabric=fabric,
        hardware=hardware,
        on=on,
        on_fabric=on_fabric,
    )
    told = what_if(run, questions)
    answer(told, what_if_text(told), as_json)


def _factor(text: str) -> tuple[str, float]:
    """``gemm=1.5`` as a name and a number."""
    name, _, number = text.rpartition("=")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not name or not 0 < factor < 1e9:
        raise StepsightError(f"--faster takes WHAT=FACTOR with a factor > 0, as in gemm=1.5, got {text!r:.80}")
    return name, factor


def _times(text: str) -> float:
    """``2x`` as a number."""
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise StepsightError(f"--batch takes a factor > 0, as in 2x, got {text!r:.80}")
    return factor
