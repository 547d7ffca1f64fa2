"""Verbs that compare predictions with measured runs: evaluate, calibrate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stepsight.dataset.base.errors import StepsightError
from stepsight.verbs.options import Json, PredictorPath, Runs, Source, answer, check_plot, load, path, progress


def _explain_columns(wanted: bool) -> None:
    if wanted:
        from stepsight.experiments.evaluation.runs_table import explanation

        typer.echo(explanation())
        raise typer.Exit


def _print_template(wanted: bool) -> None:
    if wanted:
        from stepsight.experiments.evaluation.runs_table import template

        typer.echo(template())
        raise typer.Exit


def evaluate_command(
    runs: Runs,
    *,
    predictor: PredictorPath = None,
    source: Source = "*",
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="Also calibrate twice and judge by the larger runs: once on each source's runs of at most this many "
            "devices (for example 8gpus), once on the smallest runs of each series."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(parser=path, help="Plot predicted over measured times to this file (.png, .svg).")
    ] = None,
    worst: Annotated[int, typer.Option(min=0, help="Number of worst rows to show with their breakdown.")] = 5,
    groups: Annotated[
        bool, typer.Option("--groups", help="Show every group of runs that differ only in strategy.")
    ] = False,
    fabric: Annotated[
        str | None,
        typer.Option(
            help="For a table of collectives: the fabric of the measured cluster, a name or a .toml file. Default: the "
            "fabric that each row names."
        ),
    ] = None,
    explain_columns: Annotated[
        bool,
        typer.Option(
            "--explain-columns",
            callback=_explain_columns,
            is_eager=True,
            help="Explain the columns of a table of runs.",
        ),
    ] = False,
    template: Annotated[
        bool,
        typer.Option(
            "--template",
            callback=_print_template,
            is_eager=True,
            help="Print a table of runs to fill in, with an example row.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare predictions with measured runs: errors, ranks, regret and coverage per source.

    For a table of ops and collectives that `stepsight import` wrote (.parquet), errors are printed by kind, size and
    number of ranks.

    Without --predictor, each row is predicted by the shipped predictor for its hardware; if there is none, by a
    roofline. Two simple baselines are printed too: one utilisation (MFU) fitted to each source, and the smallest run of
    a series scaled up. Rows that cannot be expressed as a job, and rows that the predictor was fitted on, are left out
    and counted by reason. If no row remains, the exit code is 2. Examples:

        stepsight evaluate published_runs.csv.gz --source "*megatron*" --plot runs.png
        stepsight evaluate published_runs.csv.gz --calibrate 8gpus
        stepsight evaluate collectives.parquet --fabric cluster.toml
    """
    if runs.suffix == ".parquet":
        _refuse(runs, {"--calibrate": calibrate, "--plot": plot, "--source": source.strip("*"), "--groups": groups})
        _evaluate_table(runs, predictor, fabric, as_json)
        return
    _refuse(runs, {"--fabric": fabric})
    from stepsight.experiments.evaluation.calibration_split import read_most_gpus
    from stepsight.experiments.evaluation.evaluate import evaluate
    from stepsight.experiments.evaluation.evaluation_report import evaluation_text
    from stepsight.experiments.reports.plots import plot_published_runs

    most_gpus = None if calibrate is None else read_most_gpus(calibrate)
    check_plot(plot)
    loaded = load(predictor)
    result = evaluate(runs, loaded, source=source, on_row=progress("rows predicted"))
    if plot is not None:
        plot_published_runs(result.points, plot, "published runs")
    value, shown = result.to_dict(), {}
    if most_gpus is not None:
        from stepsight.experiments.evaluation.calibration_gain import FITTED_ON, SPLITS, calibrate_small
        from stepsight.experiments.evaluation.scored_row import predictor_by_hardware

        for name, split in SPLITS.items():
            on_set = progress(f"sources calibrated, {name}")
            value[name] = calibrate_small(result, predictor_by_hardware(loaded), most_gpus, split, on_set).to_dict()
            shown[FITTED_ON[name].format(most_gpus)] = value[name]
    answer(value, evaluation_text(result, worst, shown, groups=groups), as_json)


def _refuse(table: Path, options: dict[str, object]) -> None:
    """Refuse options that mean nothing for the table that was given."""
    given = ", ".join(name for name, value in options.items() if value)
    if given:
        kind = "a table of ops and collectives (.parquet)" if table.suffix == ".parquet" else "a table of runs"
        kind = "a folder of imported traces" if table.is_dir() else kind
        raise StepsightError(f"{given} must be left out for {kind}, got {table}")


