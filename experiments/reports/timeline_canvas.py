"""A zoomable timeline as a part of a page: a canvas and the script that draws it."""

from __future__ import annotations

import json
from typing import Any

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
        "DATA", json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
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
    if category == "pp":
        return "message"
    if category == "dp":
        return "dp"
    if name == "optimizer":
        return "optimizer"
    return "forward" if name.startswith("F") else "backward"
