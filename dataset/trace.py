"""Traces: what was measured, for every rank of a run, with the run's manifest."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job import Job
from stepsight.dataset.program import Program

Seconds = NDArray[np.float64]
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class RunManifest:
    """What ``manifest.json`` of a run folder says, checked.

    Attributes:
        folder: The run folder.
        name: Name of the run in its collection.
        role: ``train``, ``heldout`` or what the plan called it.
        job: What ran.
        world_size: Number of ranks.
        rounds: Seconds of each timed step without a profiler, by round.
        profiled_seconds: Seconds of each profiled step.
        fingerprint: Machine and software it ran on.
        versions: Software versions.
        traces: File names by rank and format (``kineto``, ``et``); empty for a run that was only timed.
        peak_memory_bytes: Per rank.
        losses: Per step.
    """

    folder: Path
    name: str
    role: str
    job: Job
    world_size: int
    rounds: tuple[tuple[float, ...], ...]
    profiled_seconds: tuple[float, ...] = ()
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    traces: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    peak_memory_bytes: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """All timed steps without a profiler: the truth and its spread."""
        return tuple(seconds for steps in self.rounds for seconds in steps)

    @property
    def iteration_time_s(self) -> float:
        """Median of the timed steps."""
        return statistics.median(self.step_seconds)

    @property
    def busy(self) -> int:
        """Ranks that compute at the same time on one node."""
        return min(self.world_size, self.job.cluster.devices_per_node)


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
    """What tells which collectives of different ranks are one: same group, same sequence number."""

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
    unclassified_s: float = 0.0


@dataclass(frozen=True)
class Segment:
    """One segment of one rank and step: what the context model learns from.

    Attributes:
        program: Its nodes and the edges among them; ``program.label`` is the label too.
        slot_s: ``(n,)``, in-context seconds of each node, profiling overhead removed.
        label: ``forward``, ``backward`` or ``optimizer``.
        rank: Which rank.
        busy: Ranks that compute at the same time on the node.
        run: Name of the run.
        step: Which profiled step.
        micro_batch: Which micro-batch.
        stage: Which pipeline stage.
        wait_s: Seconds that the compute stream waited for collectives in all.
        span_s: Seconds from begin to end; compute slots + waits, profiling overhead removed.
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
    wait_s: float = 0.0
    span_s: float = 0.0


@dataclass(frozen=True)
class Trace:
    """A run: its manifest and every rank's trace."""

    manifest: RunManifest
    ranks: tuple[RankTrace, ...]

    def segments(self) -> list[Segment]:
        """Every forward, backward and optimizer segment, by rank and time."""
        raise NotImplementedError

    @cached_property
    def rendezvous(self) -> list[dict[int, int]]:
        """Matched collectives: for each, node index by rank."""
        raise NotImplementedError


@dataclass(frozen=True)
class Collection:
    """What of a collection folder is there.

    Attributes:
        folder: The folder.
        runs: Manifests of the complete runs, by name.
        absent: Names of planned runs that are not there.
        events: Event files that are there.
        absent_events: Names of planned event files that are not there.
    """

    folder: Path
    runs: tuple[RunManifest, ...]
    absent: tuple[str, ...] = ()
    events: tuple[Path, ...] = ()
    absent_events: tuple[str, ...] = ()

    def traces(self, role: str | None = None) -> Iterator[Trace]:
        """Read the complete runs (of a role) that have traces, one after the other."""
        for manifest in self.runs:
            if manifest.traces and role in (None, manifest.role):
                yield read_run(manifest.folder)


def read_manifest(folder: Path) -> RunManifest:
    """Read and check ``manifest.json`` of a run folder.

    Raises:
        TraceError: If there is none, or it is not what the harness writes.
    """
    raise NotImplementedError


def read_run(folder: Path) -> Trace:
    """Read a run folder whole.

    Raises:
        TraceError: If the manifest, a rank or a trace is missing, truncated or inconsistent.
    """
    raise NotImplementedError


def read_collection(folder: Path) -> Collection:
    """List what of a collection is complete and what is absent.

    Raises:
        TraceError: If the folder is no collection or a manifest is wrong.
    """
    raise NotImplementedError
