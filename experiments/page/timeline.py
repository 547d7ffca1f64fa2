"""A timeline that can be zoomed: what runs when, why it waits, and what is on the critical path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

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
    """The call of ``SCRIPT`` that draws a timeline.

    Args:
        trace: Chrome trace events, as ``Prediction.timeline("segment")`` gives.  A long timeline is cut after
            ``MOST_EVENTS``.
        number: As in ``timeline_html``.
    """
    data = json.dumps(timeline_data(trace["traceEvents"]), separators=(",", ":")).replace("<", "\\u003c")
    return f"stepsightTimeline({number},{data})"


def timeline_data(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Lanes and events: lane, begin and duration in microseconds, colour, name, the event that it waits for, how long
    its lane is idle before it, and whether it is on the critical path.
    """
    titles = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans = sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"])[:MOST_EVENTS]
    keys = sorted({(e["pid"], e["tid"]) for e in spans})
    lanes, names = {key: at for at, key in enumerate(keys)}, dict[str, int]()
    before, waits = _causes(spans, events)
    critical, at = set[int](), max(range(len(spans)), key=lambda at: _end(spans[at]), default=-1)
    while at >= 0 and at not in critical:
        critical.add(at)
        at = before[at]
    rows = [
        [lanes[e["pid"], e["tid"]], round(e["ts"], 2), round(e["dur"], 2), list(_KINDS).index(_kind(e)),
         names.setdefault(e["name"], len(names)), before[at], round(waits[at], 2), int(at in critical)]
        for at, e in enumerate(spans)
    ]  # fmt: skip
    labels = [f"{titles.get(process, process)}: {threads.get((process, thread), thread)}" for process, thread in keys]
    end = max(map(_end, spans), default=1.0)
    return {"lanes": labels, "events": rows, "names": list(names), "colors": list(_KINDS.values()), "end": end}


def _causes(spans: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """For each event: the one that it waits for, -1 if none, and how long its lane is idle before it.

    An action waits for the last of: what ran before it on its stage, and the message that it needs.  A message waits
    for the action that sends it.  The optimizer, and what an action leaves to other streams, wait for the last of their
    stage.
    """
    place = {(e["pid"], e["tid"], e["ts"]): at for at, e in enumerate(spans)}
    arrows: dict[int, dict[str, int]] = {}
    for e in events:
        if e["ph"] in ("s", "t", "f") and (e["pid"], e["tid"], e["ts"]) in place:
            arrows.setdefault(e["id"], {})[e["ph"]] = place[e["pid"], e["tid"], e["ts"]]
    needs: dict[int, list[int]] = {}
    for arrow in arrows.values():
        for one, other in (("s", "t"), ("t", "f")):
            if one in arrow and other in arrow:
                needs.setdefault(arrow[other], []).append(arrow[one])
    before, waits = [], []
    last, latest = dict[tuple[int, int], int](), dict[int, int]()  # event of each lane, and of each stage
    for at, e in enumerate(spans):
        lane, stage = (e["pid"], e["tid"]), e["pid"]
        own, asked = last.get(lane, -1), needs.get(at, [])
        if _kind(e) in ("optimizer", "dp"):
            asked = [*asked, latest.get(stage, -1)]
        found = [each for each in ([] if _kind(e) == "message" else [own]) + asked if each >= 0]
        before.append(max(found, key=lambda each: _end(spans[each]), default=-1))
        waits.append(max(0.0, e["ts"] - (_end(spans[own]) if own >= 0 else 0.0)))
        last[lane] = at
        if _kind(e) != "message" and (stage not in latest or _end(e) >= _end(spans[latest[stage]])):
            latest[stage] = at
    return before, waits


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _kind(event: dict[str, Any]) -> str:
    name, category = event["name"], event.get("cat", "")
    if category in ("pp", "dp") or name == "optimizer":
        return {"pp": "message", "dp": "dp"}.get(category, "optimizer")
    return "forward" if name.startswith("F") else "backward"
