"""``stepsight experiment one-gpu``: train on a few minutes of measurements on one GPU or CPU core, and judge on
held-out runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """Learn a predictor from ten minutes of measurements on one GPU, and judge it on held-out measurements.

Ops and training steps are measured in bf16, or small ones in fp32 on a CPU's core. Held out are shapes of ops, training
steps, peak memory, single ranks of large jobs and a public table; a plot shows the error against the minutes of
measuring. A study that was killed resumes."""
EPILOG = """examples:
    stepsight experiment one-gpu --out runs/one-gpu                     # all of it, here
    stepsight experiment one-gpu --plan-only --device cuda --out DIR    # plans, for a GPU elsewhere
    python -m harness collections/ops/plan.json --out collections/ops   # there, in DIR; likewise eager and compiled
    stepsight experiment one-gpu --out DIR                              # goes on with what was brought back"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="stepsight experiment one-gpu",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/one-gpu"), help="folder of everything; resumed")
    parser.add_argument("--plan-only", action="store_true", help="write DIR/collections/*/plan.json and stop")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of new plans")
    parser.add_argument(
        "--hardware", default="", metavar="NAME", help="GPU that new plans are for, as jobs call it; h200-sxm-141gb"
    )
    parser.add_argument("--minutes", type=float, help="of measuring, for new plans: 10 on a GPU, 3 on a CPU")
    parser.add_argument(
        "--tables", type=Path, metavar="FOLDER", help="public tables of kernels, by default ../shared/data/kernels"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    from stepsight.dataset.base.errors import StepsightError
    from stepsight.experiments.studies.one_gpu.study import StudyOptions, run_study, write_plans

    asked = StudyOptions(options.out.resolve(), options.device, options.minutes, options.tables, options.hardware)
    try:
        if options.plan_only:
            text = write_plans(asked)
            print(json.dumps({"out": str(asked.out), "text": text}) if options.json else text)
            return 0
        figures = run_study(asked)
    except (StepsightError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = figures.pop("text")
    print(json.dumps(figures) if options.json else text)
    return 0
