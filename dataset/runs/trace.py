"""Traces: what was measured, for every rank of a run; the profiler's overhead is taken off."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stepsight.dataset.graph.columns import Floats
from stepsight.dataset.graph.program import Program
from stepsight.dataset.graph.rank_trace import RankTrace, Rendezvous, TracedSegment, is_message
from stepsight.dataset.runs.run_manifest import RunManifest


@dataclass(frozen=True)
class Trace:
    """A run: its manifest, every rank's trace, and their graphs where they were asked for."""

    manifest: RunManifest
    ranks: tuple[RankTrace, ...]
    graphs: tuple[Program, ...] = ()

    def segments(self) -> list[TracedSegment]:
        """Every forward, backward and optimizer segment, by rank and time; equal programs are one object."""
        shared, found = dict[object, Program](), list[TracedSegment]()
        for trace, (index, span) in ((rank, item) for rank in self.ranks for item in enumerate(rank.spans)):
            nodes, slots = np.flatnonzero(trace.span == index), self.clean_slots[trace.rank]
            if span.label == "step" or not len(nodes):
                continue
            program = trace.program.part(nodes, span.label)
            program = shared.setdefault(program.digest_key, program)
            wait = float(trace.wait_s[nodes].sum() + trace.tail_s[index])
            compute = float(slots[nodes][trace.is_compute[nodes]].sum())
            facts: dict[str, Any] = {name: getattr(span, name) for name in ("label", "step", "micro_batch", "stage")}
            facts |= {name: getattr(trace, name)[nodes] for name in ("launch_s", "launch_events", "start_s")}
            facts |= {"rank": trace.rank, "busy": self.manifest.busy, "run": self.manifest.name}
            facts |= {"wait_s": wait, "span_s": compute + wait, "end_s": facts["start_s"] + trace.duration_s[nodes]}
            found.append(TracedSegment(program=program, slot_s=slots[nodes], **facts))
        return found

    @cached_property
    def rendezvous(self) -> list[dict[int, int]]:
        """Collectives that are one: node index by rank, for each that was seen on at least two ranks."""
        found: dict[Rendezvous, dict[int, int]] = {}
        for trace in self.ranks:
            for node, meets in trace.meets.items():
                found.setdefault(meets, {})[trace.rank] = node
        return [nodes for nodes in found.values() if len(nodes) > 1]

    @cached_property
    def clean_slots(self) -> dict[int, Floats]:
        """In-context seconds of each rank's nodes, ``(n,)``, without profiler overhead and drift.

        A collective takes the mean of its ranks' times.  Equal ranks differ from op to op, so each of them waits for
        the others by turns, and a step takes the mean of the ops and of the collectives with these waits.  Where the
        simulator knows why ranks wait, a collective takes as long as on the rank where it was shortest, which comes
        last and waits for nobody: messages between stages, and jobs that state stragglers.
        """
        slots = {trace.rank: self._clean(trace) for trace in self.ranks}
        works = {trace.rank: trace.program.nodes for trace in self.ranks}
        for nodes in self.rendezvous:
            seconds = [float(slots[rank][node]) for rank, node in nodes.items()]
            told = any(is_message(works[rank][node].work) for rank, node in nodes.items())
            usual = min(seconds) if told or self.manifest.job.cluster.stragglers else statistics.fmean(seconds)
            for rank, node in nodes.items():
                slots[rank][node] = usual
        return slots

    def _clean(self, trace: RankTrace) -> Floats:
        slots = np.where(trace.is_compute, trace.slot_s, trace.duration_s)
        profiled = statistics.median(trace.step_s or self.manifest.profiled_seconds or (0.0,))
        if not profiled or trace.launch_s.any():  # a profiler slows the host, not the device
            return slots
        whole = self.manifest.iteration_time_s
        per_event_s, compute = profiling_correction(whole, profiled, trace.events_per_step, trace.waited_share)
        for nodes, drift in ((trace.is_compute, compute), (~trace.is_compute, 1.0)):
            slots[nodes] = drift * without_overhead(slots[nodes], trace.num_events[nodes], per_event_s)
        return slots


# Bounds and prior of the cost of one recorded call.
LEAST_PER_EVENT_S, USUAL_PER_EVENT_S, MOST_PER_EVENT_S = 1e-6, 2e-6, 4e-6
MOST_DRIFT = 0.15


def profiling_correction(
    iteration_s: float, profiled_s: float, num_events: float, waited_share: float
) -> tuple[float, float]:
    """What turns a profiled step into one without a profiler: seconds off every recorded call, a factor on the rest.

    ``waited_share``: part of it spent waiting for other ranks.  Such time varies on its own account, so the two steps
    then say little about the profiler: the usual cost is assumed in that measure.
    """
    trust, per_event = min(max(1.0 - waited_share, 0.0), 1.0), 0.0
    if num_events > 0:
        seen = min(max((iteration_s - profiled_s) / -num_events, LEAST_PER_EVENT_S), MOST_PER_EVENT_S)
        per_event = trust * seen + (1.0 - trust) * USUAL_PER_EVENT_S
    rest = max(profiled_s - per_event * num_events, 1e-3 * profiled_s)
    return per_event, min(max(iteration_s / rest, 1.0 - MOST_DRIFT), 1.0 + MOST_DRIFT) ** trust


def without_overhead(seconds: Floats, num_events: Floats, per_event_s: float, floor: float = 0.1) -> Floats:
    """Take ``per_event_s`` off for every event, leave at least ``floor`` of each, and keep the sum right.

    Shapes: all ``(n,)``.
    """
    if per_event_s <= 0.0 or not len(seconds):
        return seconds.copy()
    least = floor * seconds
    target = max(float(seconds.sum() - per_event_s * num_events.sum()), float(least.sum()))
    low, high = per_event_s, per_event_s
    for _ in range(60):  # the seconds that the floor adds are subtracted from the others
        if np.maximum(seconds - high * num_events, least).sum() <= target * (1.0 + 1e-9):
            break
        low, high = high, 2.0 * high
    for _ in range(40):
        middle = 0.5 * (low + high)
        too_much = np.maximum(seconds - middle * num_events, least).sum() > target
        low, high = (middle, high) if too_much else (low, middle)
    return np.asarray(np.maximum(seconds - high * num_events, least))
