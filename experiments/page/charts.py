"""Charts as SVG text for pages: they load nothing, follow the colours of the page, and can be printed.

The pages are made in the slim install, which has neither jinja2 nor a plot library.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import pairwise, zip_longest
from typing import Any

# Colour-blind people can tell them apart; the first three are those of schedules and timelines in the documentation.
PALETTE = ("#3b6fb5", "#d9822b", "#3a9b6c", "#d58fc0", "#8bc7ee", "#7d3a10", "#d9c53a", "#43356f")
_ON_DARK = {5: "#c98a5e", 7: "#9d8fd6"}  # in place of colours that a dark background swallows
BLUE, ORANGE, GREEN = (f"var(--c{at})" for at in range(3))
GREY, RED = "var(--grey)", "var(--red)"
COLORS = ":root{" + "".join(f"--c{at}:{color};" for at, color in enumerate(PALETTE)) + "}"
DARK_COLORS = "".join(f"--c{at}:{color};" for at, color in _ON_DARK.items())
_WIDTH = 960
MOST_ROWS = 32  # of stacked bars
MOST_NAMES = 14  # of a legend
Point = Mapping[str, Any]  # of a scatter plot: x, y, text, color, size, and key if it can be chosen


def color(at: int) -> str:
    """The colour of a series by its number."""
    return f"var(--c{at % len(PALETTE)})"


def bars(rows: Sequence[tuple[str, Sequence[tuple[float, str, str]]]]) -> str:
    """Draw horizontal bars from a line at zero: value, text and colour of each bar of each row."""
    values = [0.0, *(value for _, own in rows for value, *_ in own)]
    low, span = min(values), max(values) - min(values) or 1.0
    return _bar_table(
        (label if not at else "", _part((min(value, 0.0) - low) / span, abs(value) / span, fill, label), text)
        for label, own in rows
        for at, (value, text, fill) in enumerate(own)
    )


def stacks(rows: Sequence[tuple[str, Mapping[str, float]]], limits: Sequence[float], unit: str) -> str:
    """Draw a bar for each row, made of its parts, and where its limit is; of many rows only some are drawn."""
    step = max(1, -(-len(rows) // MOST_ROWS))
    most = max([*limits, *(sum(own.values()) for _, own in rows)], default=1.0) or 1.0
    names = list(dict.fromkeys(name for _, own in rows for name in own))
    legend = "".join(f'<i style="background:{color(at)}"></i>{escape(name)} ' for at, name in enumerate(names))
    cells = []
    for (label, own), limit in list(zip(rows, limits, strict=True))[::step]:
        drawn, whole = "", 0.0
        for name, value in own.items():
            drawn += _part(whole / most, value / most, color(names.index(name)), f"{name}: {value:.2f} {unit}")
            whole += value
        drawn += _part(limit / most, 0.0, RED, f"limit: {limit:.1f} {unit}")
        cells.append((label, drawn, f"{whole:.1f} of {limit:.1f} {unit}"))
    return f'<p class="legend">{legend}</p>{_bar_table(cells)}'


def _part(begin: float, width: float, fill: str, said: str) -> str:
    """A part of a bar; places are shares of the widest bar."""
    place = f"left:{100 * begin:.2f}%;width:{100 * width:.2f}%;background:{fill}"
    return f'<i style="{place}" title="{escape(said)}"></i>'


def _bar_table(cells: Iterable[tuple[str, str, str]]) -> str:
    rows = (f"<tr><td>{escape(label)}</td><td><div>{drawn}</div></td><td>{escape(text)}</td></tr>"
            for label, drawn, text in cells)  # fmt: skip
    return f'<table class="bars">{"".join(rows)}</table>'


class _Plane:
    """Axes of a plot, with round ticks, and where values are on it."""

    left, top, width, height = 76, 26, 700, 290

    def __init__(self, points: Sequence[tuple[float, float]], titles: tuple[str, str], log_x: bool, zero: bool) -> None:
        self.scale = math.log2 if log_x else float
        xs, ys = sorted({self.scale(x) for x, _ in points}), [y for _, y in points]
        margin = 0.0 if zero else 0.04 * ((xs[-1] - xs[0]) or abs(xs[0]) or 1.0)
        self.low, self.span = xs[0] - margin, (xs[-1] - xs[0] + 2 * margin) or 1.0
        least, most = (0.0, max(ys) or 1.0) if zero else (min(ys), max(ys))
        tick = _round_step((most - least) or abs(most) or 1.0)
        self.bottom, self.most = tick * math.floor(least / tick), tick * math.ceil(1.02 * most / tick)
        self.parts = list[str]()
        self.draw = self.parts.append
        edge = f'height="{self.height}" fill="none" style="stroke:{GREY}"'
        self.draw(f'<rect x="{self.left}" y="{self.top}" width="{self.width}" {edge}/>')
        for part in range(round((self.most - self.bottom) / tick) + 1):
            y = self.place(points[0][0], self.bottom + tick * part)[1]
            self.write(self.left - 8, y + 4, f"{self.bottom + tick * part:.6g}", "end")
        step, below = _round_step(self.span), self.top + self.height
        ticks = range(math.ceil(self.low / step), math.floor((self.low + self.span) / step) + 1)
        for x in [2.0**x for x in xs][:: max(1, len(xs) // 8)] if log_x else [step * at for at in ticks]:
            self.write(self.place(x, 0)[0], below + 18, f"{x:.4g}", "middle")
        self.write(self.left + self.width / 2, below + 40, titles[0], "middle")
        self.write(self.left, 14, titles[1])

    def write(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self.draw(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def place(self, x: float, y: float) -> tuple[float, float]:
        right = self.left + self.width * (self.scale(x) - self.low) / self.span
        return right, self.top + self.height * (1 - (y - self.bottom) / (self.most - self.bottom))

    def line(self, places: Iterable[tuple[float, float]], style: str) -> None:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        self.draw(f'<polyline points="{path}" fill="none" {style}/>')

    def svg(self) -> str:
        box = f"0 0 {_WIDTH} {self.top + self.height + 48}"
        return f'<svg viewBox="{box}" role="img" font-size="13">{"".join(self.parts)}</svg>'


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    x_title: str,
    y_title: str,
    *,
    log_x: bool = False,
    steps: bool = False,
    limit: float | None = None,
) -> str:
    """Draw lines over one axis; ``steps``: a value holds until the next point; ``limit``: a horizontal line."""
    points = [point for _, each in series for point in each]
    if not points:
        return ""
    plane = _Plane([*points, *([(points[0][0], limit)] if limit else [])], (x_title, y_title), log_x, True)
    right = plane.left + plane.width
    if limit is not None:
        y = plane.place(points[0][0], limit)[1]
        plane.line([(plane.left, y), (right, y)], f'style="stroke:{RED}" stroke-width="2"')
    for at, (name, each) in enumerate(series):
        places = [plane.place(x, y) for x, y in each]
        corners = [(after[0], before[1]) for before, after in pairwise(places)] if steps else []
        path = [place for pair in zip_longest(places, corners) for place in pair if place is not None]
        plane.line(path, f'style="stroke:{color(at)}" stroke-width="2"')
        if at < MOST_NAMES:
            top = plane.top + 6 + 18 * at
            plane.draw(f'<rect x="{right + 12}" y="{top}" width="12" height="12" style="fill:{color(at)}"/>')
            plane.write(right + 30, top + 11, name)
    return plane.svg()


def scatter(points: Sequence[Point], x_title: str, y_title: str, line: Sequence[tuple[float, float]] = ()) -> str:
    """Draw points, and a line through some of them; a point with a key can be chosen by pointer and keyboard."""
    if not points:
        return ""
    plane = _Plane([(point["x"], point["y"]) for point in points], (x_title, y_title), False, False)
    plane.line((plane.place(x, y) for x, y in line), f'style="stroke:{GREY}" stroke-dasharray="4 3"')
    for point in points:
        (px, py), said, key = plane.place(point["x"], point["y"]), escape(point["text"]), point.get("key")
        chosen = "" if key is None else f' data-value="{key}" tabindex="0" role="button" aria-label="{said}"'
        place = f'cx="{px:.1f}" cy="{py:.1f}" r="{point["size"]:.1f}" style="fill:{point["color"]}"'
        plane.draw(f"<circle {place}{chosen}><title>{said}</title></circle>")
    return plane.svg()


def _round_step(most: float) -> float:
    """The distance of about five ticks up to a number: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= most / 5)


