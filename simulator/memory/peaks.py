"""The peak of every stage over its schedule."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.compiling import compiled
from stepsight.simulator.schedules import Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

KEPT, LEFT, DEFERRED, GROWN, FORWARD_PEAK, BACKWARD_PEAK, FIRST_PEAK, GATHERED, WEIGHT_PEAK = range(9)
MOMENT, ACTIVATIONS, GRADIENTS, FLYING, ACTION = range(5)


@cached(256)
def _flat(schedule: Schedule) -> tuple[NDArray[np.int64], Ints]:
    lengths = [len(rows) for rows in schedule.actions]
    return np.concatenate([[0], np.cumsum(lengths)]), np.concatenate(schedule.actions)


def find_peaks(schedule: Schedule, bytes_of: Floats) -> Floats:
    """Walk every stage's actions.

    Args:
        schedule: Of all stages.
        bytes_of: Shape ``(num_stages, num_chunks, 9)``: what a micro-batch keeps until its backward, leaves until the
            end, defers from its input's to its parameters' gradients; gradients that its first backward brings; peaks
            of forward, of backward, and of the first backward; parameters that stay gathered from the first forward on;
            peak of the parameters' half of a backward.

    Returns:
        Shape ``(num_stages, 5)``: bytes of the largest moment, of it kept activations and gradients, micro-batches in
        flight, and the kind of action.
    """
    bounds, rows = _flat(schedule)
    out = np.zeros((schedule.num_stages, 5))
    ran = np.zeros((2, *bytes_of.shape[:2]), dtype=np.bool_)
    _run_actions(bounds, rows, bytes_of, ran, out, np.empty(0))
    return out


def find_moments(schedule: Schedule, bytes_of: Floats) -> tuple[Floats, ...]:
    """Find the bytes that each action of every stage needs; the largest of a stage is its ``MOMENT``.

    Args:
        schedule: Of all stages.
        bytes_of: As in ``find_peaks``.

    Returns:
        For each stage an array of shape ``(num_actions,)``, in the order of its schedule.
    """
    bounds, rows = _flat(schedule)
    moments = np.zeros(len(rows))
    ran = np.zeros((2, *bytes_of.shape[:2]), dtype=np.bool_)
    _run_actions(bounds, rows, bytes_of, ran, np.zeros((schedule.num_stages, 5)), moments)
    return tuple(np.split(moments, bounds[1:-1]))


@compiled
def _run_actions(
    bounds: NDArray[np.int64],
    rows: Ints,
    bytes_of: Floats,
    ran: NDArray[np.bool_],
    out: Floats,
    moments: Floats,
) -> None:
    """Walk the actions of every stage in order.

    Args:
        bounds: First row of each stage, and the number of rows.
        rows: Kind, micro-batch and chunk of each action.
        bytes_of: As in ``find_peaks``.
        ran: Whether each chunk ran forward, and whether it ran backward; all false.
        out: Result of ``find_peaks``; written.
        moments: Bytes of each action, written; empty: not wanted.
    """
    came, seen = ran[0], ran[1]
    for stage in range(len(bounds) - 1):
        kept, grown, flying, gathered = 0.0, 0.0, 0, 0.0
        for at in range(bounds[stage], bounds[stage + 1]):
            kind, chunk = rows[at, 0], rows[at, 2]
            size = bytes_of[stage, chunk, 0]
            if kind == 0 and not came[stage, chunk]:
                came[stage, chunk] = True
                gathered += bytes_of[stage, chunk, 7]
            if kind == 0:  # forward
                moment = kept + bytes_of[stage, chunk, 4]
                kept += size + bytes_of[stage, chunk, 1]
                flying += 1
                there, number = kept, flying
            elif kind == 3:  # parameters' gradients
                there, number = kept, flying
                kept -= bytes_of[stage, chunk, 2]
                moment = kept + bytes_of[stage, chunk, 8] + bytes_of[stage, chunk, 7]
                if not seen[stage, chunk]:
                    moment += bytes_of[stage, chunk, 3]
                flying -= 1
            else:
                peak = bytes_of[stage, chunk, 5 if kind == 2 or seen[stage, chunk] else 6]
                there, number = kept, flying
                kept -= size
                moment = kept + peak
                if kind == 1:
                    flying -= 1
                else:  # the gradients of the parameters come later
                    kept += bytes_of[stage, chunk, 2]
                    if kept + bytes_of[stage, chunk, 7] > moment:
                        moment, there = kept + bytes_of[stage, chunk, 7], kept
            moment += gathered - bytes_of[stage, chunk, 7]  # the chunk's own bytes are included in its peaks
            if len(moments):
                moments[at] = moment + grown
            if moment + grown > out[stage, 0]:
                out[stage, 0] = moment + grown
                out[stage, 1], out[stage, 2] = min(there, moment), grown
                out[stage, 3], out[stage, 4] = number, kind
            if (kind == 1 or kind == 3) and not seen[stage, chunk]:
                seen[stage, chunk] = True
                grown += bytes_of[stage, chunk, 3]
