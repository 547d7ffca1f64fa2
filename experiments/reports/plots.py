"""Plots of predictions, measurements and searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepsight.dataset.base.files import new_file

FORMATS = (".png", ".svg", ".pdf")


def start_figure(width: float = 6.0, height: float = 5.0) -> tuple[Any, Any]:
    """A figure that needs no display, and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    return figure, axes


def new_axes() -> Any:
    """Axes of a new figure, with the backend that is in use: notebooks show it."""
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7.0, 4.5), layout="constrained")[1]


def _plain_ticks(axis: Any) -> None:
    """Write 20, 50, 100 on a logarithmic axis instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def plot_error_curves(rows: Sequence[tuple[str, str, float, float]], path: Path, what: str) -> None:
    """Mean errors in percent against what was spent, a panel for each subject and a line for each way.

    Args:
        rows: Subject, way, what was spent, error; a way with one point is a level.
        path: File to write.
        what: Label of what was spent.
    """
    subjects, ways = (list(dict.fromkeys(row[place] for row in rows)) for place in (0, 1))
    figure, _ = start_figure(4.2 * len(subjects), 3.6)
    figure.clear()
    panels = figure.subplots(1, len(subjects), squeeze=False)[0]
    for axes, subject in zip(panels, subjects, strict=True):
        for way in ways:
            own = sorted(row[2:] for row in rows if row[:2] == (subject, way))
            if len(own) == 1:
                axes.axhline(own[0][1], color="black", ls="--", lw=0.8, label=way)
            else:
                axes.plot([spent for spent, _ in own], [error for _, error in own], marker="o", ms=3, label=way)
        axes.set(title=subject, xlabel=what, ylabel="mean error, %", ylim=(0, None))
    panels[0].legend(fontsize=8)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure completely, and close it."""
    from matplotlib import pyplot

    with new_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format=path.suffix[1:])
    pyplot.close(figure)


def plot_predicted_against_measured(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Scatter with intervals; rows carry ``measured_s``, ``predicted_s``, ``low_s``, ``high_s`` and ``job``."""
    figure, axes = start_figure()
    measured = [row["measured_s"] * 1e3 for row in rows]
    predicted = [row["predicted_s"] * 1e3 for row in rows]
    below = [max(0.0, row["predicted_s"] - row["low_s"]) * 1e3 for row in rows]
    above = [max(0.0, row["high_s"] - row["predicted_s"]) * 1e3 for row in rows]
    axes.errorbar(measured, predicted, yerr=(below, above), fmt="o", ms=4, lw=0.8, capsize=2, color="tab:blue")
    lowest, highest = min(measured + predicted) * 0.8, max(measured + predicted) * 1.25
    line = [lowest, highest]
    axes.plot(line, line, color="black", lw=0.8, label="exact")
    axes.fill_between(
        line, [x * 0.9 for x in line], [x * 1.1 for x in line], color="grey", alpha=0.15, label="within 10 %"
    )
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line, title=title)
    axes.set_xlabel("measured iteration time (ms)")
    axes.set_ylabel("predicted iteration time (ms), with interval")
    axes.legend(loc="upper left", frameon=False)
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    save_figure(figure, path)


def plot_published_runs(groups: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str) -> None:
    """Scatter of ``(measured, predicted)`` seconds in groups, each in a colour of its own."""
    figure, axes = start_figure(8.5, 5.0)
    everything = [seconds for pairs in groups.values() for pair in pairs for seconds in pair]
    line = [min(everything) * 0.8, max(everything) * 1.25]
    axes.plot(line, line, color="black", lw=0.8)
    axes.fill_between(line, [x * 0.9 for x in line], [x * 1.1 for x in line], color="grey", alpha=0.15)
    markers = "os^vD<>ph*XP"
    for index, (name, pairs) in enumerate(groups.items()):
        marker, colour = markers[index // 10 % len(markers)], f"C{index % 10}"
        axes.scatter(*zip(*pairs, strict=True), s=14, marker=marker, color=colour, label=f"{name[:40]} ({len(pairs)})")
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line, title=title)
    axes.set_xlabel("measured iteration time (s); grey: within 10 %")
    axes.set_ylabel("predicted iteration time (s)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    save_figure(figure, path)


def plot_front(
    plans: Sequence[dict[str, Any]], front: Sequence[dict[str, Any]], cost: str, path: Path, title: str
) -> None:
    """Scatter of plans, training time against ``cost`` (a key of the rows), and the Pareto front."""
    figure, axes = start_figure()
    for name in dict.fromkeys(row["hardware"] for row in plans):
        rows = [row for row in plans if row["hardware"] == name]
        axes.scatter([row[cost] for row in rows], [row["training_time_s"] / 86400 for row in rows], s=24, label=name)
        for row in rows:
            axes.annotate(str(row["devices"]), (row[cost], row["training_time_s"] / 86400), fontsize="x-small")
    line = sorted((row[cost], row["training_time_s"] / 86400) for row in front)
    axes.plot(*zip(*line, strict=True), color="black", lw=0.8, label="front")
    axes.set(xscale="log", yscale="log", title=title)
    axes.set_xlabel(f"{cost} (beside each plan: its number of devices)")
    axes.set_ylabel("training time (days)")
    axes.legend(frameon=False)
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    save_figure(figure, path)


def plot_search(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Write a plot of iteration time over peak memory of every strategy that was timed."""
    figure, axes = start_figure(7.0, 4.5)
    draw_search(rows, axes, title)
    save_figure(figure, path)


def draw_search(rows: Sequence[dict[str, Any]], axes: Any, title: str) -> None:
    """Draw iteration time over peak memory of every strategy that was timed."""
    for fits, colour, label in ((True, "tab:blue", "fits"), (False, "lightgrey", "does not fit")):
        chosen = [row for row in rows if row["fits"] is fits and row["iteration_time_s"] is not None]
        axes.scatter(
            [row["memory_bytes"] / 1e9 for row in chosen],
            [row["iteration_time_s"] for row in chosen],
            s=14,
            color=colour,
            label=f"{label} ({len(chosen)})",
        )
    best = next((row for row in rows if row["fits"]), None)
    if best is not None:
        axes.scatter(
            [best["memory_bytes"] / 1e9], [best["iteration_time_s"]], s=90, marker="*", color="tab:red", label="best"
        )
    axes.set(xscale="log", yscale="log", title=title)
    axes.set_xlabel("peak memory of the fullest stage (GB)")
    axes.set_ylabel("predicted iteration time (s)")
    axes.legend(frameon=False)
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)


def plot_error_against_minutes(
    curves: Mapping[str, Sequence[Mapping[str, float]]], path: Path, title: str = ""
) -> None:
    """Errors of held-out ops and steps against minutes of measuring ops, a curve for each name."""
    figure, axes = start_figure(7.0, 4.5)
    kinds = (("op_mape", "ops", "o-"), ("long_op_mape", "ops from 50 us", "^:"), ("step_mape", "steps, no GNN", "s--"))
    for index, (name, rows) in enumerate(curves.items()):
        for key, what, style in kinds:
            points = [(row["minutes"], row[key]) for row in rows if key in row]
            if points:
                axes.plot(*zip(*points, strict=True), style, ms=4, color=f"C{index}", label=f"{name}: {what}")
    axes.set(xscale="log", title=title or "what more measuring of ops brings", ylim=(0, None))
    axes.set_xlabel("minutes of measuring ops on their own")
    axes.set_ylabel("mean absolute error of what is held out (%)")
    axes.legend(frameon=False, fontsize="small")
    _plain_ticks(axes.xaxis)
    save_figure(figure, path)
