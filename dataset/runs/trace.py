"""Traces: what was measured, for every rank of a run, with the run's manifest."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Program
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.overhead import profiling_correction, without_overhead
from stepsight.dataset.runs.run_manifest import RunManifest

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


@dataclass(frozen=True)
class Trace:
    """A run: its manifest and every rank's trace."""

    manifest: RunManifest
    ranks: tuple[RankTrace, ...]

    def segments(self) -> list[TracedSegment]:
        """Every forward, backward and optimizer segment, by rank and time; equal programs are one object."""
        shared: dict[object, Program] = {}
        return [segment for trace in self.ranks for segment in self._rank_segments(trace, shared)]

    @cached_property
    def rendezvous(self) -> list[dict[int, int]]:
        """Collectives that are one: node index by rank, for each that was seen on at least two ranks."""
        found: dict[Rendezvous, dict[int, int]] = {}
        for trace in self.ranks:
            for node, meets in trace.meets.items():
                found.setdefault(meets, {})[trace.rank] = node
        return [nodes for nodes in found.values() if len(nodes) > 1]

    @cached_property
    def clean_slots(self) -> dict[int, Seconds]:
        """In-context seconds of each rank's nodes, ``(n,)``, without profiler overhead and drift.

        A collective takes as long as on the rank where it was shortest: the rank that comes last waits for nobody,
        so its span is the communication without the skew.
        """
        slots = {trace.rank: self._clean(trace) for trace in self.ranks}
        for nodes in self.rendezvous:
            shortest = min(slots[rank][node] for rank, node in nodes.items())
            for rank, node in nodes.items():
                slots[rank][node] = shortest
        return slots

    def _clean(self, trace: RankTrace) -> Seconds:
        slots = np.where(trace.is_compute, trace.slot_s, trace.duration_s)
        profiled = statistics.median(trace.step_s or self.manifest.profiled_seconds or (0.0,))
        if not profiled or trace.launch_s.any():  # a profiler slows the host, not the device
            return slots
        correction = profiling_correction(
            self.manifest.iteration_time_s, profiled, trace.events_per_step, trace.waited_share
        )
        for nodes, drift in ((trace.is_compute, correction.drift), (~trace.is_compute, 1.0)):
            slots[nodes] = drift * without_overhead(slots[nodes], trace.num_events[nodes], correction.per_event_s)
        return slots

    def _rank_segments(self, trace: RankTrace, shared: dict[object, Program]) -> Iterator[TracedSegment]:
        slots = self.clean_slots[trace.rank]
        for index, span in enumerate(trace.spans):
            nodes = np.flatnonzero(trace.span == index)
            if span.label == "step" or not len(nodes):
                continue
            program = _part(trace.program, nodes, span.label)
            program = shared.setdefault(program.digest_key, program)
            wait = float(trace.wait_s[nodes].sum() + trace.tail_s[index])
            compute = float(slots[nodes][trace.is_compute[nodes]].sum())
            yield TracedSegment(
                program=program,
                slot_s=slots[nodes],
                label=span.label,
                rank=trace.rank,
                busy=self.manifest.busy,
                run=self.manifest.name,
                step=span.step,
                micro_batch=span.micro_batch,
                stage=span.stage,
                launch_s=trace.launch_s[nodes],
                launch_events=trace.launch_events[nodes],
                wait_s=wait,
                span_s=compute + wait,
                start_s=trace.start_s[nodes],
                end_s=trace.start_s[nodes] + trace.duration_s[nodes],
            )


def _part(program: Program, nodes: NDArray[np.int64], label: str) -> Program:
    """The nodes of a program and the edges among them."""
    place = {int(node): position for position, node in enumerate(nodes)}
    edges = tuple((place[b], place[a], why) for b, a, why in program.edges if b in place and a in place)
    return Program(tuple(program.nodes[int(node)] for node in nodes), edges, label)
