"""From the end of the pipeline to the end of the iteration: when optimizers start, and which one decides."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stepsight.simulator.clock.codes import HOST, NUM_CLOCKS
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.programs.lower import Lowered


def begin_optimizers(low: Lowered, clocks: Floats) -> Floats:
    """When each stage's optimizer starts, shape ``(num_stages, ...)``: stages of one group wait for the last of them.

    Args:
        low: The job.
        clocks: Of each stage after its last action, shape ``(num_stages, ..., K)``.
    """
    begin: Floats = clocks[..., :NUM_CLOCKS].max(axis=-1)
    latest = np.full(begin.shape, -np.inf)
    np.maximum.at(latest, low.meets, begin)
    return latest[low.meets]


def enter_optimizers(low: Lowered, clocks: Floats, begin: Floats) -> Floats:
    """Clocks of each stage when its optimizer starts, shape of ``clocks``; arguments as in ``begin_optimizers``."""
    entry = clocks.copy()
    entry[..., 0] = begin
    if clocks.shape[-1] > HOST and low.semantics.overlap.reads_norm:  # the host is then no longer ahead
        entry[..., HOST] = np.maximum(entry[..., HOST], begin)
    return entry


class LastSteps(NamedTuple):
    """The end of the critical path of an iteration.

    Attributes:
        stage: Whose optimizer ends last.
        to, since: The clock that it ends on, and the one that the path enters it on.
        pipeline: The one of the distinct pipelines that it waited for.
        before, clock: The stage and the clock of that pipeline that it waited for.
    """

    stage: int
    to: int
    since: int
    pipeline: int
    before: int
    clock: int


def last_steps(low: Lowered, clocks: Floats, entry: Floats, finish: Floats, paths: Floats) -> LastSteps:
    """The optimizer that decides the length of an iteration, and the clock that it waited for.

    Args:
        low: The job.
        clocks: Of each distinct pipeline's stages after their last actions, shape ``(num_pipelines, num_stages, K)``.
        entry: As the optimizers take over, shape ``(num_stages, K)``.
        finish: After them, at least ``NUM_CLOCKS`` of each stage's clocks.
        paths: Through them, shape ``(num_stages, K, K)``.
    """
    stage, to = divmod(int(finish[:, :NUM_CLOCKS].argmax()), NUM_CLOCKS)
    since = int((entry[stage] + paths[stage, to]).argmax())
    if since != 0 and entry[stage, since] == clocks[:, stage, since].max():  # it waited for no other clock
        return LastSteps(stage, to, since, int(clocks[:, stage, since].argmax()), stage, since)
    together = np.flatnonzero(low.meets == low.meets[stage])
    ends = clocks[:, together, :NUM_CLOCKS]
    pipeline, place, clock = (int(at) for at in np.unravel_index(ends.argmax(), ends.shape))
    return LastSteps(stage, to, since, pipeline, int(together[place]), clock)
