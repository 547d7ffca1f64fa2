"""The host's time to launch ops on a GPU, by kind: from traces of training steps, else from event profiles.

A kind's launches cost about the same whatever its sizes; an optimizer's grow with its tensors.  A profiler slows the
host with every call that it records: how much is what best explains the runs' times without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import launch_units
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.trace import MOST_PER_EVENT_S, USUAL_PER_EVENT_S
from stepsight.training.measured.measured import MeasuredRun

Array = NDArray[np.float64]
_STEPS = 9
_STALL = 5.0  # times the median of a kind in a run: the launch waited, for example for space in a queue
_LEAST_S = 5e-7  # least time of any launch


def launches_in_traces(runs: Sequence[MeasuredRun], per_event_s: float) -> dict[str, float]:
    """Seconds that the host takes to launch an op or collective of each kind, the mean over runs.

    Args:
        runs: Traced, on a GPU; others say nothing.
        per_event_s: What a profiler takes for each call that it records.
    """
    found: dict[str, list[float]] = {}
    for run in runs:
        for kind, (seconds, units) in _by_kind(run, per_event_s).items():
            kept = seconds <= _STALL * np.median(seconds)
            found.setdefault(kind, []).append(float(seconds[kept].sum() / units[kept].sum()))
    return {kind: max(float(np.mean(values)), _LEAST_S) for kind, values in sorted(found.items())}


def _by_kind(run: MeasuredRun, per_event_s: float) -> dict[str, tuple[Array, Array]]:
    """Host seconds of each launch, and its weight relative to its kind's launch, by kind."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for segment in run.segments:
        if not segment.launch_s.any():
            continue
        seconds = np.maximum(segment.launch_s - per_event_s * segment.launch_events, 0.0)
        for node, launch in zip(segment.program.nodes, seconds.tolist(), strict=True):
            kinds.setdefault(node.work.kind, []).append((launch, launch_units(node.work)))
    return {kind: (pairs[:, 0], pairs[:, 1]) for kind, pairs in ((k, np.array(v)) for k, v in kinds.items())}


def launches_alone(ops: Sequence[Op], seconds: Sequence[float]) -> dict[str, float]:
    """Launches from event profiles: the median of each kind; ``seconds`` 0 where it was not measured."""
    found: dict[str, list[float]] = {}
    for op, launch in zip(ops, seconds, strict=True):
        if launch > 0:
            found.setdefault(op.kind, []).append(launch / launch_units(op))
    return {kind: max(float(np.median(values)), _LEAST_S) for kind, values in sorted(found.items())}


def fit_launches(
    runs: Sequence[MeasuredRun], alone: Mapping[str, float], iterations: Callable[[dict[str, float]], Array]
) -> dict[str, float]:
    """Launch seconds by kind.

    Args:
        runs: Of a GPU, traced and timed without a profiler.
        alone: What event profiles say, for kinds that no trace holds.
        iterations: Predicted seconds of the runs' iterations from launch seconds by kind, ``(runs,)``.
    """
    if not launches_in_traces(runs, 0.0):
        return dict(alone)
    measured = np.array([run.manifest.iteration_time_s for run in runs])
    best: tuple[float, dict[str, float]] = (np.inf, {})
    for per_event_s in np.linspace(0.0, MOST_PER_EVENT_S, _STEPS).tolist():
        kinds = {**alone, **launches_in_traces(runs, per_event_s)}
        off = float(np.abs(np.log(iterations(kinds) / measured)).mean())
        off += 1e-4 * abs(per_event_s - USUAL_PER_EVENT_S) / USUAL_PER_EVENT_S  # if no run waits for its host
        best = min(best, (off, kinds), key=lambda found: found[0])
    return best[1]
