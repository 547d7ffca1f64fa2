"""Programs: what one rank executes, on which stream, after what; and what may run concurrently."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.kinds.op import Collective, Op


class Dependency(enum.Enum):
    """Why one node waits for another (the field's taxonomy)."""

    DATA = "data"  # reads what the other wrote
    STREAM_ORDER = "stream_order"  # issued later on the same stream
    LAUNCH = "launch"  # the host launched it on the device
    SYNCHRONISATION = "synchronisation"  # an event or a wait across streams of one rank
    RENDEZVOUS = "rendezvous"  # the same collective on another rank
    HOST_ORDER = "host_order"  # later on the same host thread


WHY = tuple(Dependency)  # by number
WHY_NUMBER = {why: number for number, why in enumerate(WHY)}


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


@dataclass(frozen=True)
class Program:
    """Ops and collectives in issue order, with the dependencies that stream order does not imply.

    Attributes:
        nodes: In issue order: a node only ever waits for earlier ones.
        edges: ``(before, after, why)`` by node index; stream order is implied and not listed.
        label: What it is (``forward``, ``backward``, ``optimizer`` …).
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int, Dependency], ...] = field(default=())
    label: str = ""

    def __post_init__(self) -> None:
        for before, after, why in self.edges:
            if not 0 <= before < after < len(self.nodes):
                raise ValueError(
                    f"an edge must go from an earlier to a later node of {len(self.nodes)}, "
                    f"got {before} -> {after} ({why.value})"
                )

    @classmethod
    def of_columns(
        cls,
        works: Sequence[Op | Collective],
        streams: Sequence[str],
        nodes: Sequence[Indices | NDArray[np.float64]],
        edges: Sequence[Indices] | Indices,
        label: str = "",
    ) -> Program:
        """A program from columns.

        Args:
            works, streams: What the columns number.
            nodes: Index of the work, index of the stream, and share of each node; the share may be left out.
            edges: Source, target and number of the kind (index of ``WHY``) of each edge.
            label: What it is.
        """
        columns = (np.asarray(column).tolist() for column in nodes)
        made = (Node(works[work], streams[stream], "", *share) for work, stream, *share in zip(*columns, strict=True))
        ends = zip(*(np.asarray(column).tolist() for column in edges), strict=True)
        return cls(tuple(made), tuple((before, after, WHY[why]) for before, after, why in ends), label)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Stream names in order of first use."""
        return tuple(dict.fromkeys(node.stream for node in self.nodes))

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


Indices = NDArray[np.int64]

CONCURRENT = "may_run_concurrently"
RELATIONS = (*(why.value for why in Dependency), CONCURRENT)


def relation_pairs(program: Program, max_concurrent: int = 16) -> dict[str, Indices]:
    """Edges by relation, ``(2, e)`` indices into ``program.nodes``; all of ``RELATIONS`` are present."""
    found: dict[str, list[tuple[int, int]]] = {relation: [] for relation in RELATIONS}
    for before, after, why in program.all_edges():
        found[why.value].append((before, after))
    out = {relation: np.array(pairs, dtype=np.int64).reshape(-1, 2).T for relation, pairs in found.items()}
    out[CONCURRENT] = concurrent_pairs(program, max_concurrent)
    return out


def concurrent_pairs(program: Program, max_concurrent: int = 16) -> Indices:
    """Nodes on different streams neither of which precedes the other, in both directions, ``(2, e)``.

    A stream is totally ordered, so what precedes a node on it is a prefix, what follows a suffix, and what may run
    beside it lies between: vector clocks give both ends without comparing pairs.
    """
    if len(program.streams) < 2:
        return np.zeros((2, 0), dtype=np.int64)
    first, last = (np.array(clocks, dtype=np.int64) for clocks in concurrent_ranges(program))
    streams = np.array([program.streams.index(node.stream) for node in program.nodes])
    pairs = []
    for column in range(len(program.streams)):
        there, others = np.flatnonzero(streams == column), np.flatnonzero(streams != column)
        low, high = first[others, column], np.maximum(last[others, column], first[others, column])
        nearest = np.searchsorted(there, others) - max_concurrent // 2  # in order of issue
        low = np.maximum(low, np.minimum(nearest, high - max_concurrent))
        count = np.minimum(high - low, max_concurrent)
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        pairs.append(np.stack([np.repeat(others, count), there[np.repeat(low, count) + offset]]))
    one_way = np.concatenate(pairs, axis=1)
    both = np.concatenate([one_way, one_way[::-1]], axis=1)
    return np.stack(np.divmod(np.unique(both[0] * len(program) + both[1]), len(program)))


def concurrent_ranges(program: Program) -> tuple[list[list[int]], list[list[int]]]:
    """For every node and stream, the positions on it that may run concurrently: ``first <= position < last``."""
    column = {stream: number for number, stream in enumerate(program.streams)}
    before: list[list[int]] = [[] for _ in program.nodes]
    after: list[list[int]] = [[] for _ in program.nodes]
    for source, target, _ in program.all_edges():
        before[target].append(source)
        after[source].append(target)
    counts = [0] * len(column)
    where = []
    for node in program.nodes:
        stream = column[node.stream]
        where.append((stream, counts[stream]))
        counts[stream] += 1
    first: list[list[int]] = []
    for sources in before:  # edges go forward, so one pass is enough
        clock = [0] * len(counts)
        for source in sources:
            stream, position = where[source]
            clock = [mine if mine > other else other for mine, other in zip(clock, first[source], strict=True)]
            clock[stream] = max(clock[stream], position + 1)
        first.append(clock)
    last: list[list[int]] = [counts] * len(where)
    for place in range(len(where) - 1, -1, -1):
        clock = list(counts)
        for target in after[place]:
            stream, position = where[target]
            clock = [mine if mine < other else other for mine, other in zip(clock, last[target], strict=True)]
            clock[stream] = min(clock[stream], position)
        last[place] = clock
    return first, last
