"""Replay of a traced step: compute its graph from durations and dependencies, and compare it with the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.imported.rank_graph import HOST, RankGraph
from stepsight.dataset.imported.read_rank import lateness
from stepsight.simulator.clock.engine import DelayedGraph, delayed_paths
from stepsight.simulator.replay.joined import Joined, join

Floats = NDArray[np.float64]

MARK = "step"  # name of the host calls at the borders of steps


@dataclass
class Walk:
    """A replayed graph: start and end of every node, and the edge that decided each start (-1: none)."""

    joined: Joined
    start_s: Floats
    end_s: Floats
    cause: NDArray[np.int32]


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
        measured_s: A step of the slowest rank, on average.
        replayed_s: The same from the walk.
        steps: Steps walked.
        ranks: Each rank.
        streams: Each device stream of each rank (host thread where the host computes).
        unexplained_percent: Part of the steps in which the busiest stream of a rank idles for no recorded reason.
        unrecorded_percent: Part of the steps in which it runs what a trimmed trace leaves out.
    """

    measured_s: float
    replayed_s: float
    steps: int
    ranks: tuple[RankReplay, ...]
    streams: tuple[StreamReplay, ...]
    unexplained_percent: float
    unrecorded_percent: float

    @property
    def error_percent(self) -> float:
        """Replayed against measured."""
        return 100.0 * (self.replayed_s / self.measured_s - 1.0) if self.measured_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``stepsight replay --json`` prints them."""
        streams = [{**vars(each), "error_percent": each.error_percent} for each in self.streams]
        return {
            "measured_s": self.measured_s,
            "replayed_s": self.replayed_s,
            "error_percent": self.error_percent,
            "steps": self.steps,
            "unexplained_percent": self.unexplained_percent,
            "unrecorded_percent": self.unrecorded_percent,
            "ranks": [vars(each) for each in self.ranks],
            "streams": streams,
        }


def walk(joined: Joined) -> Walk:
    """Walk a joined graph: every node starts as soon as its dependencies allow."""
    count = len(joined.seconds)
    by_target = np.argsort(joined.target, kind="stable").astype(np.int32)
    pointer = np.searchsorted(joined.target[by_target], np.arange(count + 1)).astype(np.int32)
    ready = np.where(np.isinf(joined.ready) & (np.diff(pointer) == 0), 0.0, joined.ready)
    ends, cause = np.zeros(count), np.full(count, -1, dtype=np.int32)
    graph = DelayedGraph(joined.order, pointer, by_target, joined.source.astype(np.int32), joined.delay)
    delayed_paths(graph, joined.seconds, ready, ends, cause)
    starts = ends - joined.seconds
    return Walk(joined, starts, ends, cause)


def arrivals(walked: Walk) -> Floats:
    """``(n,)``: when each node began on its stream; for a collective, before its peers have arrived."""
    joined = walked.joined
    start = walked.start_s[: len(joined.meeting)].copy()
    original = [
        (
            graph.edges["source"] + first,
            graph.edges["target"] + first,
            graph.delay_s + graph.unrecorded_s[graph.edges["target"]],
        )
        for graph, first in zip(joined.graphs, joined.first, strict=True)
    ]
    source, target, delay = (np.concatenate(parts) for parts in zip(*original, strict=True))
    met = joined.meeting[target] >= 0
    earliest = np.full(len(start), -np.inf)
    np.maximum.at(earliest, target[met], walked.end_s[source[met]] + delay[met])
    members = np.flatnonzero((joined.meeting >= 0) & ~np.isinf(earliest))
    start[members] = np.minimum(earliest[members], start[members])
    return start


def replay(graphs: Sequence[RankGraph]) -> Replay:
    """Replay the traced steps of a run.

    Raises:
        TraceError: If no step was traced, or the ranks contradict each other.
    """
    if not graphs or not any(len(graph.steps_s) for graph in graphs):
        raise TraceError("a replay needs at least one traced step, got none: profile with a schedule, or more steps")
    walked = walk(join(graphs))
    start = arrivals(walked)
    ranks, streams = [], []
    idle, unrecorded, whole = 0.0, 0.0, 0.0
    for graph, first in zip(graphs, walked.joined.first, strict=True):
        nodes = slice(first, first + len(graph))
        if not len(graph.steps_s):
            continue
        measured = _span(graph, graph.start_s, graph.end_s)
        replayed = _span(graph, start[nodes], walked.end_s[nodes])
        count = len(graph.steps_s)
        ranks.append(RankReplay(graph.rank, measured / count, replayed / count))
        own = _streams(graph, start[nodes], walked.end_s[nodes])
        streams += own
        busiest = max(own, key=lambda each: each.measured_busy_s, default=None)
        idle += busiest.unexplained_idle_s if busiest else 0.0
        unrecorded += _unrecorded(graph, busiest.stream) if busiest else 0.0
        whole += measured
    slowest = max(ranks, key=lambda each: each.measured_s)
    return Replay(
        measured_s=slowest.measured_s,
        replayed_s=max(each.replayed_s for each in ranks),
        steps=max(len(graph.steps_s) for graph in graphs),
        ranks=tuple(ranks),
        streams=tuple(streams),
        unexplained_percent=100.0 * idle / whole if whole else 0.0,
        unrecorded_percent=100.0 * unrecorded / whole if whole else 0.0,
    )


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


def _unrecorded(graph: RankGraph, stream: str) -> float:
    chosen = (graph.nodes["stream"] == graph.streams.index(stream)) & (graph.nodes["step"] >= 0)
    return float(graph.unrecorded_s[chosen].sum())
