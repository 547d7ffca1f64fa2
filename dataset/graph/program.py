"""Programs: what one rank executes, on which stream, after what; and what may run concurrently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.columns import COLLECTIVE as COLLECTIVE
from stepsight.dataset.graph.columns import EDGE_COLUMNS as EDGE_COLUMNS
from stepsight.dataset.graph.columns import HOST as HOST
from stepsight.dataset.graph.columns import NODE_COLUMNS as NODE_COLUMNS
from stepsight.dataset.graph.columns import NODE_KINDS as NODE_KINDS
from stepsight.dataset.graph.columns import OP as OP
from stepsight.dataset.graph.columns import OPAQUE as OPAQUE
from stepsight.dataset.graph.columns import PHASES as PHASES
from stepsight.dataset.graph.columns import WHY as WHY
from stepsight.dataset.graph.columns import WHY_NUMBER as WHY_NUMBER
from stepsight.dataset.graph.columns import Dependency as Dependency
from stepsight.dataset.graph.graph_files import read_facts, write_graph
from stepsight.dataset.kinds.op import Collective, Op

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
Columns = dict[str, NDArray[Any]]


_HOST_CALL = Op("host_calls", (1,), "fp32")  # what a call of the host is as a node


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
    awaited: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Node:
    """One op or collective of a program.

    Attributes:
        work: Signature of what is done.
        stream: Name of the stream that does it (``compute``, ``tp``, ``dp``, ``pp`` …).
        name: Where it comes from, for people (``layer3.qkv``).
        share: Part of the signature's time that this node takes.  1 but for the compute time that an
            overlapped collective steals from its device.
    """

    work: Op | Collective
    stream: str = "compute"
    name: str = ""
    share: float = 1.0


class Program:
    """Ops and collectives of one rank in issue order, with their dependencies; of a trace also their times.

    A program has two faces, and each is derived from the other when it is first asked for: ``nodes`` and ``edges`` as
    objects (what lowering a job makes), ``columns`` and ``edge_columns`` as arrays (what traces and captures make).

    Shapes: ``n`` nodes; ``e`` edges; ``k`` steps.

    A traced node starts when, for each of its edges, the source has ended and ``delay_s`` more has passed.  The delay
    of a *host order* edge is the work of the host between two calls; that of a *launch* edge may be negative, because a
    kernel can start before the call that launches it returns.

    Attributes:
        nodes: In issue order: a node only ever waits for earlier ones.  A call of the host is an op ``host_calls``.
        edges: ``(before, after, why)`` by node index; stream order is implied and not listed.
        label: What it is (``forward``, ``backward``, ``optimizer`` …).
        columns: ``(n,)`` each, by ``NODE_COLUMNS``: ``kind`` (index of ``NODE_KINDS``), ``stream``, ``step``
            (-1: none), ``phase`` (index of ``PHASES``, -1: none), ``work`` (index of ``works``, -1: a host call),
            ``name``, ``known`` (0 for an opaque op), ``call`` (the framework call that it belongs to, -1: unknown),
            ``group`` and ``seq`` of a collective (else -1), and the launch's ``blocks``, ``threads``, ``registers`` and
            ``shared_bytes``; ``recorded``, how many calls of the framework a profiler recorded within an op
            that the host runs, itself included (0 elsewhere); and ``share``, if it is not 1 everywhere.
        edge_columns: ``(e,)`` each, by ``EDGE_COLUMNS``; ``why`` is an index of ``WHY``.  Stream order is listed.
        works: Distinct signatures.
        streams: Names of streams and host threads.
        names: Names of kernels, calls or layers.
        groups: Name and ranks of groups of collectives.
        start_s, duration_s: ``(n,)``; zeros if they were not measured.
        delay_s: ``(e,)``.
        unrecorded_s: ``(n,)``: time before a node in which its stream was busy with what the trace leaves out.
        rank: Which rank.
        world_size: Of its job.
        device: ``cuda`` for any accelerator, ``cpu``.
        device_name: As the trace names it.
        origin_us: Time in the trace's file that is 0 here.
        steps_s: ``(k, 2)``: begin and end on the host.
        whole: Whether the steps are whole: bounded by annotations or by repetition.
        loading_s: ``(l, 2)``: when the host loaded data, by annotations of PyTorch's data loader.
        warnings: What was found wrong, and what was done about it.
        events: Events in the trace's file.
        observed: Steps in it that an execution-trace observer slowed, and that are left out.
        record: What the host recorded beside the nodes; a stored program has none.
    """

    label: str = ""
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    rank: int = 0
    world_size: int = 1
    device: str = "cuda"
    device_name: str = ""
    origin_us: float = 0.0
    steps_s: Floats = np.zeros((0, 2))
    whole: bool = True
    loading_s: Floats = np.zeros((0, 2))
    warnings: tuple[str, ...] = ()
    events: int = 0
    observed: int = 0
    record: HostRecord | None = None

    def __init__(
        self, nodes: Sequence[Node] = (), edges: Sequence[tuple[int, int, Dependency]] = (), label: str = ""
    ) -> None:
        self.nodes, self.edges, self.label = tuple(nodes), tuple(edges), label
        for before, after, why in self.edges:
            if not 0 <= before < after < len(self.nodes):
                raise ValueError(
                    f"an edge must go from an earlier to a later node of {len(self.nodes)}, "
                    f"got {before} -> {after} ({why.value})"
                )

    @classmethod
    def of_columns(cls, **given: Any) -> Program:
        """A program from its arrays and facts: all attributes but ``nodes`` and ``edges``."""
        made = cls.__new__(cls)
        unknown = given.keys() - FACTS
        if unknown:
            raise TypeError(f"a program has no {', '.join(sorted(unknown))}: choose from {', '.join(sorted(FACTS))}")
        vars(made).update(given)
        return made

    @classmethod
    def of_rows(
        cls,
        works: Sequence[Op | Collective],
        streams: Sequence[str],
        nodes: Sequence[NDArray[Any]],
        edges: Sequence[Indices] | Indices,
        label: str,
    ) -> Program:
        """A program of which stream order is not listed.

        Args:
            works, streams: What the columns number.
            nodes: Index of the work, index of the stream, and share of each node; the share may be left out.
            edges: Source, target and number of the kind (index of ``WHY``) of each edge.
            label: What it is.
        """
        rows = zip(*(np.asarray(column).tolist() for column in nodes), strict=True)
        ends = zip(*(np.asarray(column).tolist() for column in edges), strict=True)
        listed = [(before, after, WHY[why]) for before, after, why in ends]
        return cls([Node(works[work], streams[stream], "", *share) for work, stream, *share in rows], listed, label)

    def replace(self, **changes: Any) -> Program:
        """A copy with other arrays or facts; where the number of nodes or edges changes, all arrays of these."""
        return self.of_columns(**{name: getattr(self, name) for name in FACTS} | changes)

    def save(self, path: str | Path) -> None:
        """Write ``<path>.json``, ``<path>.nodes.parquet`` and ``<path>.edges.parquet``."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_graph(self, Path(path).parent, Path(path).name)

    @classmethod
    def load(cls, path: str | Path) -> Program:
        """Read what ``save`` wrote, or a rank of a capture or of an imported run (``folder/rank0``).

        Raises:
            TraceError: If it is not that.
        """
        return cls.of_columns(**read_facts(Path(path).parent, Path(path).name.removesuffix(".json")))

    def __len__(self) -> int:
        return len(self.nodes) if "nodes" in vars(self) else len(self.columns["work"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return (self.label, self.nodes, self.edges) == (other.label, other.nodes, other.edges)

    def __hash__(self) -> int:
        return hash((self.label, self.nodes))

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        columns = [self.columns[name].tolist() for name in ("work", "stream", "name")]
        share = self.columns["share"].tolist() if "share" in self.columns else [1.0] * len(self)
        works, streams, names = (*self.works, _HOST_CALL), self.streams, self.names
        rows = zip(*columns, share, strict=True)
        return tuple([Node(works[work], streams[s], names[name], part) for work, s, name, part in rows])

    @cached_property
    def edges(self) -> tuple[tuple[int, int, Dependency], ...]:
        listed = self.edge_columns["why"] != WHY_NUMBER[Dependency.STREAM_ORDER]
        rows = zip(*(self.edge_columns[name][listed].tolist() for name in EDGE_COLUMNS), strict=True)
        return tuple([(before, after, WHY[why]) for before, after, why in rows])

    @cached_property
    def works(self) -> tuple[Op | Collective, ...]:
        return tuple(dict.fromkeys(node.work for node in self.nodes))

    @cached_property
    def streams(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node.stream for node in self.nodes))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node.name for node in self.nodes))

    @cached_property
    def columns(self) -> Columns:
        nodes, found = self.nodes, {name: np.full(len(self.nodes), -1, dtype=np.int64) for name in NODE_COLUMNS}
        for name in ("step", "blocks", "threads", "registers", "shared_bytes", "recorded"):
            found[name][:] = 0
        for name, things in (("work", self.works), ("stream", self.streams), ("name", self.names)):
            number = {thing: place for place, thing in enumerate(things)}
            found[name][:] = [number[getattr(node, name)] for node in nodes]
        kinds = [OP if isinstance(work, Op) else COLLECTIVE for work in self.works]
        found["kind"] = np.array(kinds, dtype=np.int64)[found["work"]]
        found["known"] = np.array([work.kind != OPAQUE for work in self.works], dtype=np.int64)[found["work"]]
        found["phase"][:] = PHASES.index(self.label) if self.label in PHASES else -1
        return {**found, "share": np.array([node.share for node in nodes], dtype=np.float64)}

    @cached_property
    def edge_columns(self) -> Columns:
        rows = [(before, after, WHY_NUMBER[why]) for before, after, why in self.all_edges()]
        return dict(zip(EDGE_COLUMNS, np.array(rows, dtype=np.int64).reshape(-1, 3).T, strict=True))

    @cached_property
    def start_s(self) -> Floats:
        return np.zeros(len(self))

    @cached_property
    def duration_s(self) -> Floats:
        return np.zeros(len(self))

    @cached_property
    def unrecorded_s(self) -> Floats:
        return np.zeros(len(self))

    @cached_property
    def delay_s(self) -> Floats:
        return np.zeros(len(self.edge_columns["why"]))

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

    def all_edges(self) -> Iterator[tuple[int, int, Dependency]]:
        """Every edge, those of stream order included."""
        last: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            if node.stream in last:
                yield last[node.stream], index, Dependency.STREAM_ORDER
            last[node.stream] = index
        yield from self.edges

    @cached_property
    def digest_key(self) -> tuple[object, ...]:
        """Hashable identity of what is done, names left out: equal keys take equal time."""
        work = tuple((node.work, node.stream, node.share) for node in self.nodes)
        return (self.label, work, tuple((b, a, why.value) for b, a, why in self.edges))

    def part(self, nodes: Iterable[int], label: str) -> Program:
        """Some nodes, by their indices in order, and the edges among them."""
        place = {int(node): position for position, node in enumerate(nodes)}
        edges = [(place[b], place[a], why) for b, a, why in self.edges if b in place and a in place]
        return Program([self.nodes[node] for node in place], edges, label)

    def with_edges(self, source: Any, target: Any, why: Dependency, delay_s: Any) -> Program:
        """The program with more edges of one kind; edges that do not lead forward in time are dropped."""
        source, target = np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64)
        delay = np.broadcast_to(np.asarray(delay_s, dtype=np.float64), source.shape)
        keep = source < target
        more = (source[keep], target[keep], np.full(int(keep.sum()), WHY_NUMBER[why], dtype=np.int64))
        edges = {
            name: np.concatenate([self.edge_columns[name], each]) for name, each in zip(EDGE_COLUMNS, more, strict=True)
        }
        return self.replace(edge_columns=edges, delay_s=np.concatenate([self.delay_s, delay[keep]]))


_ARRAYS = (
    "columns", "edge_columns", "works", "streams", "names", "start_s", "duration_s", "unrecorded_s", "delay_s",
)  # fmt: skip
FACTS = frozenset(_ARRAYS) | frozenset(Program.__annotations__)


class ProgramBuilder:
    """Builds a program node by node.  ``add`` returns the index that ``after`` takes."""

    def __init__(self, label: str = "") -> None:
        self._label = label
        self._nodes: list[Node] = []
        self._edges: list[tuple[int, int, Dependency]] = []

    def add(
        self,
        work: Op | Collective,
        stream: str = "compute",
        name: str = "",
        *,
        after: Iterable[int] = (),
        why: Dependency = Dependency.DATA,
        share: float = 1.0,
    ) -> int:
        index = len(self._nodes)
        self._nodes.append(Node(work, stream, name, share))
        self._edges.extend((before, index, why) for before in after)
        return index

    def last(self, stream: str) -> int | None:
        """Index of the newest node on a stream."""
        for index in range(len(self._nodes) - 1, -1, -1):
            if self._nodes[index].stream == stream:
                return index
        return None

    def build(self) -> Program:
        return Program(tuple(self._nodes), tuple(self._edges), self._label)
