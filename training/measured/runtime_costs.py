"""Costs of torch's pipeline runtime: a few constants, fitted on records of real runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job.job import Job
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.clock.track import Track, find_track
from stepsight.simulator.schedules import KIND_NAMES
from stepsight.simulator.schedules.order import COMPUTE, POST

Gaps = list[tuple[int, float]]
KINDS = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}  # by the label of a segment
FEWEST_GAPS = 20
MOST_HOST_S = 0.05
CLEAR_S = 2e-3  # by which a message was ready earlier where a rank certainly did not wait for it


def measured(step: dict[str, Any], track: Track) -> tuple[Floats, Floats]:
    """Start and end of every action of a track in one recorded step, from the first start; shape ``(num_actions,)``.

    Raises:
        ValueError: If the actions of a rank, or their order, are others than the track's.
    """
    start, end = np.empty((2, track.num_actions))
    for rank, rows in enumerate(step["ranks"]):
        own = np.flatnonzero(track.stage == rank)
        fields = (track.kind[own], track.part[own], track.micro_batch[own])
        expected = [(KIND_NAMES[k], p, m) for k, p, m in zip(*(field.tolist() for field in fields), strict=True)]
        got = [(kind, part, micro) for kind, part, micro, _, _ in rows]
        if got != expected:
            raise ValueError(f"rank {rank} must run the schedule's actions in order, got {got} for {expected}")
        start[own], end[own] = [row[3] for row in rows], [row[4] for row in rows]
    return start - start.min(), end - start.min()


def fit_host(records: Sequence[tuple[Job, dict[str, Any]]]) -> tuple[float, float]:
    """Seconds that the runtime's host takes before each action, and to post a side of a message.

    Args:
        records: Jobs with pipelines on a box, and the records of their steps (``measure.noted_steps`` of the harness).

    Returns:
        Both 0 where nothing tells.
    """
    gaps: Gaps = []
    for job, step in records:
        p = job.parallel
        track = find_track(p.schedule, p.pp, job.num_micro_batches, p.virtual_stages, runtime=p.runtime or "torch")
        stages = [step["spans"][stage * p.tp * p.dp] for stage in range(p.pp)]  # of the first replica
        rows = [[(KINDS[label], *span) for label, *span in spans if label in KINDS] for spans in stages]
        start, end = measured({"ranks": rows}, track)
        gaps += _gaps_without_waits(track, start, end)
    if len(gaps) < FEWEST_GAPS:
        return 0.0, 0.0
    host_action_s, host_message_s = _line(np.array(gaps))
    return min(host_action_s, MOST_HOST_S), min(host_message_s, MOST_HOST_S)


def _line(points: NDArray[np.float64]) -> tuple[float, float]:
    """Intercept and slope through the medians of ``(x, y)`` at every x; neither is negative."""
    values, count = np.unique(points[:, 0], return_counts=True)
    values = values[count >= 5] if (count >= 5).any() else values
    middles = np.array([np.median(points[points[:, 0] == value, 1]) for value in values])
    slope = max(0.0, float(np.polyfit(values, middles, 1)[0])) if len(values) > 1 else 0.0
    return max(0.0, float(np.mean(middles - slope * values))), slope


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
