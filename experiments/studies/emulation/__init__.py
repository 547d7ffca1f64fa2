"""Compare emulated ranks with closed forms and with real ranks: ``stepsight experiment emulate``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

PARTS = ("virtual-ddp", "virtual-fsdp2", "real-ddp", "box")
FORWARD_S = {"virtual": 0.2, "real": 0.04}  # of a layer: on a virtual clock, sleeping takes no time


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="stepsight experiment emulate",
        description="Emulate rank 0 of 256 of a script whose layers sleep, over the time of its communication, and "
        "compare with closed forms, on a virtual and on a real clock; compare emulated with real ranks of clusters in "
        "a box (needs root and iproute2). Times mean something on a machine that does nothing else.",
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="a part alone (repeatable)")
    parser.add_argument("--box", action="append", help="boxes of that part (default: 2x1@200mbit and 4x1@200mbit)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    from stepsight.dataset.base.errors import StepsightError
    from stepsight.experiments.studies.emulation.delay_sweep import knee

    figures: dict[str, Any] = {}
    try:
        for part in options.only or PARTS:
            figures[part] = _figures(part, options.box or ["2x1@200mbit", "4x1@200mbit"])
            if part.endswith("ddp"):
                figures[f"{part}-knee"] = knee(figures[part])
            if not options.json:
                print(_text(part, figures[part]), flush=True)
    except (StepsightError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(figures))
    return 0


def _figures(part: str, boxes: Sequence[str]) -> list[dict[str, Any]]:
    from stepsight.dataset.runs.box_spec import read_box
    from stepsight.experiments.studies.emulation.delay_sweep import sweep
    from stepsight.experiments.studies.emulation.truth import compare

    if part == "box":
        return [row for box in boxes for row in compare(read_box(box))]
    clock, _, mode = part.partition("-")
    return sweep(mode, virtual=clock == "virtual", forward_s=FORWARD_S[clock])


def _text(part: str, rows: list[dict[str, Any]]) -> str:
    from stepsight.experiments.reports.text_table import Number, table

    names = [name for name in rows[0] if name != "error_percent"]
    titles = [f"{name.removesuffix('_s').replace('_', ' ')} ms" if name.endswith("_s") else name for name in names]

    def cell(name: str, value: Any) -> Any:
        return Number(1e3 * value) if name.endswith("_s") else value

    cells = [[*(cell(name, row[name]) for name in names), Number(row["error_percent"], 2)] for row in rows]
    text = f"{part}\n{table([*titles, 'error %'], cells)}\n"
    return text + (_knee_text(part, rows) if part.endswith("ddp") else "")


def _knee_text(part: str, rows: list[dict[str, Any]]) -> str:
    from stepsight.experiments.studies.emulation.delay_sweep import expected_knee, knee

    found, closed = knee(rows), expected_knee(FORWARD_S[part.partition("-")[0]])
    return (
        f"flat step {1e3 * found['flat_s']:.1f} ms (closed form {1e3 * closed['flat_s']:.1f}), then slope "
        f"{found['slope']:.3f} ({closed['slope']:.0f}) from {1e3 * found['knee_s']:.1f} ms of communication "
        f"({1e3 * closed['knee_s']:.1f}: the backward pass without its first layer)\n"
    )
