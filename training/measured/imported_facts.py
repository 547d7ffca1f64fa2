"""Execution facts of the hardware from traces and records: launches, overlap, and costs of the pipeline runtime.

A kind's launches cost about the same whatever its sizes; an optimizer's grow with its tensors.  A profiler slows the
host with every call that it records: how much is what best explains the runs' times without one.  Costs of torch's
pipeline runtime are a few constants, fitted on records of real runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.hardware.hardware import Hardware, launch_units
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.trace import MOST_PER_EVENT_S, USUAL_PER_EVENT_S
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.clock.track import Track, find_track
from stepsight.simulator.schedules import KIND_NAMES
from stepsight.simulator.schedules.order import COMPUTE, POST
from stepsight.training.measured.measured import MeasuredRun

if TYPE_CHECKING:
    from stepsight.dataset.trace_graphs.learning_segments import StepWorks


FEWEST_LAUNCHES = 20  # fewest launches of a kind for its launch time
FEWEST_BESIDE, LEAST_BESIDE_S = 50, 1e-3  # fewest overlapping ops, and least time of them, for the slowdown
# A short kernel loses up to ten microseconds, whatever it does.  That says nothing of long kernels, which take most of
# the time of a large model (docs/results/context.md).
LEAST_ALONE_S = 3e-5
STEADY, CLOCK_S = 1.25, 1e-6  # largest spread of a kernel's time alone; resolution of traces
_STALL = 5.0  # times the median of a kind: the host waited
_LEAST_S = 5e-7  # least time of any launch
_BESIDE, _ALONE = 0.5, 0.02  # share of an op that overlaps with a collective


@dataclass(frozen=True)
class Overlap:
    """The slowdown of compute that overlaps with collectives."""

    share: float  # part of the overlapped time that is lost, the median weighted by time: Hardware.comm_compute_share
    # overlapped ops that have the same kernel of the same signature without overlap, and take LEAST_ALONE_S there at
    # least
    ops: int
    seconds: float  # overlapped
    slowdown: float  # how many times as long those ops take, the median weighted by time


def with_facts(hardware: Hardware, launches: Mapping[str, float], overlap: Overlap | None) -> Hardware:
    """The hardware with launches and overlap from traces; its source says so."""
    told = " and ".join(["launches"] * bool(launches) + ["overlap"] * (overlap is not None))
    if launches:
        kinds = {**hardware.host_kinds_s, **launches}
        usual = hardware.host_op_s or float(np.median(list(kinds.values())))
        hardware = replace(hardware, host_kinds_s=kinds, host_op_s=usual)
    if overlap is not None:
        hardware = replace(hardware, comm_compute_share=overlap.share)
    return replace(hardware, source=f"{hardware.source}; {told} by imported traces") if told else hardware


def overlap_of(steps: Sequence[StepWorks]) -> Overlap | None:
    """The slowdown of compute that overlaps with collectives; None if the traces do not show it.

    Medians weighted by time, because some kernels do other work under the same name and grid.
    """
    shares, ratios, weights = [], [], []
    for step in steps:
        op = np.array([isinstance(work, Op) for work in step.works], dtype=np.bool_)
        part = step.beside_s / np.maximum(step.seconds, 1e-9)
        # Median of each kernel alone; NaN where it never ran alone, or where its times differ too much.
        rows = np.flatnonzero(op[step.work] & (part <= _ALONE))
        order = rows[np.lexsort((step.seconds[rows], step.kernel[rows]))]
        distinct, first, counts = np.unique(step.kernel[order], return_index=True, return_counts=True)
        low, middle, high = (step.seconds[order[first + (at * (counts - 1)).astype(int)]] for at in (0.1, 0.5, 0.9))
        usual = np.full(int(step.kernel.max(initial=-1)) + 1, np.nan)
        usual[distinct] = np.where(high <= STEADY * low + CLOCK_S, middle, np.nan)
        usual = usual[step.kernel]
        chosen = op[step.work] & (part >= _BESIDE) & (usual >= LEAST_ALONE_S)  # not where that is NaN
        seconds, alone, beside = step.seconds[chosen], usual[chosen], step.beside_s[chosen]
        shares.append((seconds - alone) / beside)
        ratios.append(seconds / alone)
        weights.append(beside)
    weight = np.concatenate([*weights, np.zeros(0)])
    if len(weight) < FEWEST_BESIDE or weight.sum() < LEAST_BESIDE_S:
        return None
    medians = []
    for values in map(np.concatenate, (shares, ratios)):
        order = np.argsort(values)
        total = np.cumsum(weight[order])
        medians.append(float(values[order][np.searchsorted(total, total[-1] / 2)]))
    return Overlap(float(np.clip(medians[0], 0.0, 1.0)), len(weight), float(weight.sum()), medians[1])


def launch_seconds(steps: Sequence[StepWorks]) -> dict[str, float]:
    """Host seconds of a launch by kind, from one launch of a thread to the next, less the profiler's."""
    found: dict[str, list[float]] = {}
    for step in steps:
        known = np.flatnonzero(step.launch_s > 0)
        less = np.minimum(USUAL_PER_EVENT_S * step.launch_events, 0.5 * step.launch_s)
        for number, seconds in zip(step.work[known].tolist(), (step.launch_s - less)[known].tolist(), strict=True):
            launched = step.works[number]
            found.setdefault(launched.kind, []).append(seconds / launch_units(launched))
    out = {}
    for kind, values in sorted(found.items()):
        if len(values) >= FEWEST_LAUNCHES:
            spent = np.array(values)
            out[kind] = max(float(spent[spent <= _STALL * np.median(spent)].mean()), _LEAST_S)
    return out


_STEPS = 9


