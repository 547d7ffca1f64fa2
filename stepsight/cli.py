"""The command line.  Every verb has ``--json``; progress goes to stderr, the answer to stdout."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from stepsight.dataset.errors import StepsightError

if TYPE_CHECKING:
    from stepsight.training.predictor import Predictor

_USAGE: Any = typer.BadParameter.__base__  # click's UsageError, which newer versions of typer bring along

app = typer.Typer(
    name="stepsight",
    help="Predict the time of one training iteration of a large hybrid-parallel job.\n\n"
    "A usual session: collect traces, train a predictor, predict jobs, search a strategy. "
    "`stepsight demo` does all of it on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def path(text: str) -> Path:
    """A path that a user names: not the empty one, which would be the current folder."""
    if not text:
        raise typer.BadParameter("a path must not be empty, got ''")
    return Path(text)


Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, and nothing else, on stdout.")]
Source = Annotated[str, typer.Option(help="Only rows whose source matches this pattern.")]
PredictorPath = Annotated[
    Path | None,
    typer.Option(
        "--predictor",
        "-p",
        parser=path,
        help="Folder of a trained predictor, the name of one that comes with stepsight, as a100-sxm, or "
        "`roofline`. Without it the one that comes with stepsight for the job's hardware answers, and a roofline from "
        "hardware facts only where there is none; the answer says which.",
    ),
]


def _answer(value: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(value, allow_nan=False) if as_json else text)


def _load(path: Path | None) -> Predictor | str | None:
    if path is None:
        return None
    from stepsight.training.prediction import ROOFLINE

    if str(path) == ROOFLINE and not path.exists():
        return ROOFLINE
    from stepsight.training.predictor import Predictor

    return Predictor.load(path)


@app.command()
def collect(
    jobs: Annotated[
        list[Path],
        typer.Argument(parser=path, help="Job files (.toml or .json) to run for real, or one plan (plan.json)."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", parser=path, help="Collection folder. A killed collection resumes there.")
    ],
    role: Annotated[
        str, typer.Option(help="What the runs are for: only `train` runs may train a predictor.")
    ] = "train",
    rounds: Annotated[int, typer.Option(min=1, help="Repeats, interleaved over the runs so that drift shows.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round, without a profiler.")] = 4,
    warmup: Annotated[
        int | None,
        typer.Option(min=1, help="Steps before each round's timing: 2 or more, in a box 1.", show_default="2"),
    ] = None,
    profile_steps: Annotated[
        int | None, typer.Option(min=0, help="Profiled steps in the last round; in a box none.", show_default="2")
    ] = None,
    event_seconds: Annotated[
        float, typer.Option(min=0, help="Time for measuring every distinct op and collective once; 0: none.")
    ] = 30.0,
    box: Annotated[
        str | None,
        typer.Option(
            help="Run in a cluster in a box: nodes x ranks per node @ link rate, as in 4x1@200mbit, or a .toml file. "
            "Computation is slept. Needs root and iproute2.",
        ),
    ] = None,
    plan_only: Annotated[
        bool, typer.Option(help="Only write plan.json, to be run elsewhere with the harness folder alone.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run jobs for real under torchrun, time and trace them, and measure their ops one by one.

    Needs one core (or GPU) per rank; in a box sixteen ranks share two cores, and runs that compute too much for their
    times to mean anything are rejected (exit code 2). Examples:

        stepsight collect examples/local-gpt-tp2.toml --out runs/mine
        stepsight collect examples/box-gpt-pp4.toml --box 4x1@200mbit --out runs/box
    """
    from stepsight.experiments.collecting import collect_jobs

    if box is not None:
        from stepsight.dataset.box import read_box

        held, usual = read_box(box), {"warmup": 1, "profile_steps": 0}
    else:
        held, usual = None, {"warmup": 2, "profile_steps": 2}
    given = {key: value for key, value in (("warmup", warmup), ("profile_steps", profile_steps)) if value is not None}
    counts = {"rounds": rounds, "steps": steps, **usual, **given}
    summary = collect_jobs(
        jobs, out, role=role, counts=counts, event_seconds=event_seconds, plan_only=plan_only, progress=True, box=held
    )
    _answer(summary, summary["text"], as_json)
    if summary.get("rejected"):
        raise typer.Exit(2)


