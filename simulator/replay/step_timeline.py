"""A step of some ranks as a Chrome trace: captured and predicted, or traced and annotated with its replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import PHASES, WHY_NUMBER, Dependency, Program
from stepsight.simulator.clock.trace_writer import TraceWriter
from stepsight.simulator.replay.causes import idle_gaps, longest_path
from stepsight.simulator.replay.replay import JoinedGraph, ReplayTimes

Floats = NDArray[np.float64]


class StepWriter(TraceWriter):
    """Writes the nodes of joined graphs, a process for each rank and a thread for each stream.

    ``start_s`` and ``end_s``, ``(n,)``: of the nodes of the ranks; ``notes``: texts and numbers beside signatures.
    """

    def __init__(
        self,
        joined: JoinedGraph,
        start_s: Floats,
        end_s: Floats,
        notes: Mapping[int, Mapping[str, object]] | None = None,
    ) -> None:
        super().__init__()
        self._joined, self._start_s, self._end_s, self._notes = joined, start_s, end_s, notes or {}
        self.processes = {graph.rank: f"rank {graph.rank}" for graph in joined.graphs}

    def nodes(self) -> Iterator[bytes]:
        """Ops, collectives and calls of the host that take time, and arrows between streams and of messages."""
        for graph, first in zip(self._joined.graphs, self._joined.first, strict=False):
            lasts = (self._end_s - self._start_s)[first : first + len(graph)] > 0
            columns, drawn = graph.columns, graph.on_device | lasts
            for node in np.flatnonzero(drawn).tolist():
                work, times = int(columns["work"][node]), (self._start_s[first + node], self._end_s[first + node])
                said = {} if work < 0 else {"what": str(graph.works[work])}
                title, phase = self._label(first + node), (*PHASES, "step")[columns["phase"][node]]
                place = self._place(first + node)[:2]
                yield self.span(title, place, times, phase, **said, **self._notes.get(first + node, {}))
            stream, (source, target) = columns["stream"], (graph.edge_columns[end] for end in ("source", "target"))
            across = drawn[source] & drawn[target] & (stream[source] != stream[target])
            for before, after in zip(source[across].tolist(), target[across].tolist(), strict=True):
                yield self.flow("dependency", [self._place(first + before), self._place(first + after)])
        for together in self._joined.meetings:
            nodes = [self._joined.first[place] + node for place, node in together.items()]
            if len(nodes) == 2 and self._label(nodes[0]).endswith(" send_recv"):
                nodes.sort(key=lambda node: ".recv" in self._label(node) or self._place(node)[1].endswith("recv"))
                yield self.flow("message", [self._place(node) for node in nodes])

    def replayed(self, walked: ReplayTimes, path: Sequence[int], first_s: float) -> Iterator[bytes]:
        """What a replay adds: causes of idle times, outstanding launches, and the critical path in order of time."""
        for graph, first, offset in zip(self._joined.graphs, self._joined.first, self._joined.offset_s, strict=False):
            for node, gap, causes in idle_gaps(graph, walked, first):
                if gap > 0:
                    until, largest = self._start_s[first + node], max(causes, key=lambda cause: causes[cause])
                    parts = {f"{cause}_us": round(1e6 * seconds, 3) for cause, seconds in causes.items() if seconds}
                    yield self.span(largest, (graph.rank, "idle, by cause"), (until - gap, until), "idle", **parts)
            times = [each + offset - first_s for each in launch_times(graph)]
            yield from self.outstanding("launched, not started", graph.rank, *times)
        process, reached = max(self.processes) + 1, 0.0
        self.processes[process] = "critical path"
        for node in path:  # a kernel may start before the call that launches it returns
            begin, end = max(self._start_s[node], reached), max(self._end_s[node], reached)
            if end > begin:
                place, rank = (process, "critical path"), self._joined.located(node)[0].rank
                yield self.span(self._label(node), place, (begin, end), "critical", rank=rank)
            reached = end

    def _label(self, node: int) -> str:
        graph, own = self._joined.located(node)
        return f"{graph.names[graph.columns['name'][own]]} {graph.kind_of(own)}"

    def _place(self, node: int) -> tuple[int, str, float]:
        graph, own = self._joined.located(node)
        return graph.rank, graph.streams[graph.columns["stream"][own]], float(self._start_s[node])


def traced_timeline(walked: ReplayTimes, predicted: Sequence[Floats] | None, name: str) -> Iterator[bytes]:
    """A timeline of traced steps as measured, with what their replay says, as pieces of JSON.

    Nodes of the critical path are marked and shown once more in a process of their own; each rank has a thread with the
    cause of each idle time, and a counter of kernels that are launched and have not started.

    ``predicted``: of each rank, seconds of each node as a latency model predicts them; NaN: unknown.
    """
    joined = walked.joined
    start = np.concatenate([g.start_s + at for g, at in zip(joined.graphs, joined.offset_s, strict=True)])
    first_s = float(start.min(initial=np.inf))
    start, end = start - first_s, start - first_s + np.concatenate([graph.duration_s for graph in joined.graphs])
    notes: defaultdict[int, dict[str, object]] = defaultdict(dict)
    path = [node for node in longest_path(walked)[::-1] if node < len(start)]
    if predicted is not None:
        for node, seconds in enumerate(np.concatenate(predicted).tolist()):
            if seconds == seconds:
                notes[node]["predicted_us"] = round(1e6 * seconds, 3)
    for node in path:
        notes[node]["critical"] = True
    writer, told = StepWriter(joined, start, end, notes), {"run": name, "measured": True}
    return writer.whole(told, chain(writer.nodes(), writer.replayed(walked, path, first_s)))


class Kernel(NamedTuple):
    """A kernel by its name, the kind of its op or collective, and what it does (``gemm[64x64x64]fp32``)."""

    name: str
    kind: str
    what: str


def kernel_seconds(graphs: Sequence[Program]) -> dict[Kernel, Floats]:
    """Seconds of each run of each kernel in the traced steps of all ranks."""
    found: defaultdict[Kernel, list[float]] = defaultdict(list)
    for graph in graphs:
        inside = (graph.columns["step"] >= 0) & graph.on_device
        pairs, which = np.unique(
            np.stack([graph.columns["name"][inside], graph.columns["work"][inside]]), axis=1, return_inverse=True
        )
        seconds = graph.duration_s[inside][np.argsort(which, kind="stable")]
        bounds = np.cumsum(np.bincount(which, minlength=pairs.shape[1]))[:-1]
        for (name, work), runs in zip(pairs.T.tolist(), np.split(seconds, bounds), strict=True):
            kernel = Kernel(graph.names[name], graph.works[work].kind, str(graph.works[work]))
            found[kernel] += runs.tolist()
    return {kernel: np.array(runs) for kernel, runs in found.items()}


def kernel_table(graphs: Sequence[Program]) -> list[dict[str, Any]]:
    """Kernels of the traced steps of all ranks by name and kind, the one with most seconds first."""
    runs: defaultdict[tuple[str, str], list[Floats]] = defaultdict(list)
    for kernel, seconds in kernel_seconds(graphs).items():
        runs[kernel.name, kernel.kind].append(seconds)
    found: list[dict[str, Any]] = []
    for (name, kind), parts in runs.items():
        each = np.concatenate(parts)
        spread = {f"{of}_s": float(getattr(each, of)()) for of in ("mean", "min", "max")}
        found.append({"name": name, "kind": kind, "count": len(each), "seconds": float(each.sum()), **spread})
    found.sort(key=lambda row: -row["seconds"])
    whole = sum(row["seconds"] for row in found) or 1.0
    return [{**row, "percent": 100.0 * row["seconds"] / whole} for row in found]


def launch_times(graph: Program) -> tuple[Floats, Floats]:
    """When the host begins to launch each kernel of the steps, and when the kernel starts; on the rank's clock."""
    edges = graph.edge_columns
    launched = (edges["why"] == WHY_NUMBER[Dependency.LAUNCH]) & (graph.columns["step"][edges["target"]] >= 0)
    return graph.start_s[edges["source"][launched]], graph.start_s[edges["target"][launched]]


def launch_table(graphs: Sequence[Program]) -> list[dict[str, Any]]:
    """For each rank with launches: delays from launch to kernel, and the queue of kernels that are launched and have
    not started (its mean is over the time from the first launch to the last start).
    """
    found = []
    for graph in graphs:
        launched, started = launch_times(graph)
        if not len(launched):
            continue
        delays, moments = started - launched, np.concatenate([started, launched])
        changes = np.repeat([-1, 1], len(launched))[np.argsort(moments, kind="stable")]
        span = float(moments.max() - moments.min())
        found.append(
            {
                "rank": graph.rank,
                "launches": len(delays),
                **{f"{of}_delay_s": float(getattr(np, of)(delays)) for of in ("mean", "median", "max")},
                "mean_queue": float(delays.sum() / span) if span else 0.0,
                "max_queue": int(np.cumsum(changes).max()),
            }
        )
    return found
