"""The command line.  Every verb has ``--json``; progress goes to stderr, the answer to stdout."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any, NoReturn

import typer

from stepsight import __version__
from stepsight.dataset.base.errors import StepsightError, missing_extra, shorten
from stepsight.verbs import (
    asking,
    capturing,
    converting,
    doctoring,
    emulation,
    judging,
    learning,
    measuring,
    reporting,
    tracing,
    verification,
)
from stepsight.verbs.help_texts import keep_examples
from stepsight.verbs.script_arguments import ScriptCommand
from stepsight.verbs.streams import finish_stdout, prepare_streams, storage_problem

_USAGE: Any = typer.BadParameter.__base__  # click's UsageError, which newer versions of typer include

app = typer.Typer(
    name="stepsight",
    help="Predict the time of one training iteration of a large hybrid-parallel job.\n\n"
    "Start with `stepsight predict JOB`. To predict for your own hardware: collect traces, train a predictor, "
    "predict jobs, search a strategy; `stepsight demo` does all of it on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stepsight {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("collect", cls=ScriptCommand)(measuring.collect_command)
app.command("train")(learning.train_command)
app.command("plan-profile")(learning.plan_profile_command)
app.command("capture", context_settings=capturing.CONTEXT)(capturing.capture_command)
app.command("predict")(asking.predict_command)
app.command("explain")(asking.explain_command)
app.command("search")(asking.search_command)
app.command("sweep")(reporting.sweep_command)
app.command("compare")(reporting.compare_command)
app.command("report")(reporting.report_command)
app.command("verify")(verification.verify_command)
app.command("evaluate")(judging.evaluate_command)
app.command("calibrate")(judging.calibrate_command)
app.command("demo")(measuring.demo_command)
app.command(
    "experiment",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(measuring.experiment_command)
app.command("job")(converting.job_command)
app.command("import")(measuring.import_command)
app.command("show")(measuring.show_command)
app.command("doctor")(doctoring.doctor_command)
app.command("emulate", context_settings={"allow_interspersed_args": False})(emulation.emulate_command)
app.command("replay")(tracing.replay_command)
app.command("what-if")(tracing.what_if_command)
app.command("dataset")(tracing.dataset_command)
keep_examples(app)

# Files that an interrupted verb leaves, by verb.
_LEAVES = {
    "verify": ": completed runs are kept; run the same command again to continue",
    "collect": ": completed runs are kept; run the same command again to continue",
    "demo": ": measurements are kept; run the same command again to continue",
    "train": ": no predictor was written",
    "search": ": with --storage and --study, run the same command again to continue",
}
_INTERRUPTED = 130
MOST_LINE = 2000  # characters of an error message: a job may break many rules


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit code 2."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that workers and MLflow runs end too
    try:
        prepare_streams()
        code = app(standalone_mode=False)
    except (StepsightError, OSError) as error:  # OSError: a file or folder that cannot be read or written
        _fail(storage_problem(error) or str(error))
    except ModuleNotFoundError as error:
        problem = missing_extra(error)
        if not problem:
            raise
        _fail(problem)
    except _USAGE as error:
        text: str = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(text, err=True)
            sys.exit(2)
        _fail(text)
    except Exception as error:
        problem = storage_problem(error)
        if not problem:
            raise
        _fail(problem)
    if code == _INTERRUPTED:
        over_progress = "\r\x1b[K" if sys.stderr.isatty() else ""
        typer.echo(f"{over_progress}interrupted{_LEAVES.get(sys.argv[1], '')}", err=True)
    unwritten = finish_stdout()
    if isinstance(unwritten, BrokenPipeError):
        sys.exit(1)  # the reader closed the pipe
    if unwritten is not None:
        _fail(f"cannot write the answer to stdout: {unwritten.strerror}")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(text: str) -> NoReturn:
    """Print an error as one line, and exit with code 2."""
    line = shorten(text.replace("\n", "\\n"), MOST_LINE).encode("utf-8", "backslashreplace").decode("utf-8")
    finish_stdout()
    typer.echo(f"error: {line}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