def launches_in_traces(runs: Sequence[MeasuredRun], per_event_s: float) -> dict[str, float]:
    """Host seconds of a launch by kind, mean over runs; ``per_event_s``: what the profiler takes for a call."""
    found: dict[str, list[float]] = {}
    for run in runs:
        kinds: dict[str, list[tuple[float, float]]] = {}  # each launch, and its weight relative to its kind's launch
        for segment in (segment for segment in run.segments if segment.launch_s.any()):
            less = np.maximum(segment.launch_s - per_event_s * segment.launch_events, 0.0)
            for node, launch in zip(segment.program.nodes, less.tolist(), strict=True):
                kinds.setdefault(node.work.kind, []).append((launch, launch_units(node.work)))
        for kind, launches in kinds.items():
            seconds, units = np.array(launches).T
            kept = seconds <= _STALL * np.median(seconds)
            found.setdefault(kind, []).append(float(seconds[kept].sum() / units[kept].sum()))
    return {kind: max(float(np.mean(values)), _LEAST_S) for kind, values in sorted(found.items())}


def fit_launches(
    runs: Sequence[MeasuredRun], launched: Iterable[tuple[Op, float]], iterations: Callable[[dict[str, float]], Floats]
) -> dict[str, float]:
    """Launch seconds by kind.

    ``runs``: of a GPU, traced and timed without a profiler.  ``launched``: what event profiles say of ops, 0 where it
    was not measured, for kinds that no trace holds: the median.  ``iterations``: predicted seconds of the runs'
    iterations from launch seconds by kind, ``(runs,)``.
    """
    each: dict[str, list[float]] = {}
    for op, launch in launched:
        if launch > 0:
            each.setdefault(op.kind, []).append(launch / launch_units(op))
    alone = {kind: max(float(np.median(values)), _LEAST_S) for kind, values in sorted(each.items())}
    if not launches_in_traces(runs, 0.0):
        return alone
    measured = np.array([run.manifest.iteration_time_s for run in runs])
    best: tuple[float, dict[str, float]] = (np.inf, {})
    for per_event_s in np.linspace(0.0, MOST_PER_EVENT_S, _STEPS).tolist():
        kinds = {**alone, **launches_in_traces(runs, per_event_s)}
        off = float(np.abs(np.log(iterations(kinds) / measured)).mean())
        off += 1e-4 * abs(per_event_s - USUAL_PER_EVENT_S) / USUAL_PER_EVENT_S  # if no run waits for its host
        best = min(best, (off, kinds), key=lambda found: found[0])
    return best[1]


Gaps = list[tuple[int, float]]
KINDS = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}  # by the label of a segment
FEWEST_GAPS = 20
MOST_HOST_S = 0.05
CLEAR_S = 2e-3  # by which a message was ready earlier where a rank certainly did not wait for it


def fit_host(records: Sequence[tuple[Job, dict[str, Any]]]) -> tuple[float, float]:
    """Seconds of the runtime's host before each action, and to post a side of a message; 0 where nothing tells.

    Intercept and slope through the medians of gaps with as many posts; neither is negative.
    """
    gaps: Gaps = []
    for job, step in records:
        p = job.parallel
        track = find_track(p.schedule, p.pp, job.num_micro_batches, p.virtual_stages, runtime=p.runtime or "torch")
        start, end = np.empty((2, track.num_actions))
        for rank in range(p.pp):
            spans = step["spans"][rank * p.tp * p.dp]  # of the first replica
            rows = [(KINDS[label], *span) for label, *span in spans if label in KINDS]
            own = np.flatnonzero(track.stage == rank)
            fields = (field[own].tolist() for field in (track.kind, track.part, track.micro_batch))
            expected = [(KIND_NAMES[kind], part, micro) for kind, part, micro in zip(*fields, strict=True)]
            got = [(kind, part, micro) for kind, part, micro, _, _ in rows]
            if got != expected:
                raise ValueError(f"rank {rank} must run the schedule's actions in order, got {got} for {expected}")
            start[own], end[own] = [row[3] for row in rows], [row[4] for row in rows]
        gaps += _gaps_without_waits(track, start - start.min(), end - start.min())
    if len(gaps) < FEWEST_GAPS:
        return 0.0, 0.0
    posts, seconds = np.array(gaps).T
    values, count = np.unique(posts, return_counts=True)
    values = values[count >= 5] if (count >= 5).any() else values
    middles = np.array([np.median(seconds[posts == value]) for value in values])
    slope = max(0.0, float(np.polyfit(values, middles, 1)[0])) if len(values) > 1 else 0.0
    return min(max(0.0, float(np.mean(middles - slope * values))), MOST_HOST_S), min(slope, MOST_HOST_S)


def _gaps_without_waits(track: Track, start: Floats, end: Floats) -> Gaps:
    """Posts between two actions of a rank, and seconds from the one to the other, where no message was waited for."""
    found: Gaps = []
    free = np.zeros(track.num_stages)
    posts = np.zeros(track.num_stages, dtype=np.int64)
    ready = np.full(track.num_stages, -np.inf)  # when the last message that the rank waits for could be transferred
    posted = np.zeros((track.num_messages, 2))
    seen = np.zeros(track.num_stages, dtype=np.bool_)
    for op, rank, index, side in zip(*(field.tolist() for field in track.entries), strict=True):
        if op == POST:
            posts[rank] += 1
            posted[index, side] = free[rank]
        elif op == COMPUTE:
            if seen[rank] and ready[rank] < free[rank] - CLEAR_S:
                found.append((int(posts[rank]), start[index] - free[rank]))
            seen[rank], free[rank], posts[rank], ready[rank] = True, end[index], 0, -np.inf
        else:
            ready[rank] = max(ready[rank], posted[index].max())
    return found
