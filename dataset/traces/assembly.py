"""From unordered columns of nodes and lists of edges to the graph of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stepsight.dataset.graph.columns import Floats, Ints
from stepsight.dataset.graph.program import COLLECTIVE, NODE_COLUMNS, OP, PHASES, WHY_NUMBER, Dependency, Program
from stepsight.dataset.graph.rank_trace import RankTrace, Rendezvous
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.traces.event_columns import Interned
from stepsight.dataset.traces.host_calls import Steps

Edges = tuple[Ints, Ints, Dependency, Floats]

MICROSECOND = 1e-6


@dataclass
class Assembly:
    """A graph before its ``n`` nodes are in order; microseconds."""

    start: Floats  # ``(n,)``
    end: Floats  # ``(n,)``
    key: Floats  # ``(n,)``: what nodes are ordered by; equal keys by place
    issued: Floats  # ``(n,)``: when the host came to each, which decides its step
    edges: list[Edges]  # dependencies by place of the nodes here
    steps: Steps
    columns: dict[str, Ints] = field(init=False)  # columns of nodes, -1 where nothing else is set
    streams: Interned = field(default_factory=Interned)  # what the columns number
    names: Interned = field(default_factory=Interned)
    works: Interned = field(default_factory=Interned)
    groups: Interned = field(default_factory=Interned)

    def __post_init__(self) -> None:
        self.columns = {name: np.full(len(self.start), -1, dtype=np.int64) for name in NODE_COLUMNS}
        for name in ("blocks", "threads", "registers", "shared_bytes", "recorded", "known"):
            self.columns[name][:] = 0

    @cached_property
    def order(self) -> Ints:
        """``(n,)``: the node at each place of the graph."""
        return np.argsort(self.key, kind="stable")

    @cached_property
    def place(self) -> Ints:
        """``(n,)``: the place of each node in the graph."""
        return np.argsort(self.order)

    def meet(self, node: int, meets: Rendezvous | None) -> None:
        """Record which collective of other ranks a node belongs to."""
        if meets is not None:
            self.columns["group"][node] = self.groups[(meets.group, meets.ranks)]
            self.columns["seq"][node] = meets.seq

    def graph(self, device: str, device_name: str, events: int) -> Program:
        """The graph: nodes in order, and edges that lead forward."""
        count = len(self.start)
        bounds = np.array(self.steps.bounds, dtype=np.float64).reshape(-1, 2)
        step = np.searchsorted(bounds[:, 0], self.issued, "right") - 1
        ends = bounds[np.maximum(step, 0), 1] if len(bounds) else np.zeros(count)
        self.columns["step"] = np.where((step >= 0) & (self.issued <= ends), step, -1)
        order, place = self.order, self.place
        source, target = (place[np.concatenate([edge[column] for edge in self.edges])] for column in range(2))
        why = np.concatenate([np.full(len(edge[0]), WHY_NUMBER[edge[2]], dtype=np.int64) for edge in self.edges])
        delay = np.concatenate([edge[3] for edge in self.edges])
        forward = source < target
        origin = float(self.start.min()) if count else 0.0
        return Program.of_columns(
            device=device,
            device_name=device_name,
            origin_us=origin,
            start_s=(self.start[order] - origin) * MICROSECOND,
            duration_s=np.maximum(self.end - self.start, 0.0)[order] * MICROSECOND,
            columns={name: values[order] for name, values in self.columns.items()},
            edge_columns={"source": source[forward], "target": target[forward], "why": why[forward]},
            delay_s=delay[forward] * MICROSECOND,
            **{name: tuple(getattr(self, name)) for name in ("streams", "names", "works", "groups")},
            steps_s=(bounds - origin) * MICROSECOND,
            whole=self.steps.whole,
            events=events,
        )


def edges_by_kind(pairs: Sequence[tuple[int, int, Dependency]]) -> Iterator[Edges]:
    """Edges without delays, those of each kind of dependency together."""
    for why in Dependency:
        ends = np.array([pair[:2] for pair in pairs if pair[2] is why], dtype=np.int64).reshape(-1, 2)
        yield ends[:, 0], ends[:, 1], why, np.zeros(len(ends))


def graph_of_trace(trace: RankTrace) -> Program:
    """The graph of a rank whose trace a reader of its own gave: nodes with their times, and the program's edges.

    The time of the host before an op on a host delays the op; what else a node waits for is not known.
    """
    start = trace.start_s / MICROSECOND
    end = (trace.start_s + trace.duration_s) / MICROSECOND
    hosted = bool((trace.slot_s > trace.duration_s).any())
    found: list[Edges] = []
    for source, target, why, _ in edges_by_kind(list(trace.program.all_edges())):
        apart = start[target] - end[source]
        kept = apart if hosted and why is Dependency.STREAM_ORDER else np.minimum(apart, 0.0)
        found.append((source, target, why, kept))
    bounds: dict[int, list[float]] = {}
    for span in trace.spans:
        bounds.setdefault(span.step, []).extend((span.start_s / MICROSECOND, span.end_s / MICROSECOND))
    whole = [(float(start.min(initial=0.0)), float(end.max(initial=0.0)))]  # without segments
    listed = sorted((min(times), max(times)) for times in bounds.values())
    built = Assembly(start, end, start, start, found, Steps(listed or whole, whole=bool(listed)))
    columns = built.columns
    columns["known"][:] = 1
    for place, node in enumerate(trace.program.nodes):
        columns["kind"][place] = COLLECTIVE if isinstance(node.work, Collective) else OP
        columns["work"][place], columns["stream"][place] = built.works[node.work], built.streams[node.stream]
        columns["name"][place] = built.names[node.name or node.work.kind]
        label = trace.spans[trace.span[place]].label if trace.span[place] >= 0 else ""
        columns["phase"][place] = PHASES.index(label) if label in PHASES else -1
        built.meet(place, trace.meets.get(place))
    graph = built.graph("cpu" if hosted else "cuda", "cpu" if hosted else "", int(trace.num_events.sum()))
    return graph.replace(rank=trace.rank)
