"""Plots of predictions, measurements and searches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepsight.dataset.base.files import new_file


@contextmanager
def figure_file(path: Path, width: float = 6.0, height: float = 5.0) -> Iterator[Any]:
    """Axes of a figure that needs no display; it is written to the file when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    yield axes
    with new_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format=path.suffix[1:])
    pyplot.close(figure)


def new_axes() -> Any:
    """Axes of a new figure, with the backend that is in use: notebooks show it."""
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7.0, 4.5), layout="constrained")[1]


def _finish(axes: Any, title: str, x: str, y: str, *, log_y: bool = True, limits: Sequence[float] = ()) -> None:
    """Label logarithmic axes; ticks are written as 20, 50, 100 instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set(xscale="log", title=title, xlabel=x, ylabel=y)
    if log_y:
        axes.set_yscale("log")
    if limits:
        axes.set(xlim=limits, ylim=limits)
    for axis in (axes.xaxis, axes.yaxis) if log_y else (axes.xaxis,):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def _draw_exact(axes: Any, values: Sequence[float]) -> list[float]:
    """Mark exact predictions by a line with 10 % around it; return the limits of both axes."""
    line = [min(values) * 0.8, max(values) * 1.25]
    axes.plot(line, line, color="black", lw=0.8, label="exact")
    within = {"color": "grey", "alpha": 0.15, "label": "within 10 %"}
    axes.fill_between(line, [x * 0.9 for x in line], [x * 1.1 for x in line], **within)
    return line


def plot_predicted_against_measured(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Scatter with intervals; rows carry ``measured_s``, ``predicted_s``, ``low_s``, ``high_s`` and ``job``."""
    with figure_file(path) as axes:
        measured, predicted = ([row[key] * 1e3 for row in rows] for key in ("measured_s", "predicted_s"))
        below = [max(0.0, row["predicted_s"] - row["low_s"]) * 1e3 for row in rows]
        above = [max(0.0, row["high_s"] - row["predicted_s"]) * 1e3 for row in rows]
        axes.errorbar(measured, predicted, yerr=(below, above), fmt="o", ms=4, lw=0.8, capsize=2, color="tab:blue")
        limits = _draw_exact(axes, measured + predicted)
        names = ("measured iteration time (ms)", "predicted iteration time (ms), with interval")
        axes.legend(loc="upper left", frameon=False)
        _finish(axes, title, *names, limits=limits)


def plot_published_runs(groups: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str) -> None:
    """Scatter of ``(measured, predicted)`` seconds in groups, each in a colour of its own."""
    with figure_file(path, 8.5, 5.0) as axes:
        limits = _draw_exact(axes, [seconds for pairs in groups.values() for pair in pairs for seconds in pair])
        markers = "os^vD<>ph*XP"
        for index, (name, pairs) in enumerate(groups.items()):
            marker, colour = markers[index // 10 % len(markers)], f"C{index % 10}"
            axes.scatter(
                *zip(*pairs, strict=True), s=14, marker=marker, color=colour, label=f"{name[:40]} ({len(pairs)})"
            )
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
        _finish(axes, title, "measured iteration time (s)", "predicted iteration time (s)", limits=limits)


def plot_front(
    plans: Sequence[dict[str, Any]], front: Sequence[dict[str, Any]], cost: str, path: Path, title: str
) -> None:
    """Scatter of plans, training time against ``cost`` (a key of the rows), and the Pareto front."""

    def place(row: Mapping[str, Any]) -> tuple[float, float]:
        return row[cost], row["training_time_s"] / 86400

    with figure_file(path) as axes:
        for name in dict.fromkeys(row["hardware"] for row in plans):
            rows = [row for row in plans if row["hardware"] == name]
            axes.scatter(*zip(*map(place, rows), strict=True), s=24, label=name)
            for row in rows:
                axes.annotate(str(row["devices"]), place(row), fontsize="x-small")
        axes.plot(*zip(*sorted(map(place, front)), strict=True), color="black", lw=0.8, label="front")
        axes.legend(frameon=False)
        _finish(axes, title, f"{cost} (beside each plan: its number of devices)", "training time (days)")


def plot_search(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Write a plot of iteration time over peak memory of every strategy that was timed."""
    with figure_file(path, 7.0, 4.5) as axes:
        draw_search(rows, axes, title)


def draw_search(rows: Sequence[dict[str, Any]], axes: Any, title: str) -> None:
    """Draw iteration time over peak memory of every strategy that was timed."""
    timed = [row for row in rows if row["iteration_time_s"] is not None]
    points = {id(row): (row["memory_bytes"] / 1e9, row["iteration_time_s"]) for row in timed}
    for fits, colour, label in ((True, "tab:blue", "fits"), (False, "lightgrey", "does not fit")):
        chosen = [points[id(row)] for row in timed if row["fits"] is fits]
        columns = zip(*chosen, strict=True) if chosen else ([], [])
        axes.scatter(*columns, s=14, color=colour, label=f"{label} ({len(chosen)})")
    best = next((points[id(row)] for row in timed if row["fits"]), None)
    if best is not None:
        axes.scatter(*best, s=90, marker="*", color="tab:red", label="best")
    axes.legend(frameon=False)
    _finish(axes, title, "peak memory of the fullest stage (GB)", "predicted iteration time (s)")
