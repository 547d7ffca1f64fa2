"""Views of a prediction in a notebook: one line, one row of a table, one plot."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

    from stepsight.training.prediction.prediction import Prediction


MAX_NAME = 28  # characters shown of a model's or a hardware's name
LEAST_SHOWN = 1e-3  # causes with a smaller share of the iteration are not drawn


MOST_PRINTED = 1e9  # larger numbers are printed with an exponent


def seconds_text(seconds: float) -> str:
    """``31.0 us``, ``12.3 ms``, ``4.56 s`` or ``3.2e+30 s``."""
    if 0 < seconds < 1e-4:  # in milliseconds it would round to zero
        return f"{seconds * 1e6:.1f} us"
    if seconds >= MOST_PRINTED:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def interval_text(low_s: float, high_s: float) -> str:
    """``19.12 to 23.62 s``; with both units if they differ."""
    low, high = seconds_text(low_s), seconds_text(high_s)
    value, unit = low.rsplit(" ", 1)
    return f"{value if high.endswith(f' {unit}') else low} to {high}"


def one_line(prediction: Prediction) -> str:
    """The prediction in one line of less than 120 characters: time, interval, memory, and the job."""
    job, memory = prediction.job, prediction.memory
    facts = [
        seconds_text(prediction.iteration_time_s),
        interval_text(prediction.low_s, prediction.high_s),
        f"{memory.peak_bytes / 1e9:.1f} GB" + ("" if memory.fits else " does not fit"),
        f"{_cut(job.model_name)} on {job.cluster.num_devices} x {_cut(job.hardware_name)}",
    ]
    return f"Prediction({', '.join(facts)})"


def _cut(text: str, most: int = MAX_NAME) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def html_view(prediction: Prediction) -> str:
    """The prediction as HTML for a notebook: the answer, and a bar for each cause of the time."""
    whole, memory = prediction.iteration_time_s, prediction.memory
    rows = "".join(
        f"<tr><td style='text-align:left'>{name.replace('_', ' ')}</td><td>{seconds_text(seconds)}</td>"
        f"<td style='text-align:left'><div style='background:#3b6fb5;height:.8em;width:{200 * seconds / whole:.0f}px'>"
        "</div></td></tr>"
        for name, seconds in prediction.breakdown.items()
        if seconds > LEAST_SHOWN * whole
    )
    outside = 100 * prediction.unsupported_share
    fits = "" if memory.fits else " (does not fit)"
    return (
        f"<b>{escape(_cut(prediction.job.name, 120))}</b><br>"
        f"{seconds_text(whole)} per iteration, 90 % interval {interval_text(prediction.low_s, prediction.high_s)}; "
        f"{memory.peak_bytes / 1e9:.1f} of {memory.capacity_bytes / 1e9:.1f} GB{fits}; "
        f"{prediction.tokens_per_s:,.0f} tokens/s, MFU {100 * prediction.mfu:.1f} %<br>"
        f"<small>{escape(prediction.source)}; {outside:.0f} % of the time outside the measured range</small>"
        f"<table>{rows}</table>"
    )


def one_row(prediction: Prediction) -> DataFrame:
    """The prediction as a table of one row; times in seconds, memory of the fullest stage in bytes."""
    from pandas import DataFrame

    job, memory = prediction.job, prediction.memory
    row: dict[str, Any] = {
        "job": job.name,
        "hardware": job.hardware_name,
        "devices": job.cluster.num_devices,
        "iteration_time_s": prediction.iteration_time_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        **{f"{cause}_s": seconds for cause, seconds in prediction.breakdown.items()},
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "memory_bytes": memory.peak_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "fits": memory.fits,
        "unsupported_share": prediction.unsupported_share,
        "source": prediction.source,
    }
    return DataFrame([row])


def plot_breakdown(prediction: Prediction, axes: Axes | None = None) -> Axes:
    """Draw one bar for each cause of the iteration's time, with its share; ``axes`` None: a new figure."""
    if axes is None:
        from matplotlib import pyplot

        axes = pyplot.subplots(figsize=(7.0, 3.5), layout="constrained")[1]
    whole = prediction.iteration_time_s
    causes = {name: s for name, s in prediction.breakdown.items() if s > LEAST_SHOWN * whole}
    bars = axes.barh([name.replace("_", " ") for name in causes], list(causes.values()), color="tab:blue")
    axes.bar_label(bars, [f" {seconds_text(s)}, {100 * s / whole:.1f} %" for s in causes.values()])
    axes.margins(x=0.3)
    axes.invert_yaxis()
    axes.set_xlabel("time in an iteration (s), mean over pipeline stages")
    interval = interval_text(prediction.low_s, prediction.high_s)
    axes.set_title(f"{prediction.job.name}: {seconds_text(whole)} ({interval})", fontsize="medium")
    return axes


POSSIBLE_MFU = 1.5  # differences in clocks and precision explain no more


def warnings_of(prediction: Prediction) -> tuple[str, ...]:
    """Warnings about a job and the predictor, for people."""
    found = list(prediction.job.warnings)
    execution = prediction.job.execution
    found += prediction.software_used.doubts if execution.kernels or execution.nccl or execution.date else ()
    other = prediction.interleaved
    if other is not None:
        found.append(
            f"parallel.virtual_stages is not stated, and {prediction.job.framework} usually interleaves: 1 is taken; "
            f"{other.job.parallel.virtual_stages} would take {seconds_text(other.iteration_time_s)}, and the interval "
            "covers both; state it for a narrower one"
        )
    if prediction.mfu > POSSIBLE_MFU:
        found.append(
            f"devices reach at most {100 * POSSIBLE_MFU:.0f} % of their peak, got {100 * prediction.mfu:.0f} %: the "
            "peak FLOP/s or the times of this predictor are wrong"
        )
    residual = None if prediction.predictor is None else prediction.predictor.calibration.residual
    if residual is not None and prediction.software not in residual.software:
        software = prediction.software
        named = f"framework {software!r:.80}" if software else "a framework that is not named"
        found.append(
            f"{named} ran none of the runs that this predictor was calibrated on: their correction counts for less "
            f"(theirs: {', '.join(map(repr, residual.software))})"
        )
    return tuple(found)