MOST_EVENTS = 60_000
# By kind of event, numbers of ``charts.PALETTE``, as in the documentation; -1: grey
_KINDS = {"forward": 0, "backward": 1, "optimizer": 2, "dp": 3, "message": -1}

SCRIPT = resources.files(__package__).joinpath("timeline.js")


def timeline_html(number: int = 0) -> str:
    """The canvas of a timeline below its note; ``number`` distinguishes the timelines of a page."""
    label = "Timeline of the pipeline: a lane for each stage and stream"
    canvas = f'<canvas id="timeline-{number}" data-testid="timeline" tabindex="0" aria-label="{label}"></canvas>'
    return f'<p id="timeline-note-{number}" class="note"></p><div>{canvas}</div>'


def timeline_call(trace: dict[str, Any], number: int = 0) -> str:
    """The call of ``SCRIPT`` that draws the events of ``Prediction.timeline("segment")``, at most ``MOST_EVENTS``."""
    data = json.dumps(timeline_data(trace["traceEvents"]), separators=(",", ":")).replace("<", "\\u003c")
    return f"stepsightTimeline({number},{data})"


def timeline_data(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Lanes and events: lane, begin and duration in microseconds, colour, name, the event that it waits for, how long
    its lane is idle before it, and whether it is on the critical path.
    """
    titles = {(e["name"], e["pid"], e["tid"] * (e["name"] == "thread_name")): e["args"]["name"]
              for e in events if e["ph"] == "M" and e["name"] in ("process_name", "thread_name")}  # fmt: skip
    spans = sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"])[:MOST_EVENTS]
    lanes, names = sorted({(e["pid"], e["tid"]) for e in spans}), dict[str, int]()
    before, waits = _causes(spans, events)
    critical, at = set[int](), max(range(len(spans)), key=lambda at: _end(spans[at]), default=-1)
    while at >= 0 and at not in critical:
        critical.add(at)
        at = before[at]
    number = {lane: at for at, lane in enumerate(lanes)}
    rows = [
        [number[e["pid"], e["tid"]], round(e["ts"], 2), round(e["dur"], 2), list(_KINDS).index(_kind(e)),
         names.setdefault(e["name"], len(names)), before[at], round(waits[at], 2), int(at in critical)]
        for at, e in enumerate(spans)
    ]  # fmt: skip
    labels = [": ".join((titles["process_name", process, 0], titles["thread_name", process, thread]))
              for process, thread in lanes]  # fmt: skip
    end = max(map(_end, spans), default=1.0)
    return {"lanes": labels, "events": rows, "names": list(names), "colors": list(_KINDS.values()), "end": end}


def _causes(spans: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """For each event: the one that it waits for, -1 if none, and how long its lane is idle before it.

    An action waits for the last of: what ran before it on its stage, and the message that it needs.  A message waits
    for the action that sends it.  The optimizer, and what is left to other streams, wait for the last of their stage.
    """
    place = {(e["pid"], e["tid"], e["ts"]): at for at, e in enumerate(spans)}
    ends, needs = dict[int, int](), defaultdict[int, list[int]](list)  # the last end of each arrow
    for e in events:
        if e["ph"] in ("s", "t", "f"):  # an arrow's three ends, in this order
            at = place.get((e["pid"], e["tid"], e["ts"]), -1)
            if e["id"] in ends:
                needs[at].append(ends[e["id"]])
            ends[e["id"]] = at
    before, waits = [], []
    last, latest = dict[tuple[int, int], int](), dict[int, int]()  # event of each lane, and of each stage
    for at, e in enumerate(spans):
        lane, stage, kind = (e["pid"], e["tid"]), e["pid"], _kind(e)
        own = last.get(lane, -1)
        after = {"message": -1, "optimizer": latest.get(stage, -1), "dp": latest.get(stage, -1)}.get(kind, own)
        asked = [own if kind != "message" else -1, after, *needs[at]]
        before.append(max((each for each in asked if each >= 0), key=lambda each: _end(spans[each]), default=-1))
        waits.append(max(0.0, e["ts"] - (_end(spans[own]) if own >= 0 else 0.0)))
        last[lane] = at
        if kind != "message" and (stage not in latest or _end(e) >= _end(spans[latest[stage]])):
            latest[stage] = at
    return before, waits


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _kind(event: dict[str, Any]) -> str:
    named = {"pp": "message", "dp": "dp"}.get(event.get("cat", ""))
    return named or {"o": "optimizer", "F": "forward"}.get(event["name"][0], "backward")
