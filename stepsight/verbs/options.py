"""Options and answers that verbs share."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepsight.dataset.base.errors import StepsightError

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor


def path(text: str) -> Path:
    """Read a path that a user names; refuse the empty path, which would mean the current folder."""
    if not text:
        raise typer.BadParameter("a path must not be empty, got ''")
    return Path(text)


Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, and nothing else, on stdout.")]
Source = Annotated[str, typer.Option(help="Use only rows whose source contains this text or matches this pattern.")]
Runs = Annotated[
    Path,
    typer.Argument(
        parser=path,
        help="Table of measured runs (.csv or .csv.gz), one row for each run, as examples/runs.csv; "
        "`evaluate --explain-columns` lists its columns.",
    ),
]
PredictorPath = Annotated[
    Path | None,
    typer.Option(
        "--predictor",
        "-p",
        parser=path,
        help="Folder of a trained predictor, name of a shipped one or its hardware's (a100-sxm), a registered one "
        "(models:/h100@champion), or `roofline`. Default: the shipped predictor for the job's hardware; if there is "
        "none, a roofline from hardware facts. The answer names its source.",
    ),
]
LatencyName = Annotated[
    str,
    typer.Option(
        "--latency",
        help="Use your own latency model instead of a predictor: a registered name, or module:function. The function "
        "is called with a Hardware and a Fabric and returns an object with the method op_seconds(ops). The module's "
        "code is run.",
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Stop when the study has this many evaluated strategies; those of earlier searches and of other "
        "processes count. Default: no limit. If scenarios are compared, the limit is for each of them.",
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        help="Study storage: a database URL or the path of a journal file; default: memory. "
        "Several searches may share a study in SQLite, PostgreSQL or a journal."
    ),
]
FrameworkName = Annotated[
    str,
    typer.Option(
        "--framework",
        help="Framework that runs the job, for example megatron-core or torchtitan. Its profile sets the keys that the "
        "job file leaves open. Overrides `framework` of the file.",
    ),
]
Box = Annotated[
    str | None,
    typer.Option(
        help="Run in a cluster made of network namespaces: nodes x ranks per node @ link rate, for example "
        "4x1@200mbit, or a .toml file. Ranks sleep instead of computing. Needs root and iproute2.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Overwrite the file of --out if it exists; for configurations, with --to.")
]
HardwareName = Annotated[
    str, typer.Option(help="Name of the devices; overrides the file. Configurations of frameworks do not state it.")
]
TraceStages = Annotated[
    str,
    typer.Option(
        help="Stages of --traces: all, or numbers as 0,15. Default: all, or the first and the last if all would take "
        "more than 200 MB."
    ),
]
Nodes = Annotated[int | None, typer.Option(min=1, help="Number of nodes; overrides the file.")]


def answer(value: dict[str, Any], text: str, as_json: bool) -> None:
    """Print a verb's answer, for programs or for people."""
    typer.echo(json.dumps(value, allow_nan=False) if as_json else text)


def refuse_given(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Refuse options that would change nothing here.

    Args:
        context: Of the verb.
        names: Of the verb's parameters.
        why: Why they change nothing, and what to do: completes "--name ...".

    Raises:
        StepsightError: If one of them stands on the command line.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise StepsightError(f"--{name.replace('_', '-')} {why}")


def numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Whole numbers that are separated by commas; None: the option is not given."""
    words = listed(option, text, "whole numbers > 0")
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise StepsightError(f"{option} must be whole numbers > 0, separated by commas, got {text!r:.80}")
    return tuple(map(int, words))


def listed(option: str, text: str | None, what: str) -> tuple[str, ...]:
    """Words that are separated by commas; None: the option is not given.

    Raises:
        StepsightError: If one is empty.
    """
    if text is None:
        return ()
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise StepsightError(f"{option} must be {what}, separated by commas, got {text!r:.80}")
    return words


def load(path: Path | None, latency: str = "", context: typer.Context | None = None) -> Predictor | str | None:
    """What ``--predictor`` or ``--latency`` names.

    Args:
        path: Of ``--predictor``.
        latency: Of ``--latency``; empty: not given.
        context: Of a verb that has both options.

    Raises:
        StepsightError: If both are given.
    """
    if latency and context is not None:
        from stepsight.simulator.durations.given_latency import LATENCY

        refuse_given(context, ("predictor",), "is another source of durations than --latency: leave one out")
        find_modules_here()
        return LATENCY + latency
    if path is None:
        return None
    from stepsight.training.predictor.prediction import ROOFLINE

    if str(path) == ROOFLINE and not path.exists():
        return ROOFLINE
    from stepsight.training.registered import load_predictor

    return load_predictor(path)


def check_configuration(out: Path, force: bool) -> None:
    """Refuse, before the work, to overwrite a configuration, which may be the user's own, unless it is forced."""
    from stepsight.dataset.base.files import check_output_file

    check_output_file(out)
    if out.exists() and not force:
        raise StepsightError(f"--out must be a new file, got {str(out)!r:.80}: name another one, or give --force")


def find_modules_here() -> None:
    """Let modules of the current folder be imported, as ``python -m`` does: the user names one."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def check_plot(plot: Path | None) -> None:
    """Check, before the work, that the plot can be written."""
    if plot is None:
        return
    from stepsight.dataset.base.files import check_output_file
    from stepsight.experiments.reports.plots import FORMATS

    if plot.suffix not in FORMATS:
        raise StepsightError(f"--plot ends in {', '.join(FORMATS)}, got {str(plot)!r:.80}")
    check_output_file(plot)


# The beginnings of files that a verb may overwrite: those that it wrote itself.
TIMELINE, SCHEDULE = (".json", rb'\{"displayTimeUnit":'), (".csv", rb"\(?\d+[A-Z]")
STRATEGIES = (".csv", rb"tp,cp,pp,ep,dp,")


def check_result(option: str, wanted: Path, kind: tuple[str, bytes]) -> None:
    """Refuse to overwrite a file of another type than ``kind``, which is a suffix and a pattern of the first bytes."""
    from stepsight.dataset.base.files import check_output_file

    suffix, begins = kind
    if wanted.suffix != suffix:
        raise StepsightError(f"{option} ends in {suffix}, got {str(wanted)!r:.80}")
    check_output_file(wanted)
    if wanted.exists():
        with wanted.open("rb") as file:
            if not re.match(begins, file.read(64)):
                raise StepsightError(f"{option} refuses to overwrite a file of another type, got {str(wanted)!r:.80}")


def progress(what: str) -> Callable[..., None]:
    """Show on stderr how much is done, of how many if that is known, and further text.

    On a terminal it is one line that changes, elsewhere a line every ten seconds; nothing is said of what is quick.
    """
    last, pause = time.monotonic(), 0.2 if sys.stderr.isatty() else 10.0

    def show(done: int, of: int | str, more: str = "") -> None:
        nonlocal last
        if sys.stderr.isatty() and done == of:
            typer.echo("\r\x1b[K", nl=False, err=True)
        elif time.monotonic() - last >= pause:
            last = time.monotonic()
            over, end = ("\r\x1b[K", False) if sys.stderr.isatty() else ("", True)
            typer.echo(f"{over}{what} {done}{f'/{of}' if of else ''}  {more}".rstrip(), nl=end, err=True)

    return show
