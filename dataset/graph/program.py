"""Programs: what one rank executes, on which stream, after what; and what may run concurrently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.graph.columns import COLLECTIVE as COLLECTIVE
from stepsight.dataset.graph.columns import EDGE_COLUMNS as EDGE_COLUMNS
from stepsight.dataset.graph.columns import HOST as HOST
from stepsight.dataset.graph.columns import NODE_COLUMNS as NODE_COLUMNS
from stepsight.dataset.graph.columns import NODE_KINDS as NODE_KINDS
from stepsight.dataset.graph.columns import OP as OP
from stepsight.dataset.graph.columns import PHASES as PHASES
from stepsight.dataset.graph.columns import WHY as WHY
from stepsight.dataset.graph.columns import WHY_NUMBER as WHY_NUMBER
from stepsight.dataset.graph.columns import Dependency as Dependency
from stepsight.dataset.graph.columns import Flags, Floats, HostRecord, Ints, check_node, chosen_nodes
from stepsight.dataset.graph.graph_files import read_facts, write_graph
from stepsight.dataset.kinds.op import OPAQUE, Collective, Op

Columns = dict[str, NDArray[Any]]

_HOST_CALL = Op("host_calls", (1,), "fp32")  # what a call of the host is as a node


def _distinct(things: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(things))


@dataclass(frozen=True, slots=True)
class Node:
    """One op or collective of a program."""

    work: Op | Collective  # signature of what is done
    stream: str = "compute"  # that does it (``compute``, ``tp``, ``dp``, ``pp`` …)
    name: str = ""  # where it comes from, for people (``layer3.qkv``)
    share: float = 1.0  # of the signature's time; not 1 for what an overlapped collective takes from the computation


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
        start_s, duration_s: ``(n,)``; zeros if they were not measured.
        delay_s: ``(e,)``.
        unrecorded_s: ``(n,)``: time before a node in which its stream was busy with what the trace leaves out.
    """

    label: str = ""  # what it is (``forward``, ``backward``, ``optimizer`` …)
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()  # name and ranks of groups of collectives
    rank: int = 0
    world_size: int = 1  # of its job
    device: str = "cuda"  # for any accelerator, or ``cpu``
    device_name: str = ""  # as the trace names it
    op_calls: float = 1.0  # as ``ExecutionSpec`` has them of a job
    dispatch_calls: float = 0.0
    origin_us: float = 0.0  # time in the trace's file that is 0 here
    steps_s: Floats = np.zeros((0, 2))  # (k, 2): begin and end on the host
    whole: bool = True  # whether the steps are: bounded by annotations or by repetition
    loading_s: Floats = np.zeros((0, 2))  # (l, 2): when the host loaded data, by annotations of PyTorch's data loader
    warnings: tuple[str, ...] = ()  # what was found wrong, and what was done about it
    events: int = 0  # in the trace's file
    observed: int = 0  # steps in it that an execution-trace observer slowed, and that are left out
    slowed: tuple[int, ...] = ()  # numbers of steps that it slowed and that stay, since no other step has their work
    record: HostRecord | None = None  # what the host recorded beside the nodes; a stored program has none

    def __init__(
        self, nodes: Sequence[Node] = (), edges: Sequence[tuple[int, int, Dependency]] = (), label: str = ""
    ) -> None:
        self.nodes, self.edges, self.label = tuple(nodes), tuple(edges), label
        for before, after, why in self.edges:
            if not 0 <= before < after < len(self.nodes):
                rule = f"an edge must go from an earlier to a later node of {len(self.nodes)}"
                raise ValueError(f"{rule}, got {before} -> {after} ({why.value})")

    @classmethod
    def of_columns(cls, **given: Any) -> Program:
        """A program from its arrays and facts: all attributes but ``nodes`` and ``edges``."""
        made = cls.__new__(cls)
        if unknown := given.keys() - FACTS:
            raise TypeError(f"a program has no {', '.join(sorted(unknown))}: choose from {', '.join(sorted(FACTS))}")
        vars(made).update(given)
        return made

    @classmethod
    def of_parts(cls, parts: Sequence[Program]) -> Program:
        """The nodes of programs one after the other; what has one name on several of them is one stream or group."""
        numbers: dict[str, dict[Any, int]] = {name: {} for name in ("work", "stream", "name", "group")}
        drawn: dict[int, tuple[Columns, Columns]] = {}
        for part in parts:
            if id(part) not in drawn:
                columns = part._rows()
                things = (part.works, part.streams, part.names, part.groups)
                for (name, known), each in zip(numbers.items(), things, strict=True):
                    number = [known.setdefault(thing, len(known)) for thing in each]
                    columns[name] = np.array([*number, -1])[columns[name]]
                drawn[id(part)] = columns, part._listed()
        every = [drawn[id(part)] for part in parts]
        columns = {name: np.concatenate([each[name] for each, _ in every]) for name in every[0][0]}
        edges = {name: np.concatenate([each[name] for _, each in every]) for name in every[0][1]}
        first = np.cumsum([0, *(len(part) for part in parts)])[:-1]
        for name in ("source", "target"):
            edges[name] = edges[name] + np.repeat(first, [len(each["why"]) for _, each in every])
        facts = dict(zip(("works", "streams", "names", "groups"), map(tuple, numbers.values()), strict=True))
        return cls()._with_rows(columns, edges, **facts)

    def _listed(self) -> Columns:
        """Columns of edges, and their delays, without stream order."""
        listed = self.edge_columns["why"] != WHY_NUMBER[Dependency.STREAM_ORDER]
        return {name: values[listed] for name, values in (*self.edge_columns.items(), ("delay_s", self.delay_s))}

    def _with_rows(self, columns: Columns, listed: Columns, **facts: Any) -> Program:
        """The program with other nodes, whose times are among the columns, and other edges; stream order is added."""
        rows = dict(columns)
        times = {name: rows.pop(name) for name in ("start_s", "duration_s", "unrecorded_s")}
        order = np.argsort(rows["stream"], kind="stable")
        same = np.diff(rows["stream"][order]) == 0
        why = np.full(int(same.sum()), WHY_NUMBER[Dependency.STREAM_ORDER])
        ordered = {"source": order[:-1][same], "target": order[1:][same], "why": why, "delay_s": np.zeros(len(why))}
        edges = {name: np.concatenate([ordered[name], values]) for name, values in listed.items()}
        return self.replace(columns=rows, delay_s=edges.pop("delay_s"), edge_columns=edges, **times, **facts)

    @classmethod
    def of_rows(
        cls,
        works: Sequence[Op | Collective],
        streams: Sequence[str],
        nodes: Sequence[NDArray[Any]],
        edges: Sequence[Ints] | Ints,
        label: str,
    ) -> Program:
        """A program from columns: index of the work and of the stream of each node, and its share (or none); of edges
        source, target and index of ``WHY``, without stream order.
        """
        rows, ends = (zip(*(np.asarray(each).tolist() for each in columns), strict=True) for columns in (nodes, edges))
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

        Raises ``TraceError`` if it is not that.
        """
        return cls.of_columns(**read_facts(Path(path).parent, Path(path).name.removesuffix(".json")))

    def to_heterodata(self, alone: Floats | None = None, busy: int = 1, hardware: str = "") -> Any:
        """The program as ``HeteroData``, with the features that ``TraceGraphs`` gives the graphs of segments.

        Args:
            alone: ``(n,)``: seconds of each node on its own, whose logarithm is the first column of the targets ``y``;
                None: unknown.  The second column has the logarithm of ``duration_s``; NaN is unknown.
            busy: Devices of the node that compute at the same time.
            hardware: Name of what it runs on; empty: ``device_name``.
        """
        from stepsight.dataset.graph.graph_rows import program_table

        known = np.full(len(self), np.nan) if alone is None else alone
        return program_table(self, known, busy, hardware or self.device_name).hetero_data(0)

    def __len__(self) -> int:
        return len(self.nodes) if "nodes" in vars(self) else len(self.columns["work"])

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.world_size}" + (f" on {self.device_name}" if self.device_name else "")
        return f"Program({self.label or 'a step'}: {len(self)} nodes on {len(self.streams)} streams, {where})"

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

    works = cached_property[tuple[Op | Collective, ...]](lambda self: _distinct(node.work for node in self.nodes))
    streams = cached_property[tuple[str, ...]](lambda self: _distinct(node.stream for node in self.nodes))
    names = cached_property[tuple[str, ...]](lambda self: _distinct(node.name for node in self.nodes))
    start_s = cached_property[Floats](lambda self: np.zeros(len(self)))
    duration_s = cached_property[Floats](lambda self: np.zeros(len(self)))
    unrecorded_s = cached_property[Floats](lambda self: np.zeros(len(self)))
    delay_s = cached_property[Floats](lambda self: np.zeros(len(self.edge_columns["why"])))

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

    @property
    def end_s(self) -> Floats:
        """``(n,)``."""
        return self.start_s + self.duration_s

    @property
    def on_device(self) -> Flags:
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
        """Some nodes, by their indices in order, and the edges among them; the label is the phase of nodes of none."""
        chosen, place, listed = np.array([*nodes], dtype=np.int64), np.full(len(self), -1), self._listed()
        place[chosen] = np.arange(len(chosen))
        listed |= {end: place[listed[end]] for end in ("source", "target")}
        inside = np.minimum(listed["source"], listed["target"]) >= 0
        listed = {name: values[inside] for name, values in listed.items()}
        rows = {name: values[chosen] for name, values in self._rows().items()}
        if label in PHASES:
            rows["phase"][rows["phase"] < 0] = PHASES.index(label)
        return self._with_rows(rows, listed, label=label)

    def change(self, nodes: Iterable[int], work: Op | Collective | None = None, stream: str = "") -> Program:
        """The program with another signature, or another stream, of some nodes."""
        check_node(work, stream)
        chosen, columns, facts = chosen_nodes(nodes, len(self)), self._rows(), {}
        for name, things, thing in (("work", self.works, work), ("stream", self.streams, stream)):
            if thing:
                facts[f"{name}s"] = known = tuple(dict.fromkeys([*things, thing]))
                columns[name][chosen] = known.index(thing)
        if work is not None:
            columns["kind"][chosen] = OP if isinstance(work, Op) else COLLECTIVE
            columns["known"][chosen], columns["call"][chosen] = work.kind != OPAQUE, -1
        return self._with_rows(columns, self._listed(), **facts)

    def remove(self, nodes: Iterable[int]) -> Program:
        """The program without some nodes; the order that they imposed on the others, by edges and by streams, stays."""
        gone, order = np.isin(np.arange(len(self)), chosen_nodes(nodes, len(self))), WHY_NUMBER[Dependency.STREAM_ORDER]
        edges = zip(*(values.tolist() for values in (*self.edge_columns.values(), self.delay_s)), strict=True)
        found: dict[int, dict[tuple[int, int], float]] = {}
        for source, target, why, delay in sorted(edges, key=lambda edge: edge[1]):
            before = {(source, why): 0.0}
            if gone[source]:  # an edge to or from it tells more than the order of its stream
                waits = found.get(source, {}).items()
                before = {(each, why if why != order else earlier): more for (each, earlier), more in waits}
            for key, more in before.items():
                held = found.setdefault(target, {})
                held[key] = max(held.get(key, -np.inf), delay + more)
        listed_edges = ((b, a, why, delay) for a, held in found.items() for (b, why), delay in held.items())
        rows = [edge for edge in listed_edges if edge[2] != order]
        source, target, why, delay_s = np.array(rows, dtype=np.float64).reshape(-1, 4).T
        listed = {"source": source.astype(np.int64), "target": target.astype(np.int64), "why": why.astype(np.int64)}
        return self._with_rows(self._rows(), {**listed, "delay_s": delay_s}).part(np.flatnonzero(~gone), self.label)

    def fuse(self, nodes: Iterable[int], work: Op | Collective, name: str = "") -> Program:
        """The program with one node of another signature in place of some nodes of one stream.

        It waits for all that they waited for, takes the sum of their measured times, and what waited for one of them
        waits for it.  Raises ``StepsightError`` if another node waits for one of them and one of them for it.
        """
        chosen, columns, listed = chosen_nodes(nodes, len(self)), self._rows(), self._listed()
        if len(streams := set(columns["stream"][chosen].tolist())) != 1 or not isinstance(work, Op | Collective):
            rule = "nodes of one stream must be fused, into an Op or a Collective"
            raise StepsightError(f"{rule}, got {len(chosen)} nodes of {len(streams)} streams and {work!r:.80}")
        numbers, last = np.arange(len(self)), chosen[-1]
        inside = np.isin(numbers, chosen)
        waits = inside.copy()  # for one of them, and so must come after all of them
        for source, target, _ in sorted(self.all_edges(), key=lambda edge: edge[1]):
            if waits[source] and inside[target] and not inside[source]:
                raise StepsightError(f"nodes that are fused must not wait for each other by another, got node {source}")
            waits[target] |= waits[source]
        order = np.argsort(np.where(waits & ~inside & (numbers < last), last + 0.5, numbers), kind="stable")
        order = order[~inside[order] | (order == last)]
        names = _distinct([*self.names, name] if name else self.names)
        columns["name"][last] = names.index(name) if name else columns["name"][last]
        columns["start_s"][last] = columns["start_s"][chosen].min()
        for each in ("duration_s", "unrecorded_s"):
            columns[each][last] = columns[each][chosen].sum()
        listed |= {end: np.where(inside[listed[end]], last, listed[end]) for end in ("source", "target")}
        listed = {each: values[listed["source"] != listed["target"]] for each, values in listed.items()}
        made = self._with_rows(columns, listed, names=names).part(order, self.label)
        return made.change(np.flatnonzero(order == last), work)

    def of_step(self, step: int) -> Program:
        """The nodes of one step, and the edges among them."""
        return self.part(np.flatnonzero(self.columns["step"] == step), self.label)

    def insert(
        self, place: int, work: Op | Collective, stream: str = "compute", name: str = "", after: Iterable[int] = ()
    ) -> Program:
        """The program with one more node before the node at ``place``; ``after``: earlier nodes that it waits for.

        It does what the framework does in the phase of the node before it.
        """
        count, waits = len(self), chosen_nodes(after, len(self))
        if type(place) is not int or not 0 <= place <= count or (len(waits) and waits[-1] >= place):
            rule = f"place must be a whole number from 0 to {count}, after all nodes that it waits for"
            raise StepsightError(f"{rule}, got {place!r:.80} and {waits.tolist()!s:.80}")
        check_node(work, stream)
        joined = Program.of_parts([self, Program([Node(work, stream, name)])])
        columns = joined._rows()
        for each in ("phase", "step"):
            columns[each][count] = columns[each][max(place - 1, 0)]
        facts = {each: getattr(joined, each) for each in ("works", "streams", "names", "groups")}
        made = self._with_rows(columns, joined._listed(), **facts)
        made = made.part(np.insert(np.arange(count), place, count), self.label)
        return made.with_edges(waits, np.full(len(waits), place), Dependency.DATA, 0.0)

    def _rows(self) -> Columns:
        """Copies of all columns of nodes, times and shares included."""
        times = {name: getattr(self, name) for name in ("start_s", "duration_s", "unrecorded_s")}
        return {name: values.copy() for name, values in ({"share": np.ones(len(self))} | self.columns | times).items()}

    def with_edges(self, source: Any, target: Any, why: Dependency, delay_s: Any) -> Program:
        """The program with more edges of one kind; edges that do not lead forward in time are dropped."""
        source, target = np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64)
        delay = np.broadcast_to(np.asarray(delay_s, dtype=np.float64), source.shape)
        if len(source) and not 0 <= min(source.min(), target.min()) <= max(source.max(), target.max()) < len(self):
            rule = f"edges must join nodes from 0 to {len(self) - 1}"
            raise StepsightError(f"{rule}, got {source!s:.80} to {target!s:.80}")
        keep = source < target
        more = {"source": source[keep], "target": target[keep], "why": np.full(keep.sum(), WHY_NUMBER[why])}
        edges = {name: np.concatenate([values, more[name]]) for name, values in self.edge_columns.items()}
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
        self._nodes.append(Node(work, stream, name, share))
        self._edges.extend((before, len(self._nodes) - 1, why) for before in after)
        return len(self._nodes) - 1

    def link(self, before: Iterable[int], node: int) -> None:
        """Add data edges."""
        self._edges.extend((each, node, Dependency.DATA) for each in before)

    def build(self) -> Program:
        return Program(self._nodes, self._edges, self._label)
