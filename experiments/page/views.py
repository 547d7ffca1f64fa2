"""Views of predictions, comparisons, searches and traces as HTML, for the page in the browser and for saved files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import starmap
from typing import Any

from stepsight.dataset.job.job import Job
from stepsight.experiments.page import charts
from stepsight.experiments.page.charts import BLUE, GREEN, GREY, ORANGE, SCRIPT, bars, lines, timeline_html
from stepsight.experiments.questions.compare import comparison_tables, letters_of
from stepsight.experiments.reports.text_table import shown, words
from stepsight.experiments.search.choices import Choice, SearchResult, front_of
from stepsight.simulator.memory.estimate import FIELDS
from stepsight.training.corrections.intervals import EXTRAPOLATED_SHARE, interval_text, seconds_text
from stepsight.training.prediction.prediction import Prediction

Facts = Mapping[str, Any]
STAGES_DRAWN, MOST_POINTS = 8, 800  # of a pipeline's memory over time: stages, and points of each
MOST_LISTED = 40  # strategies of a search that are listed
_DARK = (
    "--ink:#e6e6e6;--paper:#1b1d21;--soft:#2a2d33;--edge:#454a52;--red:#ff8a80;color-scheme:dark;" + charts.DARK_COLORS
)


def style() -> str:
    """Style sheet of pages and of saved files: dark where the reader's system is, unless the page says otherwise."""
    text = resources.files(__package__).joinpath("page.css").read_text("utf-8")
    dark = f"@media screen and (prefers-color-scheme:dark){{:root:not(.light){{{_DARK}}}}}:root.dark{{{_DARK}}}"
    return f"{charts.COLORS}{text}{dark}"


def job_page(predictions: Sequence[Prediction], facts: Sequence[Facts], extra: Sequence[str] = ()) -> str:
    """Write all about jobs as one file that loads nothing; ``extra``: views that come first, such as a comparison."""
    titles, parts = [title(one.job, one.job.name) for one in predictions], list(extra)
    for number, (text, each) in enumerate(zip(titles, facts, strict=True)):
        parts += [f'<h1 id="job-{number}">{escape(text)}</h1>', answer(each, each["plan"]), said(each)]
        of_job = {
            "Where the time goes": time(each),
            "Timeline": timeline_html(number) + critical(each),
            "Memory": memory(each) + memory_over_time(each),
            "Training": training(each["plan"]),
            "Sensitivity": sensitivity(each),
            "What to try next": next_steps(each),
            "Assumptions": assumptions(each),
        }
        parts += starmap(section, of_job.items())
    calls = [charts.timeline_call(one.timeline("segment"), number) for number, one in enumerate(predictions)]
    whole = titles[0] if len(titles) == 1 else f"{len(titles)} jobs"
    head = f'<meta charset="utf-8"><title>{escape(whole)}</title><style>{style()}</style>'
    script = f"<script>{SCRIPT.read_text('utf-8')}{';'.join(calls)}</script>"
    body = f"<article>{''.join(parts)}</article>{script}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def title(job: Job, name: str = "") -> str:
    """A job on its devices; ``name``: instead of its model's."""
    return f"{name or job.model_name} on {job.cluster.num_devices:,} x {job.hardware_name}"


