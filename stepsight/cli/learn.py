"""Verbs that learn predictors, and compare predictions with measurements: train, evaluate, calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepsight.cli.files import LearnedSource, Plot
from stepsight.cli.options import Answer, progress, refuse_given
from stepsight.dataset.base.errors import StepsightError

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

_NOT_FOR_TABLES = "must be left out for a table of ops and collectives (.parquet) and for a collection"
_NOT_FOR_RUNS = "must be left out for a table of runs"
Runs = Annotated[
    Path,
    typer.Argument(
        help="Table of measured runs (.csv or .csv.gz), one row for each run, as examples/runs.csv; "
        "`evaluate --explain-columns` lists its columns. `evaluate` also takes a collection."
    ),
]
RowSource = Annotated[
    str, "--source", typer.Option(help="Use only rows whose source contains this text or matches this pattern.")
]


def train_command(
    called: typer.Context,
    sources: Annotated[list[Path], typer.Argument(metavar="SOURCE…")],
    *,
    out: Annotated[Path, "-o"],
    hardware: str | None = None,
    like: str = "",
    software: str = "",
    fabric: str = "",
    samples: Annotated[int, typer.Option(min=0)] = 0,
    context: str = "auto",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    tracking_uri: str | None = None,
) -> Answer:
    """Train a predictor on collections, or on tables of a device's ops and collectives; record it in MLflow.

    Collections train regressors for ops and collectives, and a graph neural network that corrects them in context. It
    contains a table by kind and phase and a network on an op's own features; runs held back say how much each counts.
    Tables train only the regressors. A family of ops with thousands of rows is trained on its own rows. A family with
    fewer rows starts from the efficiency of the shipped predictors' devices, and its rows correct it. A fifth of the
    shapes is held out to judge the predictor (`held_out` in --json). Examples:

        stepsight train examples/collection --out runs/predictor
        stepsight import aiconfigurator data/gb200 --out gb200.parquet
        stepsight train gb200.parquet --like b200-sxm --out gb200
        stepsight train mine.parquet --hardware my-gpu.toml --out mine

    Args:
        sources: Collection folders written by `stepsight collect` or `import`, or tables of ops and collectives of one
            device (.parquet) written by `stepsight import`.
        out: Folder of the predictor to write.
        hardware: Collections: the measured device's name in [cluster] hardware of jobs (default: local-cpu). Tables: a
            preset, or a .toml or .json file with the device's facts (default: the device of the rows).
        like: Tables: the shipped predictor of the most similar device, for example b200-sxm. Default: all of them.
        software: Tables: the software to predict for, or a part of its name. Default: the software of most rows.
        fabric: Tables: the fabric for rows that name none: a name or a .toml file.
        samples: Tables: learn from at most this many shapes of each family, drawn at random. 0: all shapes.
        context: Collections: correction of ops in context: none, table (by kind and phase), features (own features
            too), graph (messages of neighbours too), or auto: as much of each as helps on runs held back.
        seed: Random seed.
        tracking_uri: MLflow tracking URI. Default: SQLite beside the folder of the predictor.
    """
    from stepsight.experiments.reports.job_texts import training_report

    tables = [source for source in sources if source.suffix == ".parquet"]
    if tables and len(tables) < len(sources):
        raise StepsightError("train takes collections or tables (.parquet), got both: train one predictor on each")
    shared: dict[str, Any] = {"seed": seed, "tracking_uri": tracking_uri}
    facts: dict[str, Any] = {"like": like, "software": software, "fabric": fabric, "samples": samples}
    if tables:
        from stepsight.training.fitting.train_tables import train_tables

        refuse_given(called, ("context",), "is for collections, got tables (.parquet): leave it out")
        predictor = train_tables(tables, out, hardware=hardware or "", **facts, **shared)
    else:
        from stepsight.training.fitting.train_runs import train

        refuse_given(called, facts, "is for tables (.parquet), got collections: leave it out")
        shared |= {} if hardware is None else {"hardware_name": hardware}
        predictor = train(sources, out, progress=True, context=context, **shared)
    report = training_report(predictor, out)
    return Answer(report, report["text"])


def _prints(name: str) -> Any:
    """The option of a flag that prints a text about tables of runs and ends."""

    def callback(wanted: bool) -> None:
        if wanted:
            from stepsight.experiments.evaluation import runs_table

            typer.echo(getattr(runs_table, name)())
            raise typer.Exit

    return typer.Option(callback=callback, is_eager=True)


def evaluate_command(
    context: typer.Context,
    runs: Runs,
    *,
    source: LearnedSource,
    rows: RowSource = "*",
    calibrate: str | None = None,
    plot: Plot = None,
    worst: Annotated[int, typer.Option(min=0)] = 5,
    groups: bool = False,
    baseline: str = "",
    fabric: str | None = None,
    software: str = "",
    explain_columns: Annotated[bool, _prints("explanation")] = False,
    template: Annotated[bool, _prints("template")] = False,
) -> Answer:
    """Compare predictions with measured runs: errors, ranks, regret and coverage per source.

    For a table of ops and collectives that `stepsight import` wrote (.parquet), errors are printed by family, software,
    kind, size and number of ranks. For a collection, its measured runs are compared with their predictions.

    Without --predictor, each row is predicted by the shipped predictor for its hardware; if there is none, by a
    roofline. Two simple baselines are printed too: one utilisation (MFU) fitted to each source, and the smallest run of
    a series scaled up. Rows that cannot be expressed as a job, and rows that the predictor was fitted on, are left out
    and counted by reason. If no row remains, the exit code is 2. Examples:

        stepsight evaluate examples/runs.csv --plot runs.png
        stepsight evaluate published_runs.csv.gz --calibrate 8gpus
        stepsight evaluate collectives.parquet --fabric cluster.toml
        stepsight evaluate runs/heldout --predictor runs/predictor

    Args:
        calibrate: Also calibrate twice and judge by the larger runs: once on each source's runs of at most this many
            devices (for example 8gpus), once on the smallest runs of each series.
        plot: Plot predicted over measured times to this file (.png, .svg).
        worst: Number of worst rows to show with their breakdown.
        groups: Show every group of runs that differ only in strategy.
        baseline: Also print errors and regret of these simple models on the same rows: some of roofline, analytic
            (closed form of planners) and mfu (one utilisation for each chip and precision), separated by commas.
        fabric: For a table of collectives: the fabric of the measured cluster, a name or a .toml file. Default: the
            fabric that each row names.
        software: For a table of ops and collectives: take only rows whose software contains this text. Default: all
            that the predictor knows.
        explain_columns: Explain the columns of a table of runs.
        template: Print a table of runs to fill in, with an example row.
    """
    from stepsight.experiments.evaluation.error_metrics import predictor_by_hardware

    if runs.suffix == ".parquet" or runs.is_dir():
        refuse_given(context, ("calibrate", "plot", "rows", "groups", "baseline"), _NOT_FOR_TABLES)
        return _judge_measurements(runs, source.load(), fabric, software)
    refuse_given(context, ("fabric", "software"), _NOT_FOR_RUNS)
    from stepsight.experiments.calibration.calibrate_runs import FITTED_ON, SPLITS, calibrate_small, read_most_gpus
    from stepsight.experiments.evaluation.baselines import baseline_figures, baselines_text, read_baselines
    from stepsight.experiments.evaluation.evaluate import evaluate, evaluation_text
    from stepsight.experiments.reports.plots import plot_published_runs

    most_gpus = None if calibrate is None else read_most_gpus(calibrate)
    names, predictor = read_baselines(baseline) if baseline else (), source.load()
    result = evaluate(runs, predictor, source=rows, on_row=progress("rows predicted"))
    if plot is not None:
        plot_published_runs(result.points, plot, "published runs")
    value, shown, judges = result.to_dict(), {}, predictor_by_hardware(predictor)
    if most_gpus is not None:
        for name, set_of in SPLITS.items():
            on_set = progress(f"sources calibrated, {name}")
            value[name] = calibrate_small(result, judges, most_gpus, set_of, on_set)
            shown[FITTED_ON[name].format(most_gpus)] = value[name]
    text = evaluation_text(result, worst, shown, groups=groups)
    if names:
        value["baselines"] = baseline_figures(result.scored, judges, names)
        text += f"\n\n{baselines_text(value['baselines'])}"
    return Answer(value, text)


def _judge_measurements(path: Path, predictor: Predictor | str | None, fabric: str | None, software: str) -> Answer:
    """Errors on a table of ops and collectives, or on a collection."""
    from stepsight.dataset.hardware.hardware import find_fabric
    from stepsight.dataset.tables import Measurements
    from stepsight.experiments.evaluation.error_metrics import predictor_by_hardware
    from stepsight.experiments.evaluation.table_errors import judge_collection, judge_table, table_errors_text

    if path.is_dir():
        told = judge_collection(path, predictor)
        return Answer(told, told["text"])
    links, judges = None if fabric is None else find_fabric(fabric), predictor_by_hardware(predictor)
    judged = judge_table(Measurements.from_parquet(path), judges, links, progress("rows predicted"), software=software)
    return Answer(judged.to_dict(), table_errors_text(judged))


def _to_correct(named: Path, runs: Path) -> Predictor:
    """The predictor to correct; ``physics``: the shipped one of the only device of a table of runs."""
    from stepsight.dataset.hardware.hardware import canonical_hardware
    from stepsight.experiments.evaluation.runs_table import read_runs_table
    from stepsight.training.prediction.prediction import asked_predictor, is_word
    from stepsight.training.tracking.tracking import load_predictor

    if not is_word(named):
        return load_predictor(named)
    rows = read_runs_table(runs) if runs.is_file() and runs.suffix != ".parquet" else []
    devices = sorted({canonical_hardware(row.text("hardware")) for row in rows if not row.wrong})
    if len(devices) == 1 and (learned := asked_predictor(devices[0], named)) is not None:
        return learned
    on = f"runs on {', '.join(devices) or 'devices that it does not name'}"
    raise StepsightError(f"calibrate corrects the predictor of one device: name it, got {named} and {on}")


def calibrate_command(
    context: typer.Context,
    runs: Runs,
    *,
    out: Annotated[Path, "-o"],
    predictor: Annotated[Path, "-p"],
    rows: RowSource = "*",
    max_devices: Annotated[int | None, typer.Option(min=1)] = None,
    fabric: str | None = None,
    software: str = "",
) -> Answer:
    """Correct a predictor with the iteration times of small runs.

    Calibration fits factors for compute, memory, host and links, by gradient descent through the simulator. The errors
    that remain correct similar jobs. Instead of a table of runs it also accepts:

    - a table of collectives that `stepsight import` wrote (.parquet): it corrects the model of NCCL between the nodes
    of the measured cluster;

    - a collection of imported traces (a folder): it corrects kernels by kind, the cost of launches, and the slowdown of
    computation that overlaps with collectives; held-out ops judge it.

    The larger runs of the table judge the calibration; if there are none, sizes or runs are held out in turn. The new
    predictor is written only if it predicts them better than before; otherwise the exit code is 2. Examples:

        stepsight calibrate examples/slow-cluster.csv --predictor a100-sxm --out mine
        stepsight calibrate collectives.parquet --predictor h100-sxm --fabric cluster.toml --out mine
        stepsight calibrate runs/theirs --predictor h100-sxm --out mine

    Args:
        out: Folder of the predictor to write.
        predictor: Predictor to correct: a folder, a shipped one by its name or its hardware's, or a registered one
            (models:/h100@champion).
        max_devices: Fit on runs of at most this many devices (default: 8); if a source has none, on its smallest runs.
            For a table of collectives: on groups of at most this many ranks (default: 64).
        fabric: For a table of collectives: the fabric of the measured cluster, a name or a .toml file.
        software: For a table of collectives: part of the software whose rows are taken, such as 'nccl 2.27.3' or
            'NCCL_PROTO=Simple' (default: that of most rows).
    """
    report: Any
    learned = _to_correct(predictor, runs)
    if runs.is_dir():
        others = ("rows", "fabric", "max_devices", "software")
        refuse_given(context, others, "must be left out for a folder of imported traces")
        from stepsight.experiments.calibration.calibrate_parts import calibrate_traces

        report = calibrate_traces([runs], learned, out)
        problem = "the traces improve neither launches, overlap nor kernels"
    elif runs.suffix == ".parquet":
        refuse_given(context, ("rows",), _NOT_FOR_TABLES)
        if fabric is None:
            raise StepsightError(f"--fabric must state the links of the cluster that {runs} was measured on")
        from stepsight.dataset.hardware.hardware import find_fabric
        from stepsight.experiments.calibration.calibrate_parts import calibrate_links

        links = find_fabric(fabric)
        report = calibrate_links(runs, learned, links, out, max_devices=max_devices or 64, software=software)
        problem = "the calibration predicts nothing better than before"
        if doubts := report.values["doubts"]:
            return Answer(report.to_dict(), report.text, doubts[0])
    else:
        refuse_given(context, ("fabric", "software"), _NOT_FOR_RUNS)
        from stepsight.experiments.calibration.calibrate_runs import calibrate

        report = calibrate(runs, learned, out, source=rows, max_devices=max_devices or 8)
        problem = f"the calibration must predict {report.evidence.by} better than before"
    error = None if report.released else f"{problem}: no predictor was written"
    return Answer(report.to_dict(), report.text, error)
