"""Costs of torch's pipeline runtime: a few constants, fitted on records of real runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job.job import Job
from stepsight.simulator.clock.engine import Floats, Ints
from stepsight.simulator.clock.track import Track, TrackRun, find_track, run_track
from stepsight.simulator.schedules import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KIND_NAMES
from stepsight.simulator.schedules.order import COMPUTE, POST

Gaps = list[tuple[int, float]]
KINDS = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}  # by the label of a segment
FEWEST_GAPS = 20
MOST_HOST_S = 0.05
CLEAR_S = 2e-3  # limits beyond which a rank certainly waited, or certainly did not


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeCosts:
    """Seconds of the host and of messages.

    Attributes:
        sleep_s: What a sleep takes too long.
        action_s: An action beside its sleeps: autograd, caches.
        host_action_s: Between actions.
        host_message_s: To post a side of a message.
        message_s: A message, once both sides are ready, until its receiver goes on.
    """

    sleep_s: float = 0.0
    action_s: float = 0.0
    host_action_s: float = 0.0
    host_message_s: float = 0.0
    message_s: float = 0.0


def sleeps(case: dict[str, Any], track: Track, first_alike: bool = False) -> tuple[Floats, Ints]:
    """Seconds that every action sleeps, and in how many pieces; shape ``(num_actions,)``.

    The first part's input needs no gradient, so there is nothing to sleep for, unless ``first_alike``.
    """
    gradient = (track.part > 0) | first_alike
    does = np.stack(
        [
            track.kind == FORWARD,
            (track.kind != FORWARD) & (track.kind != BACKWARD_WEIGHT) & gradient,
            (track.kind != FORWARD) & (track.kind != BACKWARD_INPUT),
        ]
    )
    seconds = np.array([case["forward_s"], case["input_s"], case["weight_s"]]) @ does
    return seconds * np.array(case["pace"])[track.stage], does.sum(axis=0).astype(np.int32)


def simulate_case(case: dict[str, Any], track: Track, costs: RuntimeCosts, first_alike: bool = False) -> TrackRun:
    """Run a case with these costs."""
    seconds, goes = sleeps(case, track, first_alike)
    transition = (seconds + goes * costs.sleep_s + costs.action_s).reshape(-1, 1, 1)
    return run_track(
        track,
        np.arange(track.num_actions, dtype=np.int32),
        transition,
        np.full(track.num_messages, costs.message_s),
        costs.host_action_s,
        costs.host_message_s,
    )


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


def fit_costs(records: Sequence[tuple[dict[str, Any], Track, dict[str, Any]]]) -> RuntimeCosts:
    """Fit costs to recorded steps ``(case, track, step)``; each constant to the times that depend on it alone.

    Lengths of actions give ``sleep_s`` and ``action_s``; gaps without a wait the host's part; waits the message's.
    """
    lengths: list[Floats] = []
    gaps: Gaps = []
    waits: Gaps = []
    for case, track, step in records:
        seconds, goes = sleeps(case, track)
        start, end = measured(step, track)
        lengths.append(np.stack([goes, end - start - seconds], axis=1))
        _sort_gaps(track, start, end, gaps, waits)
    action_s, sleep_s = _line(np.concatenate(lengths))
    host_action_s, host_message_s = _line(np.array(gaps))
    late = np.array(waits)
    message_s = float(np.median(late[:, 1] - host_action_s - late[:, 0] * host_message_s))
    return RuntimeCosts(
        sleep_s=sleep_s,
        action_s=action_s,
        host_action_s=host_action_s,
        host_message_s=host_message_s,
        message_s=max(0.0, message_s),
    )


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
        _sort_gaps(track, start, end, gaps, [])
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


def _sort_gaps(track: Track, start: Floats, end: Floats, gaps: Gaps, waits: Gaps) -> None:
    """Times between a rank's actions, split into those without a wait and those that wait for a message.

    Added to ``gaps``: posts between, and seconds from the action before.  To ``waits``: posts on the side that was
    late, and seconds from that side's action before to the start of the action that waited.
    """
    free = np.zeros(track.num_stages)
    posts = np.zeros(track.num_stages, dtype=np.int64)
    ready = np.full(track.num_stages, -np.inf)  # when the last message that the rank waits for could be transferred
    behind = np.zeros(track.num_stages, dtype=np.int64)
    posted, before = np.zeros((2, track.num_messages, 2))
    seen = np.zeros(track.num_stages, dtype=np.bool_)
    for op, rank, index, side in zip(*(field.tolist() for field in track.entries), strict=True):
        if op == POST:
            posts[rank] += 1
            posted[index, side], before[index, side] = free[rank], posts[rank]
        elif op == COMPUTE:
            if seen[rank] and ready[rank] < free[rank] - CLEAR_S:
                gaps.append((int(posts[rank]), start[index] - free[rank]))
            elif ready[rank] > free[rank] + CLEAR_S:
                waits.append((int(behind[rank]), start[index] - ready[rank]))
            seen[rank], free[rank], posts[rank], ready[rank] = True, end[index], 0, -np.inf
        else:
            late = 1 if posted[index, 1] > posted[index, 0] else 0
            if posted[index, late] > ready[rank]:
                ready[rank], behind[rank] = posted[index, late], before[index, late]
