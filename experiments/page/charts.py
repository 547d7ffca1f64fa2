"""Charts as SVG text, and a zoomable timeline, for self-contained pages.

The pages are made in the slim install, which has neither jinja2 nor a plot library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

BLUE, ORANGE, GREY = "#3b6fb5", "#d9822b", "#8a8f98"
PALETTE = (BLUE, ORANGE, "#3a9b6c", "#b5497a", "#7a5fb5", "#8f7a3b", "#4aa3b5", "#a35b4a")
_WIDTH, _LEFT = 720, 190


def bars(rows: Sequence[tuple[str, Sequence[tuple[float, str, str]]]]) -> str:
    """Draw horizontal bars from a line at zero: to the right, and to the left where a value is negative.

    Args:
        rows: Label of each row, and value, text and colour of each of its bars.
    """
    values = [value for _, own in rows for value, *_ in own]
    most = max(map(abs, values), default=0.0) or 1.0
    left, zero, room = (232, 470, 170) if min(values, default=0.0) < 0 else (_LEFT - 8, _LEFT, _WIDTH - _LEFT - 130)
    parts, top = [], 0
    for label, own in rows:
        parts.append(_text(left, top + 8 + 8 * len(own), label, "end"))
        for value, text, color in own:
            width = room * abs(value) / most
            x, place, anchor = (
                (zero, zero + width + 6, "start") if value >= 0 else (zero - width, zero - width - 6, "end")
            )
            parts.append(f'<rect x="{x:.1f}" y="{top + 4}" width="{width:.1f}" height="14" fill="{color}"/>')
            parts.append(_text(place, top + 15, text, anchor))
            top += 16
        top += 8
    parts.append(f'<line x1="{zero}" x2="{zero}" y1="0" y2="{top}" stroke="{GREY}"/>')
    return _svg(top, parts)


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    x_title: str,
    y_title: str,
    *,
    log_x: bool = False,
    steps: bool = False,
    limit: float | None = None,
) -> str:
    """Draw lines over one axis.

    Args:
        series: Name and points of each line.
        x_title, y_title: Of the axes, with units.
        log_x: Whether the x axis is logarithmic.
        steps: Whether a value holds until the next point.
        limit: A horizontal line, for example a capacity.
    """
    points = [point for _, each in series for point in each]
    if not points:
        return ""
    left, top, width, height = 70, 24, _WIDTH - 210, 240
    scale = math.log2 if log_x else float
    xs, ys = [scale(x) for x, _ in points], [y for _, y in points] + ([limit] if limit else [])
    low, span = min(xs), (max(xs) - min(xs)) or 1.0
    tick = _round_step(max(ys) or 1.0)
    most = tick * math.ceil(1.02 * (max(ys) or 1.0) / tick)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + width * (scale(x) - low) / span, top + height * (1 - y / most)

    parts = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="{GREY}"/>']
    for part in range(round(most / tick) + 1):
        y = tick * part
        parts.append(_text(left - 6, place(points[0][0], y)[1] + 4, f"{y:.6g}", "end"))
    ticks = sorted({x for x, _ in points}) if log_x else [(low + span * part / 4) for part in range(5)]
    for x in ticks[:: max(1, len(ticks) // 8)]:
        parts.append(_text(place(x, 0)[0], top + height + 16, f"{x:.4g}", "middle"))
    if limit is not None:
        y = place(points[0][0], limit)[1]
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c0392b"/>')
    for at, (name, each) in enumerate(series):
        color = PALETTE[at % len(PALETTE)]
        path, last = [], None
        for x, y in each:
            px, py = place(x, y)
            if steps and last is not None:
                path.append(f"{px:.1f},{last:.1f}")
            path.append(f"{px:.1f},{py:.1f}")
            last = py
        parts.append(f'<polyline points="{" ".join(path)}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if at < 14:
            parts.append(_text(left + width + 10, top + 12 + 17 * at, name, color=color))
    parts.append(_text(left + width / 2, top + height + 36, x_title, "middle"))
    parts.append(_text(left, 14, y_title))
    return _svg(top + height + 44, parts)


def _round_step(most: float) -> float:
    """The distance of about five ticks up to a number: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= most / 5)


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = "currentColor") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" font-size="12">{"".join(parts)}</svg>'


MOST_EVENTS = 60_000
_COLORS = {"forward": "#3b6fb5", "backward": "#d9822b", "optimizer": "#3a9b6c", "message": "#8a8f98", "dp": "#7a5fb5"}

