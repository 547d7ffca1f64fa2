"""Replay of a traced step: compute its graph from durations and dependencies, and compare it with the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.rank_graph import HOST, RankGraph
from stepsight.dataset.traces.read_rank import lateness
from stepsight.simulator.replay.joined import Walk, join, walk

Floats = NDArray[np.float64]

MARK = "step"  # name of the host calls at the borders of steps


@dataclass
class StreamReplay:
    """One stream of one rank in the traced steps; seconds."""

    rank: int
    stream: str
    measured_busy_s: float
    replayed_busy_s: float
    unexplained_idle_s: float

    @property
    def error_percent(self) -> float:
        """Difference of the replayed busy time from the measured one, in percent."""
        return 100.0 * (self.replayed_busy_s / self.measured_busy_s - 1.0) if self.measured_busy_s else 0.0


@dataclass
class RankReplay:
    """One rank: seconds of a step, measured and replayed."""

    rank: int
    measured_s: float
    replayed_s: float


@dataclass
class Replay:
    """A replayed run.

    Attributes:
        walked: Every node of the replayed graphs in time.
        ranks: Each rank.
        streams: Each device stream of each rank (host thread where the host computes).
        unexplained_percent: Part of the steps in which the busiest stream of a rank idles for no recorded reason.
        unrecorded_percent: Part of the steps in which it runs what a trimmed trace leaves out.
    """

    walked: Walk
    ranks: tuple[RankReplay, ...]
    streams: tuple[StreamReplay, ...]
    unexplained_percent: float
    unrecorded_percent: float

    @property
    def measured_s(self) -> float:
        """A step of the slowest rank, on average."""
        return max(each.measured_s for each in self.ranks)

    @property
    def replayed_s(self) -> float:
        """The same from the walk."""
        return max(each.replayed_s for each in self.ranks)

    @property
    def error_percent(self) -> float:
        """Replayed against measured."""
        return 100.0 * (self.replayed_s / self.measured_s - 1.0) if self.measured_s else 0.0

    @property
    def steps(self) -> int:
        """Steps that were walked."""
        return max(len(graph.steps_s) for graph in self.walked.joined.graphs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``stepsight replay --json`` prints them."""
        names = ("measured_s", "replayed_s", "error_percent", "steps", "unexplained_percent", "unrecorded_percent")
        return {
            **{name: getattr(self, name) for name in names},
            "ranks": [vars(each) for each in self.ranks],
            "streams": [{**vars(each), "error_percent": each.error_percent} for each in self.streams],
        }


def replay(graphs: Sequence[RankGraph]) -> Replay:
    """Replay the traced steps of a run.

    Raises:
        TraceError: If no step was traced, or the ranks contradict each other.
    """
    if not graphs or not any(len(graph.steps_s) for graph in graphs):
        raise TraceError("a replay needs at least one traced step, got none: profile with a schedule, or more steps")
    walked = walk(join(graphs))
    arrivals, first = walked.arrivals(), walked.joined.first
    ranks: list[RankReplay] = []
    streams: list[StreamReplay] = []
    idle, unrecorded, whole = 0.0, 0.0, 0.0
    for graph, begin in zip(graphs, first, strict=False):
        count = len(graph.steps_s)
        if not count:
            continue
        start, end = (times[begin : begin + len(graph)] for times in (arrivals, walked.end_s))
        measured = _span(graph, graph.start_s, graph.end_s)
        ranks.append(RankReplay(graph.rank, measured / count, _span(graph, start, end) / count))
        own = _streams(graph, start, end)
        streams += own
        whole += measured
        if own:
            busiest = max(own, key=lambda each: each.measured_busy_s)
            chosen = (graph.nodes["stream"] == graph.streams.index(busiest.stream)) & (graph.nodes["step"] >= 0)
            idle += busiest.unexplained_idle_s
            unrecorded += float(graph.unrecorded_s[chosen].sum())
    shares = [100.0 * seconds / whole if whole else 0.0 for seconds in (idle, unrecorded)]
    return Replay(walked, tuple(ranks), tuple(streams), *shares)


def _span(graph: RankGraph, start: Floats, end: Floats) -> float:
    """Time from the beginning of the first step to the end of the last, on the host and on the device."""
    marks = [number for number, name in enumerate(graph.names) if name == MARK]
    is_mark = np.isin(graph.nodes["name"], marks) & (graph.nodes["kind"] == HOST)
    at = graph.start_s
    tolerance = 1e-7
    first = np.flatnonzero(is_mark & (at >= graph.steps_s[0, 0] - tolerance))[:1]
    last = np.flatnonzero(is_mark & (at >= graph.steps_s[-1, 1] - tolerance))[:1]
    work = np.flatnonzero((graph.nodes["step"] >= 0) & graph.on_device)
    begins = start[first] if len(first) else start[work[:1]]
    ends = [float(end[last[0]])] if len(last) else []
    if len(work):
        ends.append(float(end[work].max()))
    return max(ends) - float(begins[0]) if ends and len(begins) else 0.0


def _streams(graph: RankGraph, start: Floats, end: Floats) -> list[StreamReplay]:
    late = lateness(graph) - graph.unrecorded_s
    out = []
    inside = (graph.nodes["step"] >= 0) & graph.on_device
    for number, name in enumerate(graph.streams):
        nodes = np.flatnonzero(inside & (graph.nodes["stream"] == number))
        if len(nodes):
            busy = float(graph.duration_s[nodes].sum())
            out.append(
                StreamReplay(graph.rank, name, busy, float((end - start)[nodes].sum()), float(late[nodes].sum()))
            )
    return out
