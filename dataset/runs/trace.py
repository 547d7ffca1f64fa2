"""Traces: what was measured, for every rank of a run, with the run's manifest."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Program
from stepsight.dataset.graph.rank_trace import RankTrace, Rendezvous, Seconds, TracedSegment
from stepsight.dataset.runs.overhead import profiling_correction, without_overhead
from stepsight.dataset.runs.run_manifest import RunManifest


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
