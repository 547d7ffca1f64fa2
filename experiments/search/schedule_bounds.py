"""Common properties of all schedules of a kind: placement of parts, fill and drain, micro-batches in flight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepsight.simulator.clock.engine import Floats

WHOLE = ("gpipe", "1f1b", "looped-bfs")  # schedules that run each backward without splitting it
LOOPED = (*WHOLE, "zb-h1", "interleaved-zb")  # part i of the model lies on stage i % pp
VEE = ("zbv", "dualpipev")  # parts go to the last stage and back


def is_split(schedule: str) -> bool:
    """Whether a schedule may split the gradients of input and weights; a user's schedule may."""
    return schedule not in WHOLE


def placement_of(schedule: str, stages: int) -> str:
    """``loop``, ``vee``, or ``any``: the placement of the model's parts."""
    return "loop" if stages == 1 or schedule in LOOPED else "vee" if schedule in VEE else "any"


def stage_sums(parts: Floats, placement: str, stages: int) -> Floats:
    """Sums over the parts of each stage.

    Args:
        parts: Of each part of the model, shape ``(..., num_parts)``.
        placement: From ``placement_of``; ``any`` gives every stage the mean, which the fullest has at least.
        stages: Number of stages.

    Returns:
        Shape ``(..., stages)``.
    """
    if placement == "loop":
        return np.asarray(parts.reshape(*parts.shape[:-1], -1, stages).sum(axis=-2))
    if placement == "vee":
        return np.asarray(parts[..., :stages] + parts[..., : stages - 1 : -1])
    mean = parts.sum(axis=-1, keepdims=True) / stages
    return np.repeat(mean, stages, axis=-1)


def stage_times(placement: str, stages: int, micro_batches: Floats, passes: tuple[Floats, Floats, Floats]) -> Floats:
    """Lower bound of the time when each stage has run its last backward.

    Nothing runs on a stage before one micro-batch came through all stages before it.  After its last gradient of an
    input, the micro-batch goes back through these stages; only gradients of weights may be left to run beside that.

    Args:
        placement: From ``placement_of``.
        stages: Number of stages.
        micro_batches: Of an iteration; broadcast against the others without their last axis.
        passes: The least seconds of each part for a forward, for the gradient of the input, and for a whole backward;
            shape ``(..., num_parts)``.

    Returns:
        Shape ``(..., stages)``.
    """
    forward, to_input, backward = passes
    many = micro_batches[..., None]
    ahead = stage_sums(forward, placement, stages)
    busy = ahead + stage_sums(backward, placement, stages)
    if placement == "any" or stages == 1:
        return np.asarray(many * busy)
    fill, drain = np.zeros_like(ahead), np.zeros_like(ahead)
    fill[..., 1:] = forward[..., : stages - 1].cumsum(axis=-1)
    drain[..., 1:] = to_input[..., : stages - 1].cumsum(axis=-1)
    back = ahead + stage_sums(to_input, placement, stages)
    return np.asarray(fill + np.maximum(many * busy, many * back + drain))


def in_flight(schedule: str, stages: int, micro_batches: int, chunks: int) -> NDArray[np.float64]:
    """Least number of micro-batches of each chunk that a stage keeps at its peak; shape ``(stages, chunks)``."""
    stage, total = np.arange(stages), micro_batches * chunks
    if schedule not in LOOPED or stages == 1:
        first = np.zeros((stages, chunks))
        first[:, 0] = 1.0
        return first if stages > 1 else np.ones((1, chunks))
    in_round = micro_batches if chunks == 1 else micro_batches // max(1, micro_batches // stages)
    if schedule in ("gpipe", "looped-bfs"):
        return np.full((stages, chunks), float(micro_batches))
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = (2 if schedule == "1f1b" else 1) * ahead + (chunks - 1) * in_round
    passes = np.minimum(ahead + 1, total)  # forwards before the first backward
    chunk_of = np.arange(total) // in_round % chunks
    return np.array([np.bincount(chunk_of[:count], minlength=chunks) for count in passes], dtype=np.float64)