_SCRIPT = """
(() => {
  const data = DATA, canvas = document.getElementById("timeline-NUMBER"), context = canvas.getContext("2d");
  const note = document.getElementById("timeline-note-NUMBER"), row = 18, left = 130;
  let from = 0, to = data.end, drag = null;
  const lanes = data.lanes.length;
  function size() {
    canvas.width = canvas.clientWidth * devicePixelRatio; canvas.height = (lanes * row + 24) * devicePixelRatio;
    canvas.style.height = (lanes * row + 24) + "px"; context.setTransform(devicePixelRatio,0,0,devicePixelRatio,0,0);
  }
  const seconds = t => to > 1e6 ? (t / 1e6).toPrecision(4) + " s" : (t / 1e3).toPrecision(4) + " ms";
  const width = () => canvas.clientWidth - left;
  const place = t => left + (t - from) / (to - from) * width();
  function draw() {
    context.clearRect(0, 0, canvas.clientWidth, lanes * row + 24);
    context.font = "11px sans-serif";
    for (const [lane, begin, lasts, color, name] of data.events) {
      if (begin + lasts < from || begin > to) continue;
      const x = Math.max(place(begin), left), w = Math.max(place(begin + lasts) - x, 0.5);
      context.fillStyle = data.colors[color]; context.fillRect(x, lane * row + 2, w, row - 4);
      if (w > 26) { context.fillStyle = "#fff"; context.fillText(data.names[name], x + 3, lane * row + 13, w - 4); }
    }
    context.clearRect(0, 0, left, lanes * row);
    context.fillStyle = getComputedStyle(canvas).color;
    data.lanes.forEach((lane, at) => context.fillText(lane, 2, at * row + 13, left - 6));
    for (let part = 0; part <= 8; part++) {
      const t = from + (to - from) * part / 8;
      const x = Math.min(place(t), canvas.clientWidth - 60);
      context.fillText(seconds(t), x, lanes * row + 16);
    }
  }
  function zoom(event) {
    event.preventDefault();
    const at = from + (event.offsetX - left) / width() * (to - from), factor = event.deltaY > 0 ? 1.25 : 0.8;
    from = Math.max(0, at - (at - from) * factor); to = Math.min(data.end, at + (to - at) * factor); draw();
  }
  function hover(event) {
    if (drag !== null) {
      const move = (drag - event.offsetX) / width() * (to - from), span = to - from;
      from = Math.min(Math.max(0, from + move), data.end - span); to = from + span; drag = event.offsetX;
      draw(); return;
    }
    const t = from + (event.offsetX - left) / width() * (to - from), lane = Math.floor(event.offsetY / row);
    const found = data.events.find(e => e[0] === lane && e[1] <= t && t <= e[1] + e[2]);
    note.textContent = found ? `${data.names[found[4]]}: ${seconds(found[2])}, from ` +
      `${seconds(found[1])}` : "Scroll to zoom, drag to move, double-click to see all.";
  }
  canvas.addEventListener("wheel", zoom, {passive: false}); canvas.addEventListener("mousemove", hover);
  canvas.addEventListener("mousedown", e => drag = e.offsetX); addEventListener("mouseup", () => drag = null);
  canvas.addEventListener("dblclick", () => { from = 0; to = data.end; draw(); });
  addEventListener("resize", () => { size(); draw(); });
  size(); draw(); hover({offsetX: 0, offsetY: -1});
})();
"""


def timeline_part(trace: dict[str, Any], number: int = 0) -> str:
    """Make the canvas of a timeline.

    Args:
        trace: Chrome trace events, as ``Prediction.timeline("segment")`` gives.  A long timeline is cut after
            ``MOST_EVENTS``.
        number: Tells the timelines of a page apart.
    """
    data = _data(trace["traceEvents"])
    script = _SCRIPT.replace("NUMBER", str(number)).replace(
        "DATA", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    )
    cut = f"<p>The first {MOST_EVENTS} events.</p>" if data["cut"] else ""
    return f'<canvas id="timeline-{number}"></canvas><p id="timeline-note-{number}"></p>{cut}<script>{script}</script>'


def _data(events: list[dict[str, Any]]) -> dict[str, Any]:
    titles = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans = sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"])
    cut, spans = len(spans) > MOST_EVENTS, spans[:MOST_EVENTS]
    keys = sorted({(e["pid"], e["tid"]) for e in spans})
    lanes = {key: at for at, key in enumerate(keys)}
    names: dict[str, int] = {}
    kinds = list(_COLORS)
    rows = [
        [
            lanes[e["pid"], e["tid"]],
            round(e["ts"], 2),
            round(e["dur"], 2),
            kinds.index(_kind(e)),
            names.setdefault(e["name"], len(names)),
        ]
        for e in spans
    ]
    labels = [f"{titles.get(process, process)}: {threads.get((process, thread), thread)}" for process, thread in keys]
    end = max((row[1] + row[2] for row in rows), default=1.0)
    colors = list(_COLORS.values())
    return {"lanes": labels, "events": rows, "names": list(names), "colors": colors, "end": end, "cut": cut}


def _kind(event: dict[str, Any]) -> str:
    name, category = event["name"], event.get("cat", "")
    if category in ("pp", "dp") or name == "optimizer":
        return {"pp": "message", "dp": "dp"}.get(category, "optimizer")
    return "forward" if name.startswith("F") else "backward"
