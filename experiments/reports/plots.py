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


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    """Label logarithmic axes; ticks are written as 20, 50, 100 instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set(xscale="log", yscale="log", title=title, xlabel=x, ylabel=y)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def _finish_exact(axes: Any, values: Sequence[float], title: str, unit: str, more: str = "") -> None:
    """Label axes of measured and predicted times, with a line of exact predictions and 10 % around it."""
    line = [min(values) * 0.8, max(values) * 1.25]
    axes.plot(line, line, color="black", lw=0.8, label="exact")
    within = {"color": "grey", "alpha": 0.15, "label": "within 10 %"}
    axes.fill_between(line, [x * 0.9 for x in line], [x * 1.1 for x in line], **within)
    _finish(axes, title, f"measured iteration time ({unit})", f"predicted iteration time ({unit}){more}")
    axes.set(xlim=line, ylim=line)


def plot_predicted_against_measured(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Scatter with intervals; rows carry ``measured_s``, ``predicted_s``, ``low_s``, ``high_s`` and ``job``."""
    with figure_file(path) as axes:
        measured, predicted = ([row[key] * 1e3 for row in rows] for key in ("measured_s", "predicted_s"))
        below = [max(0.0, row["predicted_s"] - row["low_s"]) * 1e3 for row in rows]
        above = [max(0.0, row["high_s"] - row["predicted_s"]) * 1e3 for row in rows]
        axes.errorbar(measured, predicted, yerr=(below, above), fmt="o", ms=4, lw=0.8, capsize=2, color="tab:blue")
        _finish_exact(axes, measured + predicted, title, "ms", ", with interval")
        axes.legend(loc="upper left", frameon=False)


def plot_published_runs(groups: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str) -> None:
    """Scatter of ``(measured, predicted)`` seconds in groups, each in a colour of its own."""
    with figure_file(path, 8.5, 5.0) as axes:
        _finish_exact(axes, [seconds for pairs in groups.values() for pair in pairs for seconds in pair], title, "s")
        for index, (name, pairs) in enumerate(groups.items()):
            look = {"marker": "os^vD<>ph*XP"[index // 10 % 12], "color": f"C{index % 10}"}
            axes.scatter(*zip(*pairs, strict=True), s=14, label=f"{name[:40]} ({len(pairs)})", **look)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")


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
    """Write what ``draw_search`` draws."""
    with figure_file(path, 7.0, 4.5) as axes:
        draw_search(rows, axes, title)


def draw_search(rows: Sequence[dict[str, Any]], axes: Any, title: str) -> Any:
    """Draw iteration time over peak memory of every strategy that was timed, and return the axes; None: those of a new
    figure, with the backend that is in use, so that notebooks show it.
    """
    if axes is None:
        from matplotlib import pyplot

        axes = pyplot.subplots(figsize=(7.0, 4.5), layout="constrained")[1]
    timed = [(row["fits"], row["memory_bytes"] / 1e9, row["iteration_time_s"]) for row in rows]
    timed = [row for row in timed if row[-1] is not None]
    for fits, colour, label in ((True, "tab:blue", "fits"), (False, "lightgrey", "does not fit")):
        chosen = [place for own, *place in timed if own is fits]
        columns = zip(*chosen, strict=True) if chosen else ([], [])
        axes.scatter(*columns, s=14, color=colour, label=f"{label} ({len(chosen)})")
    best = next((place for fits, *place in timed if fits), None)
    if best is not None:
        axes.scatter(*best, s=90, marker="*", color="tab:red", label="best")
    axes.legend(frameon=False)
    _finish(axes, title, "peak memory of the fullest stage (GB)", "predicted iteration time (s)")
    return axes
