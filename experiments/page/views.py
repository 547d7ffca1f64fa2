"""A page about one job: the prediction and its basis, where the time goes, and what to try next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from stepsight.experiments.page.charts import BLUE, ORANGE, bars, lines, timeline_part
from stepsight.training.corrections.intervals import EXTRAPOLATED_SHARE, seconds_text
from stepsight.training.prediction.prediction import Prediction

if TYPE_CHECKING:
    pass

STAGES_DRAWN = 8  # of a pipeline's memory
MOST_POINTS = 800  # of a curve
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#1f2328;background:#fff}
@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#1b1d21}table,td,th{border-color:#444}}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse}
td,th{border:1px solid #ddd;padding:2px 10px;text-align:left;vertical-align:top}td.number{text-align:right}
svg{max-width:760px;width:100%}canvas{width:100%;cursor:grab}.answer{font-size:1.6em}code{font-size:.9em}
nav a{margin-right:1em}.warning{color:#b3261e}details{margin:.5em 0}
"""


def job_part(prediction: Prediction, facts: Mapping[str, Any], number: int) -> str:
    """Write the part of the page about one job; ``number`` distinguishes the jobs of a page."""
    title = f"{facts['job']} on {prediction.job.cluster.num_devices} x {facts['hardware']}"
    parts = [
        f'<h1 id="job-{number}">{escape(title)}</h1>',
        _answer(facts),
        _section("Where the time goes", _time(facts)),
        _section("Timeline", timeline_part(prediction.timeline("segment"), number)),
        _section("Memory", _memory(facts)),
        _section("Training", _plan(facts["plan"])),
        _section("Sensitivity", _sensitivity(facts)),
        _section("What to try next", _next(facts)),
        _section("Assumptions", _assumptions(facts)),
    ]
    return "".join(parts)


def jobs_page(parts: Sequence[str], titles: Sequence[str], compared: Mapping[str, Any] | None) -> str:
    """Write the page as self-contained HTML."""
    title = titles[0] if len(titles) == 1 else f"{len(titles)} jobs"
    if compared is not None:
        parts = [_comparison(compared, titles), *parts]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _comparison(told: Mapping[str, Any], titles: Sequence[str]) -> str:
    links = "".join(f'<a href="#job-{at}">{at + 1}: {escape(title)}</a>' for at, title in enumerate(titles))
    rows = [
        (f"job {at}", [(side["seconds"], f"{seconds_text(side['seconds'])}, {side['percent']:+.1f} %", BLUE)])
        for at, side in enumerate(told["sides"], 1)
    ]
    header = ["what differs", *(side["name"] for side in told["sides"])]
    differs = html_table(header, [[key, *values] for key, values in told["facts"].items()])
    causes = [[name, *(f"{1e3 * value:.1f} ms" for value in values)] for name, values in told["causes"].items()]
    times = html_table(["where the time goes", *header[1:]], causes)
    return f"<h1>Comparison</h1><nav>{links}</nav>{bars(rows)}{differs}<p></p>{times}"


