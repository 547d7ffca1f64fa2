"""A captured step with times as Chrome trace events, with the memory of each rank as a counter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import new_file
from stepsight.dataset.imported.rank_graph import HOST, PHASES
from stepsight.simulator.replay.captured_step import CapturedStep

_US = 1e6
_LEAST_CHANGE = 0.002  # share of the peak: smaller changes of memory are not drawn


def write_timeline(step: CapturedStep, memory: Sequence[NDArray[np.int64]], to: Path, name: str) -> None:
    """Write a file that ui.perfetto.dev opens: a process for each rank, a thread for each stream.

    Args:
        step: The timed step.
        memory: Bytes of tensors when each node of each rank is issued.
        to: The file.
        name: Of the script.
    """
    events: list[dict[str, Any]] = []
    for place, live in enumerate(memory):
        events += _rank_events(step, place)
        events += _memory_events(step, place, live)
    told = {"displayTimeUnit": "ms", "otherData": {"job": name, "iteration_time_s": step.iteration_time_s}}
    with new_file(to) as part:
        part.write_text(json.dumps({**told, "traceEvents": events}, separators=(",", ":")), "utf-8")


def _rank_events(step: CapturedStep, place: int) -> list[dict[str, Any]]:
    graph = step.graphs[place]
    start, end = step.of_rank(place)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": graph.rank, "args": {"name": f"rank {graph.rank}"}}
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": graph.rank, "tid": number, "args": {"name": stream}}
        for number, stream in enumerate(graph.streams)
    ]
    columns = (graph.nodes[name].tolist() for name in ("kind", "stream", "phase", "work", "name"))
    times = zip((start * _US).tolist(), ((end - start) * _US).tolist(), strict=True)
    for (kind, stream, phase, work, name), (begin, lasts) in zip(zip(*columns, strict=True), times, strict=True):
        if kind != HOST:
            events.append(
                {
                    "ph": "X", "name": graph.works[work].kind, "cat": PHASES[phase], "pid": graph.rank, "tid": stream,
                    "ts": round(begin, 3), "dur": round(lasts, 3),
                    "args": {"what": str(graph.works[work]), "call": graph.names[name]},
                }
            )  # fmt: skip
    return events


def _memory_events(step: CapturedStep, place: int, live: NDArray[np.int64]) -> list[dict[str, Any]]:
    """The memory at the start of each op of the computation; changes that are too small to see are left out."""
    graph, (start, _) = step.graphs[place], step.of_rank(place)
    nodes = np.flatnonzero((graph.nodes["stream"] == 0) & graph.on_device)
    events, drawn, least = [], -np.inf, _LEAST_CHANGE * float(live.max(initial=0))
    for node in nodes.tolist():
        if abs(live[node] - drawn) > least:
            drawn = float(live[node])
            at = round(float(start[node]) * _US, 3)
            events.append(
                {"ph": "C", "name": "tensors", "pid": graph.rank, "ts": at, "args": {"bytes": int(live[node])}}
            )
    return events
