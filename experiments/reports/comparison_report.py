"""Texts and tables of comparisons and sweeps."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.experiments.reports.plots import save_figure, start_figure
from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.predictor.prediction_views import seconds_text

if TYPE_CHECKING:
    from stepsight.experiments.sweeping import Axis, Point

LONGEST = 44  # characters of a cell


def comparison_text(told: dict[str, Any]) -> str:
    """A comparison as text; times of causes and ops are differences from the first side."""
    sides = told["sides"]
    letters = [chr(ord("A") + at % 26) for at in range(len(sides))]
    cells = [
        [
            letter,
            side["name"],
            seconds_text(side["seconds"]),
            "measured" if side["measured"] else f"{seconds_text(side['low_s'])} to {seconds_text(side['high_s'])}",
            f"{side['percent']:+.1f}",
        ]
        for letter, side in zip(letters, sides, strict=True)
    ]
    parts = [table(["", "what", "iteration", "interval", "% from A"], cells)]
    if told["facts"]:
        rows = [[key, *(_short(value) for value in values)] for key, values in told["facts"].items()]
        parts.append(table(["what differs", *letters], rows))
    for title, key in (("where the time goes, ms", "causes"), ("largest differences, ms", "works")):
        rows = [
            [_short(name), *(Number(1e3 * value) for value in values), Number(1e3 * (values[-1] - values[0]))]
            for name, values in told[key].items()
            if max(values) > 0
        ]
        if rows:
            parts.append(table([title, *letters, f"{letters[-1]} - A"], rows))
    return "\n\n".join(parts)


def _short(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def sweep_text(axes: Sequence[Axis], points: Sequence[Point]) -> str:
    """The table of a sweep as text."""
    header = [*(axis.key for axis in axes), "iteration", "interval", "tokens/s", "per device", "MFU %", "GB", "fits"]
    rows: list[list[Any]] = []
    for point in points:
        told = point.to_dict()
        values = [str(point.values[axis.key]) for axis in axes]
        if point.prediction is None:
            rows.append([*values, "not legal", *[""] * 6])
            continue
        rows.append([
            *values, seconds_text(told["iteration_time_s"]),
            f"{seconds_text(told['low_s'])} to {seconds_text(told['high_s'])}",
            f"{told['tokens_per_s']:,.0f}", f"{told['tokens_per_s_per_device']:,.0f}", Number(100 * told["mfu"]),
            Number(told["memory_bytes"] / 1e9), "yes" if told["fits"] else "no",
        ])  # fmt: skip
    problems = [f"not legal: {point.problem}" for point in points if point.prediction is None]
    more = [f"and {len(problems) - 3} more" if len(problems) > 3 else ""]
    return "\n".join([table(header, rows), *problems[:3], *(line for line in more if line)])


def sweep_csv(points: Sequence[Point]) -> str:
    """A sweep as CSV, one row for each job."""
    rows, file = [point.to_dict() for point in points], io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def plot_sweep(axes: Sequence[Axis], points: Sequence[Point], path: Path, title: str) -> None:
    """Draw the iteration time with its interval over the last axis, a line for each value of the others."""
    last = axes[-1].key
    figure, drawn = start_figure(7.0, 4.5)
    groups: dict[str, list[Point]] = {}
    for point in points:
        if point.prediction is not None:
            others = ", ".join(f"{axis.key.partition('.')[2]} {point.values[axis.key]}" for axis in axes[:-1])
            groups.setdefault(others, []).append(point)
    numeric = all(isinstance(value, int | float) for value in axes[-1].values)
    for name, each in groups.items():
        xs = [point.values[last] if numeric else str(point.values[last]) for point in each]
        times = [point.to_dict() for point in each]
        drawn.plot(xs, [told["iteration_time_s"] for told in times], marker="o", label=name)
        if numeric:
            drawn.fill_between(xs, [told["low_s"] for told in times], [told["high_s"] for told in times], alpha=0.15)
    values = axes[-1].values
    if numeric and min(values) > 0 and max(values) >= 8 * min(values):
        drawn.set_xscale("log", base=2)
    drawn.set(xlabel=last, ylabel="iteration time (s), with interval", title=title)
    drawn.set_ylim(bottom=0)
    if len(groups) > 1:
        drawn.legend(frameon=False)
    save_figure(figure, path)
