"""Train on at most four ranks, and compare predictions of larger runs with held-out measurements."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepsight.experiments.studies.small_to_large.box_cases import UserCases


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="stepsight experiment small-to-large",
        description="Train on real runs of at most 4 ranks, predict held-out runs, run them, and compare. "
        "box: boxes of 4 "
        "to 16 ranks in which sleeping replaces computation (needs root and iproute2). cores: 1 and 2 ranks that "
        "compute, one core each. The study takes about two hours on an otherwise idle machine; a study that was killed "
        "continues.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/small-to-large"), help="folder of everything; resumed")
    parser.add_argument(
        "--only", default="*", metavar="GLOB", help="names of the runs: box/gpt2/2M2P4D, cores/llama/tp2, box/*"
    )
    parser.add_argument(
        "--model", type=Path, action="append", default=[], metavar="JOB", help="job file of one more model (repeatable)"
    )
    parser.add_argument(
        "--box",
        action="append",
        default=[],
        metavar="BOX",
        help="a box of more than 4 ranks for all strategies of "
        "these models, else of all: 8x2@300mbit or a file (repeatable)",
    )
    parser.add_argument(
        "--micro-batches", type=int, action="append", default=[], metavar="N", help="of each replica there (repeatable)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    options = parser.parse_args(arguments)
    from stepsight.dataset.base.errors import StepsightError
    from stepsight.experiments.studies.small_to_large.box_cases import UserCases

    asked = UserCases(options.model, options.box, options.micro_batches)
    try:
        if options.list:
            print("\n".join(_names(options.only, asked)))
            return 0
        figures = run_halves(options.out.resolve(), options.only, asked)
    except (StepsightError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    texts = [half.pop("text") for half in figures.values()]
    print(json.dumps(figures) if options.json else "\n\n".join(texts))
    return 0


def run_halves(out: Path, only: str, asked: UserCases) -> dict[str, Any]:
    """Figures of each half with runs that match ``only``.

    Raises:
        CollectError: If no run matches.
    """
    from stepsight.dataset.base.errors import CollectError
    from stepsight.experiments.studies.small_to_large import box_study, whole_cores

    figures = {}
    names = _names(only, asked)
    if any(name.startswith("box/") for name in names):
        figures["box"] = box_study.run_boxes(out / "box", only, asked=asked)
    if any(name.startswith("cores/") for name in names):
        figures["cores"] = whole_cores.run_whole_cores(out / "cores", only, extra=_computing(asked))
    if not figures:
        raise CollectError(f"--only must match a run such as box/gpt2/2M2P4D or cores/llama/tp2, got {only!r}")
    return figures


def _names(only: str, asked: UserCases) -> list[str]:
    from fnmatch import fnmatch

    from stepsight.experiments.studies.small_to_large import box_cases, whole_cores

    names = [case.name for case in box_cases.box_cases(asked)]
    names += [case.name for case in whole_cores.core_cases(_computing(asked)) if case.role != "train"]
    return [name for name in names if fnmatch(name, only)]


def _computing(asked: UserCases) -> list[Path]:
    """Job files whose own strategy fits on whole cores."""
    from stepsight.dataset.job.job import Job

    return [path for path in asked.models if Job.from_file(path).cluster.num_devices <= 2]
