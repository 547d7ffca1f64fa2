"""Step time of scripts of unseen architectures: ``stepsight experiment architectures``.

Four parts, each of which goes on where it was stopped: collect every script, capture it, measure the heavy calls of its
program on their own, and judge predictions of families that were held out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepsight.experiments.studies.architectures.held_out import Judged

PARTS = ("collect", "capture", "measure", "judge")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = _options(arguments)
    from stepsight.dataset.base.errors import StepsightError

    try:
        left, rows = _run(options)
    except (StepsightError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = {"left": left, "figures": _figures(rows), "scripts": [asdict(row) for row in rows]}
    print(json.dumps(figures) if options.json else _text(left, rows), flush=True)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="stepsight experiment architectures",
        description="Collect training scripts of many families of models on this machine with one thread, as "
        "`collect --script` does; capture them; measure their heavy calls as `collect --ops` does; and predict each "
        "from the families of the other folds. A stopped study goes on where it was. Times mean something on a machine "
        "that does nothing else.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the study")
    parser.add_argument("--only", action="append", help="a family alone (repeatable)")
    parser.add_argument("--part", choices=PARTS, action="append", help="a part alone (repeatable)")
    parser.add_argument("--repeats", type=int, default=2, help="how often each script is collected (default: 2)")
    parser.add_argument(
        "--configuration", type=int, choices=(0, 1, 2), action="append",
        help="capture this configuration of each family (repeatable; default: 0)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further script after so long")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    from stepsight.experiments.studies.architectures.family_script import FAMILIES

    unknown = sorted(set(options.only or ()) - set(FAMILIES))
    if unknown or options.repeats < 1:
        parser.error(f"--only takes {', '.join(FAMILIES)}; --repeats must be >= 1; got {unknown}, {options.repeats}")
    options.families = options.only or list(FAMILIES)
    options.parts = options.part or PARTS
    return options


def _run(options: argparse.Namespace) -> tuple[int, list[Judged]]:
    """Scripts that are left, and the judged ones."""
    from stepsight.experiments.studies.architectures.family_programs import capture_programs, measure_programs
    from stepsight.experiments.studies.architectures.family_runs import collect_runs
    from stepsight.experiments.studies.architectures.held_out import judge

    out, families, numbers, left = options.out, options.families, options.configuration or [0], 0
    if "collect" in options.parts:
        left += collect_runs(out, families, options.repeats, seconds=options.seconds)
    if "capture" in options.parts:
        left += capture_programs(out, families, numbers, seconds=options.seconds)
    if "measure" in options.parts:
        left += measure_programs(out, families, numbers, seconds=options.seconds)
    return left, judge(out, families) if "judge" in options.parts else []


def _figures(rows: Sequence[Judged]) -> dict[str, float]:
    """Mean absolute errors, percent, and shares of known calls."""
    import numpy as np

    if not rows:
        return {}
    measured = np.array([row.measured_s for row in rows])
    predicted = {
        "as_is": np.array([row.as_is_s for row in rows]),
        "after_measuring": np.array([row.after_s for row in rows]),
        "by_own_trace": np.array([row.traced_s for row in rows]),
    }
    found: dict[str, float] = {}
    for name, seconds in predicted.items():
        off = 100.0 * np.abs(seconds / measured - 1.0)
        found |= {f"{name}_mape_percent": float(off.mean()), f"{name}_median_percent": float(np.median(off))}
    spread = np.array([row.spread for row in rows])
    found["repeats_differ_by_percent"] = 100.0 * float(np.nanmean(np.abs(np.expm1(spread))))
    found["known_percent"] = 100.0 * float(np.mean([row.known for row in rows]))
    found["known_after_percent"] = 100.0 * float(np.mean([row.known_after for row in rows]))
    return found


def _text(left: int, rows: Sequence[Judged]) -> str:
    from stepsight.experiments.reports.text_table import Number, table

    if not rows:
        return f"{left} scripts are left"
    titles = ["script", "measured ms", "as is %", "after measuring %", "by own trace %", "known %", "known after %"]
    cells = [
        [
            row.name, Number(1e3 * row.measured_s),
            *(Number(100 * (s / row.measured_s - 1)) for s in (row.as_is_s, row.after_s, row.traced_s)),
            Number(100 * row.known), Number(100 * row.known_after),
        ] for row in rows
    ]  # fmt: skip
    told = "\n".join(f"{name.replace('_', ' ')}: {value:.1f}" for name, value in _figures(rows).items())
    return f"{table(titles, cells)}\n\n{len(rows)} scripts of families that were held out\n{told}"