@app.command()
def train(
    collections: Annotated[
        list[Path], typer.Argument(parser=path, help="Collection folders written by `stepsight collect`.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", parser=path, help="Folder of the predictor to write.")],
    hardware: Annotated[
        str, typer.Option(help="Name that jobs give this hardware in [cluster] hardware.")
    ] = "local-cpu",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow tracking URI; by default sqlite beside the predictor.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Learn kernel and collective regressors and the context GNN from collections; track all in MLflow.

    Example:

        stepsight train runs/mine --out runs/predictor
    """
    from stepsight.experiments.reporting import training_report
    from stepsight.training.fit import train as fit

    predictor = fit(collections, out, hardware_name=hardware, seed=seed, tracking_uri=tracking_uri, progress=True)
    report = training_report(predictor, out)
    _answer(report, report["text"], as_json)


@app.command()
def predict(
    jobs: Annotated[list[Path], typer.Argument(parser=path, help="Job files (.toml or .json).")],
    predictor: PredictorPath = None,
    timeline: Annotated[
        Path | None,
        typer.Option(parser=path, help="Write the predicted timeline here; open it at ui.perfetto.dev. One job only."),
    ] = None,
    level: Annotated[str, typer.Option(help="Detail of the timeline: `segment` or `op`.")] = "segment",
    schedule: Annotated[
        Path | None,
        typer.Option(parser=path, help="Write the pipeline schedule here, as torch's table of actions. One job only."),
    ] = None,
    software: Annotated[
        str,
        typer.Option(
            help="What runs the jobs, as the column `framework` of the runs that the predictor was calibrated on."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Predict iteration time, interval, breakdown and memory of jobs.

    Example:

        stepsight predict examples/gpt3-175b-1024.toml --timeline timeline.json
    """
    from stepsight.dataset.files import check_output_file, new_file
    from stepsight.dataset.job import Job
    from stepsight.experiments.reporting import prediction_report
    from stepsight.simulator.schedules import write_schedule
    from stepsight.training.prediction import predict as ask

    if level not in ("segment", "op"):
        raise StepsightError(f"--level must be segment or op, got {level!r}")
    for name, wanted in (("--timeline", timeline), ("--schedule", schedule)):
        if wanted is not None and len(jobs) != 1:
            raise StepsightError(f"{name} takes one job, got {len(jobs)}")
        if wanted is not None:
            check_output_file(wanted)
    loaded = _load(predictor)
    read = [Job.from_file(path) for path in jobs]
    predictions = [ask(job, loaded, software=software) for job in read]
    reports = [prediction_report(job, prediction) for job, prediction in zip(read, predictions, strict=True)]
    if timeline is not None:
        with new_file(timeline) as part, part.open("wb") as file:
            file.writelines(predictions[0].timeline_json(level))
    if schedule is not None:
        write_schedule(predictions[0].simulation.lowered.track.schedule, schedule)
    text = "\n\n".join(report.pop("text") for report in reports)
    _answer(reports[0] if len(reports) == 1 else {"predictions": reports}, text, as_json)


@app.command()
def explain(
    job: Annotated[Path, typer.Argument(parser=path, help="Job file (.toml or .json).")],
    predictor: PredictorPath = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 10,
    as_json: Json = False,
) -> None:
    """Say which ops and collectives the iteration time depends on, and what halving each would save.

    Example:

        stepsight explain examples/gpt3-175b-1024.toml
    """
    from stepsight.dataset.job import Job
    from stepsight.experiments.reporting import explanation_report
    from stepsight.training.prediction import predict as ask

    read = Job.from_file(job)
    report = explanation_report(read, ask(read, _load(predictor)), top)
    _answer(report, report.pop("text"), as_json)


@app.command()
def search(
    job: Annotated[Path, typer.Argument(parser=path, help="Job file: its model, global batch and cluster are kept.")],
    predictor: PredictorPath = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials; a space that is not larger is tried whole.")] = 200,
    sampler: Annotated[
        str, typer.Option(help="tpe, random, or auto: enumeration if the trials allow it, else tpe.")
    ] = "auto",
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    storage: Annotated[
        str | None, typer.Option(help="Study storage: a database URL or the path of a journal file; default: memory.")
    ] = None,
    study: Annotated[str | None, typer.Option(help="Name of the study in the storage; goes on if it exists.")] = None,
    plot: Annotated[
        Path | None, typer.Option(parser=path, help="Write time against memory of all strategies here (.png, .svg).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Search the parallel strategy with the shortest predicted iteration that fits in memory.

    It varies the degrees of all axes, micro-batch, schedule and virtual stages, ZeRO stage, recomputation and sequence
    parallelism; everything else stays as the job has it.

    Example:

        stepsight search examples/gpt3-175b-1024.toml --trials 300 --plot search.png
    """
    from stepsight.dataset.files import check_output_file
    from stepsight.dataset.job import Job
    from stepsight.experiments.plots import FORMATS, search_result
    from stepsight.experiments.reporting import search_report
    from stepsight.experiments.search import search as find

    if plot is not None:
        if plot.suffix not in FORMATS:
            raise StepsightError(f"--plot ends in {', '.join(FORMATS)}, got {str(plot)!r}")
        check_output_file(plot)
    read = Job.from_file(job)
    loaded = _load(predictor)
    on_trial = _trial_progress(trials)
    result = find(
        read, loaded, trials=trials, sampler=sampler, seed=seed, storage=storage, study_name=study, on_trial=on_trial
    )
    typer.echo("", err=True)
    report = search_report(read, result, top)
    if plot is not None:
        search_result([choice.to_dict() for choice in result.choices], plot, read.name)
    _answer(report, report.pop("text"), as_json)


@app.command()
def evaluate(
    runs: Annotated[
        Path, typer.Argument(parser=path, help="Table of measured runs (.csv or .csv.gz), a row for each.")
    ],
    predictor: PredictorPath = None,
    source: Source = "*",
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="Also fit every source's runs of at most so many devices (as in 8gpus), or the smallest ones of "
            "series that have none, and judge by the larger ones."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(parser=path, help="Write predicted against measured times here (.png, .svg).")
    ] = None,
    worst: Annotated[int, typer.Option(min=0, help="Worst rows to show with their breakdown.")] = 5,
    as_json: Json = False,
) -> None:
    """Set predictions beside the measured times of many runs: errors, ranks, regret and coverage per source.

    Without a predictor each row is answered by the one for its hardware, or from hardware facts where there is none.
    Two naive references stand beside. Rows that a predictor was fitted on are refused. Examples:

        stepsight evaluate published_runs.csv.gz --source "*megatron*" --plot runs.png
        stepsight evaluate published_runs.csv.gz --calibrate 8gpus
    """
    from stepsight.dataset.files import check_output_file
    from stepsight.experiments.plots import FORMATS, published_runs
    from stepsight.experiments.published.evaluate import evaluate as judge
    from stepsight.experiments.published.predictors import predictor_by_hardware
    from stepsight.experiments.published.report import evaluation_text
    from stepsight.experiments.published.split import read_most_gpus

    most_gpus = None if calibrate is None else read_most_gpus(calibrate)
    if plot is not None:
        if plot.suffix not in FORMATS:
            raise StepsightError(f"--plot ends in {', '.join(FORMATS)}, got {str(plot)!r}")
        check_output_file(plot)
    predictors = predictor_by_hardware(_load(predictor))
    result = judge(runs, predictors, source=source)
    if plot is not None and result.scored:
        published_runs(result.points, plot, "published runs")
    value, shown = result.to_dict(), {}
    if most_gpus is not None:
        from stepsight.experiments.published.calibrated import FITTED_ON, SPLITS, calibrate_small

        for name, split in SPLITS.items():
            value[name] = calibrate_small(result, predictors, most_gpus, split).to_dict()
            shown[FITTED_ON[name].format(most_gpus)] = value[name]
    _answer(value, evaluation_text(result, worst, shown), as_json)


@app.command()
def calibrate(
    runs: Annotated[
        Path, typer.Argument(parser=path, help="Table of measured runs (.csv or .csv.gz), a row for each.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", parser=path, help="Folder of the predictor to write.")],
    predictor: Annotated[
        Path,
        typer.Option(
            "--predictor", "-p", parser=path, help="To start from: a folder, or one that comes with stepsight by name."
        ),
    ],
    source: Source = "*",
    max_devices: Annotated[
        int, typer.Option(min=1, help="Fit runs of at most so many devices, or a source's smallest size.")
    ] = 8,
    as_json: Json = False,
) -> None:
    """Correct a predictor by the iteration times of small runs: factors of what is slow, by gradient through the
    simulator, and what is left for jobs that are alike.

    The larger runs of the table judge it; where there are none, sizes or runs left out in turn. It is written only if
    it predicts those better than before (else exit code 2), and never judged by rows that it was fitted on. Example:

        stepsight calibrate runs.csv --predictor a100-sxm --out mine
    """
    from stepsight.experiments.published.calibration import calibrate_runs
    from stepsight.training.predictor import Predictor

    loaded = Predictor.load(predictor)
    report = calibrate_runs(runs, loaded, out, source=source, most_gpus=max_devices)
    _answer(report, report.pop("text"), as_json)
    if not report["released"]:
        print(
            f"error: a calibration must predict {report['evidence']['by']} better than before: refused", file=sys.stderr
        )
        raise typer.Exit(2)


def _trial_progress(trials: int) -> Any:
    def show(number: int, best: float | None) -> None:
        if sys.stderr.isatty() or (number + 1) % 50 == 0:
            text = "none fits yet" if best is None else f"best {best:.4g} s"
            typer.echo(f"\rtrial {number + 1}/{trials}  {text}   ", nl=not sys.stderr.isatty(), err=True)

    return show


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", parser=path, help="Where everything is written.")] = Path(
        "runs/demo"
    ),
    as_json: Json = False,
) -> None:
    """The whole product on this machine: measure, train, predict held-out runs, search (about four minutes)."""
    from stepsight.experiments.demo import run_demo

    summary, text = run_demo(out)
    _answer(summary, text, as_json)


EXPERIMENTS = ("dilated", "kernels", "memory", "small-to-large")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def experiment(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.")] = "",
) -> None:
    """Measure again what the README claims: `dilated` (pipelines that sleep, for real), `kernels` (public tables,
    shapes held out), `memory` (against PyTorch's tracker) or `small-to-large` (train on four ranks, predict
    sixteen). Each takes options of its own, `--json` and `--help` among them.

    Example:

        stepsight experiment dilated --only "1f1b*"
    """
    from importlib import import_module

    if name in ("", "-h", "--help"):
        typer.echo(context.get_help())
        return
    if name not in EXPERIMENTS:
        raise StepsightError(f"experiment must be one of {', '.join(EXPERIMENTS)}, got {name!r}")
    sys.exit(import_module(f"stepsight.experiments.{name.replace('-', '_')}").main(context.args))


@app.command("import")
def import_table(
    format: Annotated[
        str,
        typer.Argument(
            help="aiconfigurator, neusight, vidur, simumax, nccl-tests (logs or parsed), vtrain, aicb, or csv: a table "
            "of your own with columns op, dims (4096x4096x1024), dtype, microseconds."
        ),
    ],
    table: Annotated[Path, typer.Argument(metavar="PATH", parser=path, help="A file of that format, or a folder.")],
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Write all measurements here (.parquet), with their origin.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read measurements of ops and collectives that others published, or that you took, into one table."""
    from stepsight.dataset.files import check_output_file
    from stepsight.dataset.tables import read_table, summary, summary_text

    if out is not None:
        check_output_file(out)
    found = read_table(format, table)
    answer = summary(found)
    text = summary_text(answer)
    if out is not None:
        found.to_parquet(out)
        answer["out"] = str(out)
        text += f"\n\nwrote {len(found)} measurements to {out}"
    _answer(answer, text, as_json)


@app.command()
def show(
    path: Annotated[
        Path, typer.Argument(parser=path, help="A job file, collection, run folder, predictor or summary.json.")
    ],
    table: Annotated[
        Path | None,
        typer.Option(parser=path, help="Of a collection: write every op and collective measured here (.parquet)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a file or folder is and what is in it."""
    from stepsight.experiments.showing import describe, write_table

    description = describe(path)
    text = description.pop("text")
    if table is not None:
        description["measurements"] = write_table(path, table)
        text += f"\nwrote {description['measurements']} measurements to {table}"
    _answer(description, text, as_json)


# What an interrupted verb leaves behind.
_LEAVES = {
    "collect": ": what is complete is kept; the same command goes on where it stopped",
    "demo": ": what is measured is kept; the same command goes on where it stopped",
    "train": ": no predictor was written",
    "search": ": with --storage and --study, the same command goes on where it stopped",
}
_INTERRUPTED = 130


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit code 2."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that workers and MLflow runs are ended too
    try:
        code = app(standalone_mode=False)
    except (StepsightError, OSError) as error:  # OSError: a file or folder that cannot be read or written
        _fail(str(error))
    except _USAGE as error:
        text: str = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(text, err=True)
            sys.exit(2)
        _fail(text)
    if code == _INTERRUPTED:
        over_progress = "\r\x1b[K" if sys.stderr.isatty() else ""
        typer.echo(f"{over_progress}interrupted{_LEAVES.get(sys.argv[1], '')}", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(text: str) -> NoReturn:
    """One line, whatever stands in it."""
    line = text.replace("\n", "\\n").encode("utf-8", "backslashreplace").decode("utf-8")
    typer.echo(f"error: {line}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
