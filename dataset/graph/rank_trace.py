"""Times of one rank's program: its trace, its segments, and its place in the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Program
from stepsight.dataset.kinds.op import Op

Seconds = NDArray[np.float64]


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
class Rendezvous:
    """Identity of a collective across ranks: the group and the sequence number."""

    group: str
    seq: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankTrace:
    """One rank's program with its times.

    Shapes: ``n`` nodes.

    Attributes:
        rank: Which rank.
        program: Ops and collectives in issue order.
        start_s: ``(n,)``, on the rank's clock.
        duration_s: ``(n,)``, own time.
        slot_s: ``(n,)``, in-context time: for a compute node on CPU its own time plus the host gap before it
            on its stream, waits for collectives excluded; for others the own time.
        wait_s: ``(n,)``, time that the node's stream waited for collectives just before the node.
        span: ``(n,)``, index into ``spans``, -1 outside of all.
        spans: Segments in order of time.
        tail_s: ``(len(spans),)``, wait of the compute stream after the last node of each segment.
        meets: Rendezvous of collective nodes, by node index.
        num_events: ``(n,)``, calls that the profiler recorded in the slot: what its overhead grows with.
        launch_s: ``(n,)``, of what a device runs in a segment: host time from the launch before to its own, and of a
            step's last one to the step's end; else 0.
        launch_events: ``(n,)``, calls that the profiler recorded in that time.
        step_s: Seconds of each whole step, profiled.
        events_per_step: Recorded calls that a step's time passes through.
        waited_share: Part of a step that the compute stream waited for others.
        unclassified_s: Time in ops of no known kind (they count as ``elementwise``).
    """

    rank: int
    program: Program
    start_s: Seconds
    duration_s: Seconds
    slot_s: Seconds
    wait_s: Seconds
    span: NDArray[np.int64]
    spans: tuple[Span, ...] = ()
    tail_s: Seconds = field(default_factory=lambda: np.zeros(0))
    meets: Mapping[int, Rendezvous] = field(default_factory=dict)
    num_events: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    launch_s: Seconds = field(default_factory=lambda: np.zeros(0))
    launch_events: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    step_s: tuple[float, ...] = ()
    events_per_step: float = 0.0
    waited_share: float = 0.0
    unclassified_s: float = 0.0

    @cached_property
    def is_compute(self) -> NDArray[np.bool_]:
        """``(n,)``: which nodes are ops of the ``compute`` stream."""
        nodes = self.program.nodes
        return np.array([isinstance(node.work, Op) and node.stream == "compute" for node in nodes], dtype=np.bool_)


@dataclass(frozen=True)
class TracedSegment:
    """One segment of one rank and step: what the context model learns from.

    Attributes:
        program: Its nodes and the edges among them; ``program.label`` is the label too.
        slot_s: ``(n,)``, in-context seconds of each node, profiling overhead removed; NaN where unknown.
        label: ``forward``, ``backward`` or ``optimizer``.
        rank: Which rank.
        busy: Ranks that compute at the same time on the node.
        run: Name of the run.
        step: Which profiled step.
        micro_batch: Which micro-batch.
        stage: Which pipeline stage.
        launch_s: ``(n,)``, host time from the launch before to each node's, of what a device runs, profiled; else 0.
        launch_events: ``(n,)``, calls that the profiler recorded in that time.
        wait_s: Seconds that the compute stream waited for collectives in all.
        span_s: Seconds from begin to end; compute slots + waits, profiling overhead removed.
        start_s, end_s: ``(n,)``, when each node ran, on the rank's clock; empty if that is not known.
        alone_s: ``(n,)``, measured seconds of each node's signature where nothing ran beside it, NaN where that never
            was; empty if not looked for.
    """

    program: Program
    slot_s: Seconds
    label: str
    rank: int
    busy: int
    run: str
    step: int = 0
    micro_batch: int = 0
    stage: int = 0
    launch_s: Seconds = field(default_factory=lambda: np.zeros(0))
    launch_events: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    wait_s: float = 0.0
    span_s: float = 0.0
    start_s: Seconds = field(default_factory=lambda: np.zeros(0))
    end_s: Seconds = field(default_factory=lambda: np.zeros(0))
    alone_s: Seconds = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True, slots=True)
class Placement:
    """Facts about a rank that its trace does not state.

    Attributes:
        rank: Which rank, None if the trace is to be asked.
        devices_per_node: Ranks that share a node, filled in rank order; 0: all share one.
        tp, dp: Degrees, where known: ``rank = tp_rank + tp * (dp_rank + dp * stage)``; 0: not known.
    """

    rank: int | None = None
    devices_per_node: int = 0
    tp: int = 0
    dp: int = 0

    def ranks_per_node(self, ranks: Sequence[int], size: int) -> int:
        """``ceil(size / nodes)`` of a group."""
        if not self.devices_per_node or not ranks:
            return size
        return -(-size // len({rank // self.devices_per_node for rank in ranks}))

    def axis(self, ranks: Sequence[int]) -> str:
        """The parallel axis along which a group lies, "" if the degrees are not known or it is none."""
        if not (self.tp and self.dp) or len(ranks) < 2:
            return ""
        places = [(rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)) for rank in ranks]
        varying = [
            name
            for name, values in zip(("tp", "dp", "pp"), zip(*places, strict=True), strict=True)
            if len(set(values)) > 1
        ]
        return varying[0] if len(varying) == 1 else ""

    def data_parallel_group(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same shard as this one."""
        if not (self.tp and self.dp):
            return ()
        first = rank - rank // self.tp % self.dp * self.tp
        return tuple(range(first, first + self.tp * self.dp, self.tp))