def _evaluate_table(path: Path, predictor: Path | None, fabric: str | None, as_json: bool) -> None:
    """Compare predictions with measured ops and collectives."""
    from stepsight.dataset.hardware.hardware import find_fabric
    from stepsight.dataset.tables import Measurements
    from stepsight.experiments.evaluation.scored_row import predictor_by_hardware
    from stepsight.experiments.evaluation.table_errors import judge_table, table_errors_text

    links = None if fabric is None else find_fabric(fabric)
    judges = predictor_by_hardware(load(predictor))
    result = judge_table(Measurements.from_parquet(path), judges, links, progress("rows predicted"))
    answer(result.to_dict(), table_errors_text(result), as_json)


def calibrate_command(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", parser=path, help="Folder of the predictor to write.")],
    predictor: Annotated[
        Path,
        typer.Option(
            "--predictor",
            "-p",
            parser=path,
            help="Predictor to correct: a folder, a shipped one by its name or its hardware's, or a registered one "
            "(models:/h100@champion).",
        ),
    ],
    *,
    source: Source = "*",
    max_devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Fit on runs of at most this many devices (default: 8); if a source has none, on its smallest runs. "
            "For a table of collectives: on groups of at most this many ranks (default: 64).",
        ),
    ] = None,
    fabric: Annotated[
        str | None,
        typer.Option(help="For a table of collectives: the fabric of the measured cluster, a name or a .toml file."),
    ] = None,
    software: Annotated[
        str,
        typer.Option(
            help="For a table of collectives: part of the software whose rows are taken, such as 'nccl 2.27.3' or "
            "'NCCL_PROTO=Simple' (default: that of most rows)."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Correct a predictor with the iteration times of small runs.

    Calibration fits factors for compute, memory, host and links, by gradient descent through the simulator. The errors
    that remain correct similar jobs. Instead of a table of runs it also accepts:

    - a table of collectives that `stepsight import` wrote (.parquet): it corrects the model of NCCL between the nodes
    of the measured cluster;

    - a collection of imported traces (a folder): it corrects kernels by kind, the cost of launches, and the slowdown of
    computation that overlaps with collectives; held-out ops judge it.

    The larger runs of the table judge the calibration; if there are none, sizes or runs are held out in turn. The new
    predictor is written only if it predicts them better than before; otherwise the exit code is 2. Examples:

        stepsight calibrate runs.csv --predictor a100-sxm --out mine
        stepsight calibrate collectives.parquet --predictor h100-sxm --fabric cluster.toml --out mine
        stepsight calibrate runs/theirs --predictor h100-sxm --out mine
    """
    if runs.is_dir():
        unread = {"--source": source.strip("*"), "--fabric": fabric, "--max-devices": max_devices}
        _refuse(runs, {**unread, "--software": software})
        _calibrate_traces(runs, predictor, out, as_json)
        return
    if runs.suffix == ".parquet":
        _refuse(runs, {"--source": source.strip("*")})
        _calibrate_links(
            runs, predictor, fabric, out, {"max_devices": max_devices or 64, "software": software}, as_json
        )
        return
    _refuse(runs, {"--fabric": fabric, "--software": software})
    from stepsight.experiments.evaluation.calibrate_runs import calibrate, calibration_text
    from stepsight.training.registered import load_predictor

    loaded = load_predictor(predictor)
    report = calibrate(runs, loaded, out, source=source, max_devices=max_devices or 8)
    answer(report.to_dict(), calibration_text(report), as_json)
    if not report.released:
        print(
            f"error: the calibration must predict {report.evidence.by} better than before: no predictor was written",
            file=sys.stderr,
        )
        raise typer.Exit(2)


def _calibrate_traces(path: Path, predictor: Path, out: Path, as_json: bool) -> None:
    """Correct a predictor by a collection of imported traces."""
    from stepsight.experiments.evaluation.calibrate_traces import calibrate_traces, traces_text
    from stepsight.training.registered import load_predictor

    report = calibrate_traces([path], load_predictor(predictor), out)
    answer(report.to_dict(), traces_text(report), as_json)
    if not report.released:
        print(
            "error: the traces improve neither launches, overlap nor kernels: no predictor was written", file=sys.stderr
        )
        raise typer.Exit(2)


def _calibrate_links(
    path: Path, predictor: Path, fabric: str | None, out: Path, rows: dict[str, Any], as_json: bool
) -> None:
    """Correct a predictor by a table of collectives, of which ``rows`` says which are taken."""
    from stepsight.dataset.hardware.hardware import find_fabric
    from stepsight.experiments.evaluation.calibrate_links import calibrate_links, links_text
    from stepsight.training.registered import load_predictor

    if fabric is None:
        raise StepsightError(f"--fabric must state the links of the cluster that {path} was measured on")
    loaded = load_predictor(predictor)
    report = calibrate_links(path, loaded, find_fabric(fabric), out, **rows)
    answer(report.to_dict(), links_text(report), as_json)
    if not report.released:
        print(
            "error: "
            + (
                report.doubts[0]
                if report.doubts
                else "the calibration predicts nothing better than before: no predictor was written"
            ),
            file=sys.stderr,
        )
        raise typer.Exit(2)
