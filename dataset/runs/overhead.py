"""The time that a profiler adds to a step, and its removal.

Every recorded call costs about the same (1.5 to 2.2 microseconds measured with shapes on, torch 2.13 on a 2.5 GHz
EPYC), so a step of many small ops suffers most and large ops hardly at all.  Any further difference is
drift of the machine between the timed and the profiled steps; it scales all durations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]

# Bounds and prior of the cost of one recorded call.
LEAST_PER_EVENT_S, USUAL_PER_EVENT_S, MOST_PER_EVENT_S = 1e-6, 2e-6, 4e-6
MOST_DRIFT = 0.15


@dataclass(frozen=True, slots=True)
class Correction:
    """Constants that turn profiled seconds into unprofiled ones.

    Attributes:
        per_event_s: To be taken off for every recorded call.
        drift: Factor on what is left of compute.
    """

    per_event_s: float
    drift: float


def profiling_correction(iteration_s: float, profiled_s: float, num_events: float, waited_share: float) -> Correction:
    """Find the correction that turns a profiled step into a step without a profiler.

    Args:
        iteration_s: A step without a profiler.
        profiled_s: A step with it.
        num_events: Recorded calls in it.
        waited_share: Part of it spent waiting for other ranks.  Such time varies on its own account, so the two steps
            then say little about the profiler: the usual cost is assumed in that measure.
    """
    trust = min(max(1.0 - waited_share, 0.0), 1.0)
    if num_events <= 0:
        return Correction(0.0, min(max(iteration_s / profiled_s, 1.0 - MOST_DRIFT), 1.0 + MOST_DRIFT) ** trust)
    seen = min(max((iteration_s - profiled_s) / -num_events, LEAST_PER_EVENT_S), MOST_PER_EVENT_S)
    per_event = trust * seen + (1.0 - trust) * USUAL_PER_EVENT_S
    rest = max(profiled_s - per_event * num_events, 1e-3 * profiled_s)
    drift = min(max(iteration_s / rest, 1.0 - MOST_DRIFT), 1.0 + MOST_DRIFT)
    return Correction(per_event, drift**trust)


def without_overhead(seconds: Seconds, num_events: Seconds, per_event_s: float, floor: float = 0.1) -> Seconds:
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
