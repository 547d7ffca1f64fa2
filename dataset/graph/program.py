"""Programs: what one rank executes, on which stream, after what."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from stepsight.dataset.kinds.op import Collective, Op


class Dependency(enum.Enum):
    """Why one node waits for another (the field's taxonomy)."""

    DATA = "data"  # reads what the other wrote
    STREAM_ORDER = "stream_order"  # issued later on the same stream
    LAUNCH = "launch"  # the host launched it on the device
    SYNCHRONISATION = "synchronisation"  # an event or a wait across streams of one rank
    RENDEZVOUS = "rendezvous"  # the same collective on another rank
    HOST_ORDER = "host_order"  # later on the same host thread


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
