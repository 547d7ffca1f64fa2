"""Step time of scripts of architectures that no trace had: ``stepsight experiment architectures``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="stepsight experiment architectures",
        description="Collect training scripts of many families of models on this machine with one thread, each as "
        "`collect --script` does. A stopped study goes on where it was. Times mean something on a machine that does "
        "nothing else.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the study")
    parser.add_argument("--only", action="append", help="a family alone (repeatable)")
    parser.add_argument("--repeats", type=int, default=2, help="how often each script is collected (default: 2)")
    parser.add_argument("--programs", type=int, action="append", help="capture this configuration (repeatable)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="collect nothing more after so long")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    from stepsight.dataset.errors import StepsightError
    from stepsight.experiments.studies.architectures.family_programs import capture_programs
    from stepsight.experiments.studies.architectures.family_runs import collect_runs
    from stepsight.experiments.studies.architectures.family_script import FAMILIES

    unknown = sorted(set(options.only or ()) - set(FAMILIES))
    if unknown or options.repeats < 1:
        parser.error(
            f"--only must be one of {', '.join(FAMILIES)} and --repeats >= 1, got {unknown}, {options.repeats}"
        )
    families = options.only or list(FAMILIES)
    figures: dict[str, Any] = {}
    try:
        if options.programs:
            figures["left"] = capture_programs(options.out, families, options.programs, seconds=options.seconds)
        else:
            figures["left"] = collect_runs(options.out, families, options.repeats, seconds=options.seconds)
    except (StepsightError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures) if options.json else f"{figures['left']} scripts are left to collect", flush=True)
    return 0
