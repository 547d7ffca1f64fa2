"""The command line.  Every verb has ``--json``; progress goes to stderr, the answer to stdout."""

from __future__ import annotations

import errno
import io
import os
import signal
import sqlite3
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from stepsight import __version__
from stepsight.cli import ask, compare, learn, measure, scripts, tools, traces
from stepsight.cli.options import command, help_text
from stepsight.dataset.base.errors import StepsightError, missing_extra, shorten

_USAGE: Any = typer.BadParameter.__base__  # click's UsageError, which newer versions of typer include
_SCRIPT_IS_LAST: dict[str, Any] = {"cls": scripts.ScriptLast, "context_settings": {"allow_interspersed_args": False}}
VERBS: dict[str, list[Any]] = {  # by the task of the user; ``plan_profile_command`` is ``stepsight plan-profile``
    "Ask about jobs": [
        *(ask.predict_command, ask.explain_command, ask.search_command),
        *(compare.sweep_command, compare.compare_command, compare.report_command, compare.page_command),
    ],
    "Measure and learn": [
        *(measure.collect_command, measure.plan_profile_command, learn.train_command, learn.evaluate_command),
        *(learn.calibrate_command, measure.verify_command, measure.demo_command),
    ],
    "Scripts and traces": [
        *(scripts.capture_command, scripts.emulate_command, traces.import_command),
        *(traces.replay_command, traces.what_if_command, traces.dataset_command),
    ],
    "Files and tools": [tools.job_command, tools.show_command, measure.doctor_command],
}
SPECIAL: dict[str, dict[str, Any]] = {
    "collect": {"cls": scripts.ScriptCommand},
    "capture": _SCRIPT_IS_LAST,
    "emulate": _SCRIPT_IS_LAST,
}


class _GroupedVerbs(TyperGroup):
    """Help that lists the verbs by the user's task."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        width = max(map(len, self.commands))
        for name, verb in self.commands.items():
            row = (f"{name:<{width}}", verb.get_short_help_str(formatter.width - width - 6))
            groups.setdefault(str(getattr(verb, "rich_help_panel", "")), []).append(row)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    name="stepsight",
    cls=_GroupedVerbs,
    help="Predict the time of one training iteration of a large hybrid-parallel job.\n\n"
    "Start with `stepsight predict JOB`. To predict for your own hardware: collect traces, train a predictor, "
    "predict jobs, search a strategy; `stepsight demo` does all of it on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"stepsight {__version__}")
        raise typer.Exit


for _task, _verbs in VERBS.items():
    for _verb in _verbs:
        _name = _verb.__name__.removesuffix("_command").replace("_", "-")
        app.command(_name, rich_help_panel=_task, **SPECIAL.get(_name, {}))(command(_verb))
app.command(
    "experiment",
    rich_help_panel="Files and tools",
    help=help_text(tools.experiment_command),
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(tools.experiment_command)

_CONTINUE = "are kept; run the same command again to continue"
_LEAVES = {  # what an interrupted verb leaves
    **dict.fromkeys(("verify", "collect"), f": completed runs {_CONTINUE}"),
    "demo": f": measurements {_CONTINUE}",
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
    except _USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)
            sys.exit(2)
        _fail(error.format_message())
    except Exception as error:
        problem = storage_problem(error) or (missing_extra(error) if isinstance(error, ModuleNotFoundError) else "")
        if not problem and not isinstance(error, StepsightError | OSError):  # OSError: a file that cannot be used
            raise
        _fail(problem or str(error))
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
    if "No module named '" in text:  # of a script of the user
        text += "; the script runs in this environment: install what provides it here"
    line = shorten(text.replace("\n", "\\n"), MOST_LINE).encode("utf-8", "backslashreplace").decode("utf-8")
    finish_stdout()
    typer.echo(f"error: {line}", err=True)
    sys.exit(2)


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


def prepare_streams() -> None:
    """Make stdout and stderr accept every character: a character that the terminal lacks is written as its code.

    Raises:
        StepsightError: If stdout is closed, since nobody would get the answer.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the next opened file would get this number
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  # print would write to stdout
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is None:
        raise StepsightError("stdout must be open to take the answer, got a closed one: send it to a file or /dev/null")


def finish_stdout() -> OSError | None:
    """Write the rest of stdout; return why that failed, None if it did not.

    What could not be written is dropped, so that the interpreter does not try again when it ends.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 1)
        return error
    return None


def storage_problem(error: BaseException) -> str:
    """What is wrong with the disk, if that caused an error of a library; else ""."""
    link: BaseException | None = error
    for _ in range(100):  # the error, its cause, the cause of that, and so on
        if isinstance(link, OSError) and link.errno in _FULL:
            where = f": {link.filename}" if link.filename else ""
            return f"cannot write: {os.strerror(link.errno or 0)}{where}"
        if isinstance(link, sqlite3.OperationalError) and ("is full" in str(link) or "disk I/O" in str(link)):
            return f"cannot write a database: {link}"
        link = link and (link.__cause__ or link.__context__)
    text = str(error)
    if "No space left on device" in text or "database or disk is full" in text:  # of libraries in other languages
        return f"cannot write: No space left on device ({type(error).__name__})"
    return ""
