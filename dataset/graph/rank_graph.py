"""The graph of one traced rank: host calls, ops and collectives as columns, with typed and timed dependencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import WHY, WHY_NUMBER, Dependency
from stepsight.dataset.kinds.op import Collective, Op

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

OP, COLLECTIVE, HOST = range(3)
NODE_KINDS = ("op", "collective", "host")
PHASES = ("forward", "backward", "optimizer")
NODE_COLUMNS = (
    "kind", "stream", "step", "phase", "work", "name", "known", "call", "group", "seq", "blocks", "threads",
    "registers", "shared_bytes", "recorded",
)  # fmt: skip
EDGE_COLUMNS = ("source", "target", "why")
OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of a rank's host time: one segment of one step.

    Attributes:
        label: ``forward``, ``backward``, ``optimizer`` …
        start_s: On the rank's clock.
        end_s: Likewise.
        step: Which profiled step, from 0.
        micro_batch: Which micro-batch, from 0.
        stage: Which pipeline stage.
    """

    label: str
    start_s: float
    end_s: float
    step: int = 0
    micro_batch: int = 0
    stage: int = 0


@dataclass(frozen=True, slots=True)
class HostRecord:
    """What a rank's host recorded beside the nodes of its graph; seconds from the graph's begin.

    Attributes:
        spans: Annotated segments in order of time.
        calls_s: ``(c,)``: when recorded calls started, in order: of the thread that computes, or of all that launch.
        own_s: ``(n,)``: time within each node of the graph that is its own; empty: all of it.
        waits_s: ``(w, 2)``: when the thread that computes waited for collectives.
        awaited: ``(w,)``: their nodes in the graph.
    """

    spans: tuple[Span, ...] = ()
    calls_s: Floats = field(default_factory=lambda: np.zeros(0))
    own_s: Floats = field(default_factory=lambda: np.zeros(0))
    waits_s: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    awaited: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass
class RankGraph:
    """The activities of one rank, with their dependencies.

    Shapes: ``n`` nodes in order of start; ``e`` edges; ``k`` steps.

    A node starts when, for each of its edges, the source has ended and ``delay_s`` more has passed.  The delay of a
    *host order* edge is the work of the host between two calls; that of a *launch* edge may be negative, because a
    kernel can start before the call that launches it returns.

    Attributes:
        rank: Which rank.
        world_size: Of its job.
        device: ``cuda`` for any accelerator, ``cpu``.
        device_name: As the trace names it.
        origin_us: Time in the file that is 0 here.
        start_s: ``(n,)``.
        duration_s: ``(n,)``.
        columns: ``(n,)`` each, by ``NODE_COLUMNS``: ``kind`` (index of ``NODE_KINDS``), ``stream``, ``step``
            (-1: none), ``phase`` (index of ``PHASES``, -1: none), ``work`` (index of ``works``, -1: a host call),
            ``name``, ``known`` (0 for an opaque op), ``call`` (the framework call that it belongs to, -1: unknown),
            ``group`` and ``seq`` of a collective (else -1), and the launch's ``blocks``, ``threads``, ``registers`` and
            ``shared_bytes``; and ``recorded``, how many calls of the framework a profiler recorded within an op
            that the host runs, itself included (0 elsewhere).
        edge_columns: ``(e,)`` each, by ``EDGE_COLUMNS``; ``why`` is an index of ``WHY``.
        delay_s: ``(e,)``.
        streams: Names of streams and host threads.
        names: Names of kernels and calls.
        works: Distinct signatures.
        groups: Name and ranks of groups of collectives.
        steps_s: ``(k, 2)``: begin and end on the host.
        whole: Whether the steps are whole: bounded by annotations or by repetition.
        loading_s: ``(l, 2)``: when the host loaded data, by annotations of PyTorch's data loader.
        unrecorded_s: ``(n,)``: time before a node in which its stream was busy with what the trace leaves out.
        warnings: What was found wrong, and what was done about it.
        events: Events in the file.
        observed: Steps in it that an execution-trace observer slowed, and that are left out.
        record: What the host recorded beside the nodes; a stored graph has none.
    """

    rank: int
    world_size: int
    device: str
    device_name: str
    origin_us: float
    start_s: Floats
    duration_s: Floats
    columns: dict[str, Ints]
    edge_columns: dict[str, Ints]
    delay_s: Floats
    streams: tuple[str, ...]
    names: tuple[str, ...]
    works: tuple[Op | Collective, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    steps_s: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    whole: bool = True
    loading_s: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    unrecorded_s: Floats = field(default_factory=lambda: np.zeros(0))
    warnings: tuple[str, ...] = ()
    events: int = 0
    observed: int = 0
    record: HostRecord | None = None

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def end_s(self) -> Floats:
        """``(n,)``."""
        return self.start_s + self.duration_s

    @property
    def on_device(self) -> NDArray[np.bool_]:
        """``(n,)``: which nodes are work: ops and collectives, not host calls."""
        return np.asarray(self.columns["kind"] != HOST)

    @property
    def device_time_s(self) -> float:
        """Seconds of all ops and collectives."""
        return float(self.duration_s[self.on_device].sum())

    def dependency_counts(self) -> Counter[str]:
        """Number of edges of each kind of dependency."""
        counts = np.bincount(self.edge_columns["why"], minlength=len(WHY)).tolist()
        return Counter({why.value: count for why, count in zip(WHY, counts, strict=True)})

    def kind_of(self, node: int) -> str:
        """Name of the kind of one node."""
        work = int(self.columns["work"][node])
        return self.works[work].kind if work >= 0 else "host"

    def with_edges(self, source: Any, target: Any, why: Dependency, delay_s: Any) -> RankGraph:
        """The graph with more edges of one kind; edges that do not lead forward in time are dropped."""
        source, target = np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64)
        delay = np.broadcast_to(np.asarray(delay_s, dtype=np.float64), source.shape)
        keep = source < target
        more = {
            "source": source[keep],
            "target": target[keep],
            "why": np.full(int(keep.sum()), WHY_NUMBER[why], dtype=np.int64),
        }
        edges = {name: np.concatenate([self.edge_columns[name], more[name]]) for name in EDGE_COLUMNS}
        return replace(self, edge_columns=edges, delay_s=np.concatenate([self.delay_s, delay[keep]]))