def html_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; numbers are formatted already."""
    top = "".join(f"<th>{escape(str(name))}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _answer(facts: Mapping[str, Any]) -> str:
    memory = facts["memory"]
    fits = "fits" if memory["fits"] else "does not fit"
    outside = 100 * facts["unsupported_share"]
    rests = f"The answer comes from: {facts['source']}. " + (
        f"{outside:.0f} % of the time lies outside the measured range." if outside else "All of it was measured."
    )
    said = [
        *(["This prediction is extrapolated."] if facts["unsupported_share"] > EXTRAPOLATED_SHARE else []),
        *facts["warnings"],
    ]
    warnings = "".join(f'<p class="warning">{escape(text)}</p>' for text in said)
    if memory["reason"]:
        warnings += f'<p class="warning">{escape(memory["reason"])}</p>'
    return (
        f'<p class="answer">{seconds_text(facts["iteration_time_s"])} per iteration</p>'
        f"<p>90 % prediction interval: {seconds_text(facts['low_s'])} to {seconds_text(facts['high_s'])}. "
        f"{facts['tokens_per_s']:,.0f} tokens/s, MFU {100 * facts['mfu']:.1f} %, "
        f"{memory['peak_bytes'] / 1e9:.1f} GB of {memory['capacity_bytes'] / 1e9:.1f} GB ({fits}).</p>"
        f"<p>{escape(rests)}</p>{warnings}"
    )


def _time(facts: Mapping[str, Any]) -> str:
    whole = facts["iteration_time_s"]
    rows = [
        (cause.replace("_", " "), [(seconds, f"{seconds_text(seconds)}, {100 * seconds / whole:.1f} %", BLUE)])
        for cause, seconds in facts["breakdown"].items()
        if seconds > 1e-6 * whole
    ]
    cells = [
        [row["work"], f"{row['count']:.0f}", f"{1e6 * row['seconds']:.1f} µs", f"{100 * row['share']:.1f} %",
         seconds_text(row["halved_s"])]
        for row in facts["explain"]
    ]  # fmt: skip
    header = ["op or collective", "times on the critical path", "each", "part of the time", "halving it saves"]
    return bars(rows) + "<h3>What decides the time</h3>" + html_table(header, cells)


def _memory(facts: Mapping[str, Any]) -> str:
    stages = facts["memory"]["stages"]
    names = ("parameters", "gradients", "optimizer", "activations", "temporary", "reserved", "total")
    cells = [[at, *(f"{stage[name] / 1e9:.2f}" for name in names), stage["moment"]] for at, stage in enumerate(stages)]
    over_time = facts["memory_over_time"]
    drawn = over_time[:: max(1, len(over_time) // STAGES_DRAWN)]
    chart = lines(
        [(f"stage {row['stage']}", _thinned(row["seconds"], row["bytes"])) for row in drawn],
        "seconds of the iteration", "GB", steps=True, limit=facts["memory"]["capacity_bytes"] / 1e9,
    )  # fmt: skip
    detail = html_table(["stage", *(f"{name} GB" for name in names), "largest in"], cells)
    by_stage = f"<details open><summary>By stage</summary>{detail}</details>"
    return f"{chart}<p>The red line is the capacity of a device.</p>{by_stage}"


def _thinned(seconds: Sequence[float], sizes: Sequence[float]) -> list[tuple[float, float]]:
    """At most ``MOST_POINTS`` points, each the maximum of those that it replaces; in GB."""
    step = max(1, -(-len(seconds) // MOST_POINTS))
    return [(seconds[at], max(sizes[at : at + step]) / 1e9) for at in range(0, len(seconds), step)]


def _plan(plan: Mapping[str, Any]) -> str:
    rows = [
        ["tokens", f"{plan['tokens']:.4g}"],
        ["duration", f"{plan['days']:.2f} days ({plan['low_days']:.2f} to {plan['high_days']:.2f})"],
        ["tokens per day", f"{plan['tokens_per_day']:.4g}"],
        ["device-hours", f"{plan['device_hours']:,.0f}"],
        ["cost", "no price is known (--prices)" if plan["cost"] is None else f"{plan['cost']:,.0f}"],
        [
            "energy (estimate: devices at their rated power)",
            "no power is known" if plan["energy_kwh"] is None else f"{plan['energy_kwh']:,.0f} kWh",
        ],
        ["goodput", f"{100 * plan['goodput']:.1f} %" if "mtbf_hours" in plan else "100 %: failures are not counted"],
    ]
    if "mtbf_hours" in plan:
        rows.append(["time between failures of the job", f"{plan['mtbf_hours']:.1f} hours"])
        rows.append(["checkpoint interval", f"{plan['checkpoint_interval_s'] / 60:.1f} minutes"])
    return html_table(["", ""], rows)


def _sensitivity(facts: Mapping[str, Any]) -> str:
    def bar(effect: Mapping[str, Any], color: str) -> tuple[float, str, str]:
        percent = 100 * (effect["tokens_per_s_ratio"] - 1)
        return percent, f"{percent:+.1f} %", color

    ways = {"half": ORANGE, "double": BLUE}
    rows = [
        (row["name"], [bar(row[way], color) for way, color in ways.items() if row[way]]) for row in facts["tornado"]
    ]
    turns = " or ".join(f'<b style="color:{color}">{way}d</b>' for way, color in (("halve", ORANGE), ("double", BLUE)))
    parts = [f"<p>Change of tokens/s when one thing is {turns}; the rest stays.</p>", bars(rows)]
    for key, points in facts["curves"].items():
        legal = [point for point in points if point["iteration_time_s"] is not None]
        named = {"predicted": "iteration_time_s", "interval, low": "low_s", "interval, high": "high_s"}
        chart = [(name, [(float(p[key]), p[column]) for p in legal]) for name, column in named.items()]
        if len(legal) > 1:
            same = ", global batch in proportion" if key == "cluster.nodes" else ""
            parts.append(lines(chart, f"{key}{same}", "seconds of an iteration", log_x=True))
    return "".join(parts)


def _next(facts: Mapping[str, Any]) -> str:
    rows = [
        [step["name"], f"{100 * (step['tokens_per_s_ratio'] - 1):+.1f} % tokens/s",
         seconds_text(step["iteration_time_s"]), f"{step['memory_bytes'] / 1e9:.1f}"]
        for step in facts["next_steps"]
    ]  # fmt: skip
    text = html_table(["change", "effect", "iteration", "GB"], rows)
    if not rows:
        text = "<p>No single change of the strategy that fits in memory is predicted to be faster.</p>"
    found = [
        [choice["job"], seconds_text(choice["iteration_time_s"]), f"{choice['memory_bytes'] / 1e9:.1f}"]
        for choice in facts["search"]
        if choice.get("iteration_time_s")
    ]
    if found:
        text += "<h3>Best strategies of the search</h3>" + html_table(["strategy", "iteration", "GB"], found)
    return text


def _assumptions(facts: Mapping[str, Any]) -> str:
    rows = []
    for section, table in facts["tables"].items():
        keys = table.items() if isinstance(table, Mapping) else [("", table)]
        rows += [[section, key, value] for key, value in keys if value not in ((), [], "", None)]
    fabric = facts["fabric"]
    for name in ("within a node", "between nodes"):
        link = fabric[name]
        text = f"{link['gbytes_per_s']:.4g} GB/s per device and direction, {link['latency_us']:.3g} µs"
        rows.append(["fabric", f"{fabric['name']}, {name}", text])
    outside = "".join(f"<li>{escape(text)}</li>" for text in facts["unsupported"])
    keys_table = html_table(["table", "key", "value"], rows)
    text = f"<details><summary>All keys of the job, with defaults</summary>{keys_table}</details>"
    if outside:
        text += f"<details><summary>Outside the measured range</summary><ul>{outside}</ul></details>"
    return text