def html_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; columns whose cells begin with a digit or a sign are set to the right."""
    cells = [[shown(cell) for cell in row] for row in rows]
    numeric = [bool(cells) and all(row[at][:1] in "0123456789+-" for row in cells) for at in range(len(header))]
    marks = [' class="number"' if each else "" for each in numeric]

    def line(tag: str, row: Sequence[str]) -> str:
        drawn = (f"<{tag}{mark}>{escape(cell)}</{tag}>" for cell, mark in zip(row, marks, strict=True))
        return f"<tr>{''.join(drawn)}</tr>"

    return f"<table>{line('th', header)}{''.join(line('td', row) for row in cells)}</table>"


def section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def answer(facts: Facts, plan: Facts | None = None) -> str:
    """The figures that a reader looks for first."""
    held = facts["memory"]
    sizes = f"{held['peak_bytes'] / 1e9:.1f} of {held['capacity_bytes'] / 1e9:.1f} GB"
    figures = [
        ("iteration-time", seconds_text(facts["iteration_time_s"]), "an iteration"),
        ("interval", interval_text(facts["low_s"], facts["high_s"]), "90 % prediction interval"),
        ("memory", sizes, f"memory: {'fits' if held['fits'] else 'does not fit'}"),
        ("mfu", f"{100 * facts['mfu']:.1f} %", "MFU"),
    ]
    if facts["tokens_per_s"] is not None:
        figures.insert(2, ("tokens", f"{facts['tokens_per_s']:,.0f}", f"{facts.get('unit', 'tokens')}/s"))
    if plan is not None:
        cost = "no price" if plan["cost"] is None else f"{plan['cost']:,.0f}"
        figures += [
            ("days", f"{plan['days']:,.1f} days", f"for {plan['tokens']:.4g} {plan['unit']}".replace("e+", "e")),
            ("cost", cost, f"cost of {plan['device_hours']:,.0f} device-hours"),
        ]
    told = (f'<div><b data-testid="{name}">{escape(value)}</b><span>{escape(text)}</span></div>'
            for name, value, text in figures)  # fmt: skip
    return f'<div class="answer">{"".join(told)}</div>'


def said(facts: Facts) -> str:
    """What the answer rests on, and its warnings."""
    share = facts["unsupported_share"]
    outside = f"{100 * share:.0f} % of the time lies outside the measured range."
    rests = f"The answer comes from: {facts['source']}. {outside if share else 'All of it was measured.'}"
    extrapolated = ["This prediction is extrapolated."] * (share > EXTRAPOLATED_SHARE)
    texts = filter(None, [*extrapolated, *facts["warnings"], facts["memory"]["reason"]])
    items = "".join(f"<li>{escape(text)}</li>" for text in facts["unsupported"])
    more = f"<details><summary>Outside the measured range</summary><ul>{items}</ul></details>" if items else ""
    return f"<p>{escape(rests)}</p>{_warnings(texts)}{more}"


def _warnings(texts: Iterable[str]) -> str:
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in texts)


def time(facts: Facts) -> str:
    """Where the time goes, by cause."""
    whole = facts["iteration_time_s"]
    return bars([(words(cause), [(seconds, f"{seconds_text(seconds)}, {100 * seconds / whole:.1f} %", BLUE)])
                 for cause, seconds in facts["breakdown"].items() if seconds > 1e-6 * whole])  # fmt: skip


def critical(facts: Facts) -> str:
    """The ops and collectives of the critical path."""
    rows = [
        [row["work"], f"{100 * row['share']:.1f} %", f"{row['count']:.0f}", f"{1e6 * row['seconds']:.1f} µs",
         seconds_text(row["halved_s"])]
        for row in facts["explain"]
    ]  # fmt: skip
    header = ["op or collective", "of the time", "times on the critical path", "each", "halving it saves"]
    return "<h3>Critical path</h3>" + html_table(header, rows)


def memory(facts: Facts) -> str:
    """Memory of each stage against the capacity."""
    stages = facts["memory"]["stages"]
    rows = [(f"stage {at}", {words(name): stage[name] / 1e9 for name in FIELDS if stage[name]})
            for at, stage in enumerate(stages)]  # fmt: skip
    limits = [stage.get("capacity_bytes", facts["memory"]["capacity_bytes"]) / 1e9 for stage in stages]
    drawn = charts.stacks(rows, limits, "GB")
    return f"<h3>Memory by stage</h3>{drawn}<p>The red line is the capacity of a device.</p>"


def memory_over_time(facts: Facts) -> str:
    """Memory of some stages over the iteration; each point is the maximum of those that it replaces."""
    series = []
    for row in facts["memory_over_time"][:: max(1, len(facts["memory_over_time"]) // STAGES_DRAWN)]:
        seconds, sizes, step = row["seconds"], row["bytes"], max(1, -(-len(row["seconds"]) // MOST_POINTS))
        points = [(seconds[at], max(sizes[at : at + step]) / 1e9) for at in range(0, len(seconds), step)]
        series.append((f"stage {row['stage']}", points))
    titles, limit = ("seconds of the iteration", "memory, GB"), facts["memory"]["capacity_bytes"] / 1e9
    return "<h3>Memory over time</h3>" + lines(series, *titles, steps=True, limit=limit)


def training(plan: Facts) -> str:
    """Duration and cost of a training."""
    energy, failures = plan["energy_kwh"], "mtbf_hours" in plan
    rows = {
        plan["unit"].capitalize(): f"{plan['tokens']:.4g}",
        "Duration": f"{plan['days']:.2f} days ({plan['low_days']:.2f} to {plan['high_days']:.2f})",
        f"{plan['unit'].capitalize()} per day": f"{plan['tokens_per_day']:.4g}",
        "Device-hours": f"{plan['device_hours']:,.0f}",
        "Cost": "no price is known (--prices)" if plan["cost"] is None else f"{plan['cost']:,.0f}",
        "Energy (estimate: devices at their rated power)": f"{energy:,.0f} kWh" if energy else "no power is known",
        "Goodput": f"{100 * plan['goodput']:.1f} %" if failures else "100 %: failures are not counted",
    }
    if failures:
        rows["Time between failures of the job"] = f"{plan['mtbf_hours']:.1f} hours"
        rows["Checkpoint interval"] = f"{plan['checkpoint_interval_s'] / 60:.1f} minutes"
    return html_table(["", ""], list(rows.items()))


def sensitivity(facts: Facts) -> str:
    """What halving and doubling one thing changes, and curves over nodes and links."""

    def bar(effect: Facts, fill: str) -> tuple[float, str, str]:
        percent = 100 * (effect["tokens_per_s_ratio"] - 1)
        return percent, f"{percent:+.1f} %", fill

    ways = {"half": ORANGE, "double": BLUE}
    rows = [(row["name"], [bar(row[way], fill) for way, fill in ways.items() if row[way]]) for row in facts["tornado"]]
    turns = " or ".join(f'<b style="color:{fill}">{way}</b>' for way, fill in (("halved", ORANGE), ("doubled", BLUE)))
    parts = [f"<p>Change of throughput when one thing is {turns}; the rest stays.</p>", bars(rows)]
    for key, points in facts["curves"].items():
        legal = [point for point in points if point["iteration_time_s"] is not None]
        named = {"predicted": "iteration_time_s", "interval, low": "low_s", "interval, high": "high_s"}
        chart = [(name, [(float(p[key]), p[column]) for p in legal]) for name, column in named.items()]
        if len(legal) > 1:
            same = ", global batch in proportion" if key == "cluster.nodes" else ""
            parts.append(lines(chart, f"{words(key)}{same}", "seconds of an iteration", log_x=True))
    return "".join(parts)


def next_steps(facts: Facts) -> str:
    """Single changes that are faster."""
    rows = [
        [", ".join(f"{words(key)}: {shown(value)}" for key, value in step["values"].items()),
         f"{100 * (step['tokens_per_s_ratio'] - 1):+.1f} %", seconds_text(step["iteration_time_s"]),
         f"{step['memory_bytes'] / 1e9:.1f}"]
        for step in facts["next_steps"]
    ]  # fmt: skip
    text = html_table(["change", "throughput", "iteration", "memory, GB"], rows)
    if not rows:
        text = "<p>No single change of the strategy that fits in memory is predicted to be faster.</p>"
    if facts["tables"]["model"]["family"] == "dlrm":
        text += "<p>Other placements of the tables are not tried here: <code>stepsight search</code> does.</p>"
    return text


def assumptions(facts: Facts) -> str:
    """Every key of the job, with defaults, and the links."""
    rows = []
    for name, table in facts["tables"].items():
        keys = table.items() if isinstance(table, Mapping) else [("", table)]
        rows += [[words(name), words(f"{name}.{key}"), value] for key, value in keys if value not in ((), [], "", None)]
    fabric = facts["fabric"]
    for name in ("within a node", "between nodes"):
        link = fabric[name]
        text = f"{link['gbytes_per_s']:.4g} GB/s per device and direction, {link['latency_us']:.3g} µs"
        rows.append(["Links", f"{fabric['name']}, {name}", text])
    keys_table = html_table(["part", "setting", "value"], rows)
    return f"<details><summary>All settings of the job, with defaults</summary>{keys_table}</details>"


def comparison(told: Facts, links: bool = False) -> str:
    """Compare jobs with the first: what differs, and where the time differs; ``links``: to each job of the page."""
    names = letters_of(told)
    nav = "".join(f'<a href="#job-{at}">{name}</a>' for at, name in enumerate(names)) if links else ""
    gains = [
        (f"{words(cause)}, {name}", [(seconds - values[0], f"{1e3 * (seconds - values[0]):+,.1f} ms", ORANGE)])
        for cause, values in told["causes"].items()
        for name, seconds in zip(names[1:], values[1:], strict=True)
        if abs(seconds - values[0]) > 1e-4 * told["sides"][0]["seconds"]
    ]
    tables = "".join(html_table(*each) for each in comparison_tables(told, words))
    return f"<h1>Comparison</h1><nav>{nav}</nav>{tables}" + section("Differences by cause, from A", bars(gains))


def timed_choices(result: SearchResult) -> list[Choice]:
    """The strategies that ``search_view`` draws: those that were timed, or the best of each scenario."""
    return [choice for choice in result.plans or result.choices if choice.seconds is not None]


def search_view(result: SearchResult, chosen: int | None = None) -> str:
    """The strategies of a search: time over memory, the front, regret and doubt; ``chosen``: number of one of them."""
    choices, goal = timed_choices(result), result.goal
    costs = [goal.objectives(choice.job, choice.timed)["cost"] for choice in choices]
    dearest = max((cost for cost in costs if cost is not None), default=None)
    front = front_of([(choice.peak_bytes, choice.timed[0]) if choice.fits else None for choice in choices])
    rivals = {id(rival.choice): rival for rival in result.rivals}
    points, rows = list[dict[str, Any]](), list[list[str]]()
    for at, (choice, cost) in enumerate(zip(choices, costs, strict=True)):
        told_cost = "-" if cost is None else f"{cost:,.0f}"
        color = ORANGE if at in front else BLUE if choice.fits else GREY
        text = f"{choice.job.name}: {seconds_text(choice.timed[0])}, {choice.peak_bytes / 1e9:.1f} GB"
        text += ("" if cost is None else f", cost {told_cost}") + ("" if choice.fits else ", does not fit")
        size = (5 if dearest is None or cost is None else 3 + 5 * cost / dearest) + 3 * (at == chosen)
        points.append({"x": choice.peak_bytes / 1e9, "y": choice.timed[0], "text": text, "key": at,
                       "color": GREEN if at == chosen else color, "size": size})  # fmt: skip
        rival = rivals.get(id(choice))
        regret = f"{result.regrets[at]:.2f} %" if at < len(result.regrets) else "-"
        doubt = f"{rival.slower_percent:+.1f} ± {rival.error_percent:.1f} %" if rival else "-"
        rows.append([choice.job.name, seconds_text(choice.timed[0]), interval_text(*choice.timed[1:]),
                     f"{choice.peak_bytes / 1e9:.1f}", told_cost, regret, doubt,
                     "yes" if at in front else ""])  # fmt: skip
    line = [(points[at]["x"], points[at]["y"]) for at in front]
    header = ["strategy", "iteration", "interval", "memory, GB", "cost", "expected regret", "not told from the best",
              "front"]  # fmt: skip
    titles = ("memory of the fullest stage, GB", "seconds of an iteration")
    drawn = charts.scatter(points, *titles, line)
    told = f"{result.counts}: {result.proof}."
    sized = "" if dearest is None else " A larger point costs more."
    return (
        f"<p>{escape(told)} Orange: the front of time and memory. Grey: does not fit.{sized}</p>"
        f'<div data-testid="front">{drawn}</div>{html_table(header, rows[:MOST_LISTED])}'
    )


def trace_view(told: Facts, split: Facts) -> str:
    """A traced run as ``ReplayedRun.to_dict`` and ``Breakdown.to_dict`` give it: where its time went, exposed
    communication, causes by what their removal saves.
    """

    def shares(seconds: Mapping[str, float], fill: str) -> str:
        whole = sum(seconds.values()) or 1.0
        return bars([(words(name), [(value, f"{1e3 * value:,.3f} ms, {100 * value / whole:.1f} %", fill)])
                     for name, value in list(seconds.items())[:MOST_LISTED]])  # fmt: skip

    percent = told["exposed_communication_percent"]
    exposed = [(f"rank {rank}", [(seconds, f"{1e3 * seconds:.3f} ms, {percent[rank]:.1f} %", ORANGE)])
               for rank, seconds in list(told["exposed_communication_s"].items())[:MOST_LISTED]]  # fmt: skip
    causes = [[words(cause["cause"]), f"{1e3 * cause['seconds']:.3f} ms", f"{cause['saved_percent']:.1f} %",
               cause["evidence"], cause["advice"]] for cause in told["causes"]]  # fmt: skip
    steps = f"Step: measured {seconds_text(told['measured_s'])}, replayed {seconds_text(told['replayed_s'])}."
    return (
        f"<h1>{escape(str(told['run']))}</h1><p>{steps}</p>{_warnings(told['warnings'])}"
        + section("Causes, by what their removal saves",
                  html_table(["cause", "saves", "of the step", "evidence", "what to do"], causes))
        + section("Exposed communication of a step", bars(exposed))
        + section("Critical path", shares(split["critical"], BLUE))
        + section("Device time by kind", shares(split["kinds"], BLUE))
        + section("Idle time by cause", shares(split["idle"], GREY))
    )  # fmt: skip
