"""Schedules by name."""

from __future__ import annotations

from stepsight.dataset.base.caching import cached
from stepsight.dataset.schedules import SCHEDULES
from stepsight.dataset.schedules.base import Schedule
from stepsight.dataset.schedules.single import alternate


@cached(256)
def find_schedule(name: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Find the schedule of that name; with a single stage, forward and backward of every micro-batch alternate.

    Raises:
        JobError: If there is none of that name, or it does not allow these numbers.
    """
    kind = SCHEDULES[name]
    if num_stages == 1:
        return alternate(num_micro_batches, virtual_stages, name)
    return kind.build(name, num_stages, num_micro_batches, virtual_stages)
