"""Columns of nodes and edges of a program and what their numbers mean, and what a host records beside them."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import StepsightError
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
    calls_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    own_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    waits_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 2)))
    awaited: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class NodeArrays(Protocol):
    """What a ``Program`` is to code that reads its arrays alone."""

    label: str
    rank: int

    @property
    def columns(self) -> dict[str, NDArray[Any]]: ...
    @property
    def edge_columns(self) -> dict[str, NDArray[Any]]: ...
    @property
    def works(self) -> Sequence[Op | Collective]: ...
    @property
    def streams(self) -> Sequence[str]: ...
    @property
    def start_s(self) -> NDArray[np.float64]: ...
    @property
    def end_s(self) -> NDArray[np.float64]: ...
    @property
    def duration_s(self) -> NDArray[np.float64]: ...
    @property
    def on_device(self) -> NDArray[np.bool_]: ...
    def __len__(self) -> int: ...


def chosen_nodes(nodes: Iterable[int], count: int) -> NDArray[np.int64]:
    """Numbers of nodes that a user names, in order.

    Raises:
        StepsightError: If one is no whole number, or a program of ``count`` nodes has no such node.
    """
    chosen = list(nodes) if isinstance(nodes, Iterable) else [nodes]
    whole = all(isinstance(node, int | np.integer) and not isinstance(node, bool) for node in chosen)
    if not whole or not all(0 <= node < count for node in chosen):
        raise StepsightError(f"nodes must be whole numbers from 0 to {count - 1}, got {chosen!s:.80}")
    return np.array(sorted(set(chosen)), dtype=np.int64)


def check_node(work: object, stream: object) -> None:
    """Check what a user makes a node of.

    Raises:
        StepsightError: If it is something else.
    """
    if not isinstance(work, Op | Collective | None):
        raise StepsightError(f"work of a node must be an Op or a Collective, got {work!r:.80}")
    if not isinstance(stream, str):
        raise StepsightError(f"stream of a node must be a text, got {stream!r:.80}")