# By which ends of one collective may differ after clocks are aligned: seconds, or parts of its duration.  A host may
# run something else before a rank comes back from it.
_MOST_APART = {"cuda": (2e-4, 0.1), "cpu": (0.1, 1.0)}

Meeting = dict[int, int]  # node by place of the rank


def meetings(graphs: Sequence[RankGraph]) -> tuple[list[Meeting], list[float]]:
    """Collectives that at least two ranks recorded, and seconds to add to each rank's times to align the clocks.

    A collective is known by its group and its number in the group.  It ends on all ranks at about the same time, which
    aligns the clocks; what then ends apart is not one, because traces that are trimmed count from elsewhere.
    """
    numbered = numbered_alike(graphs)
    offsets = clock_offsets(graphs, numbered)
    return [members for members in numbered if _together(graphs, offsets, members)], offsets


def numbered_alike(graphs: Sequence[RankGraph]) -> list[Meeting]:
    """Collectives of one group, number and kind, for each that at least two ranks recorded."""
    found: dict[tuple[str, tuple[int, ...], int], Meeting] = {}
    for place, graph in enumerate(graphs):
        nodes = np.flatnonzero((graph.columns["kind"] == COLLECTIVE) & (graph.columns["group"] >= 0))
        groups, numbers = graph.columns["group"][nodes].tolist(), graph.columns["seq"][nodes].tolist()
        for node, group, number in zip(nodes.tolist(), groups, numbers, strict=True):
            name, ranks = graph.groups[group]
            if not ranks or graph.rank in ranks:
                found.setdefault((name, ranks, number), {})[place] = node
    return [members for members in found.values() if len(members) > 1 and _alike(graphs, members)]


def _alike(graphs: Sequence[RankGraph], members: Meeting) -> bool:
    """Whether all ranks have the same collectives: in trimmed traces, equal numbers may name different ones."""
    works = {graphs[place].kind_of(node) for place, node in members.items()}
    return len(works) == 1


def clock_offsets(graphs: Sequence[RankGraph], met: Sequence[Meeting]) -> list[float]:
    """Seconds to add to each rank's times such that collectives end together; otherwise from the files' own clocks."""
    absolute = [graph.origin_us * 1e-6 for graph in graphs]
    base = min(absolute, default=0.0)
    offsets = [each - base for each in absolute]
    pairs: dict[tuple[int, int], list[float]] = {}
    for members in met:
        places = sorted(members)
        for place in places[1:]:
            ends = [graphs[each].end_s[members[each]] for each in (places[0], place)]
            pairs.setdefault((places[0], place), []).append(float(ends[0] - ends[1]))
    done: set[int] = set()
    for (one, other), differences in sorted(pairs.items()):
        done.add(one)
        if other not in done:
            offsets[other] = offsets[one] + float(np.median(differences))
            done.add(other)
    low = min(offsets, default=0.0)
    return [offset - low for offset in offsets]


def _together(graphs: Sequence[RankGraph], offsets: Sequence[float], members: Meeting) -> bool:
    """Whether a collective ended on all ranks at about the same time: in trimmed traces, it may be different ones."""
    ends = [float(graphs[place].end_s[node]) + offsets[place] for place, node in members.items()]
    longest = max(float(graphs[place].duration_s[node]) for place, node in members.items())
    seconds, part = _MOST_APART["cpu" if any(graph.device == "cpu" for graph in graphs) else "cuda"]
    return max(ends) - min(ends) <= max(seconds, part * longest)
