"""Schedules by name."""

from __future__ import annotations

from stepsight.dataset.caching import cached
from stepsight.dataset.errors import JobError
from stepsight.dataset.specs import SCHEDULES
from stepsight.simulator.schedules.base import Schedule
from stepsight.simulator.schedules.single import alternate, gpipe, interleaved_zb, looped_bfs, one_f_one_b, zb_h1
from stepsight.simulator.schedules.vee import dualpipev, zbv

SCHEDULE_NAMES = tuple(SCHEDULES)


@cached(256)
def find_schedule(name: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """The schedule of that name; with a single stage every micro-batch runs forward and backward in turn.

    Raises:
        JobError: If there is none of that name, or it does not allow these numbers.
    """
    if name not in SCHEDULES:
        raise JobError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r:.80}")
    if num_stages == 1:
        return alternate(num_micro_batches, virtual_stages, name)
    fewest, most = SCHEDULES[name]
    if not fewest <= virtual_stages <= most:
        allowed = f"= {fewest}" if fewest == most else f"from {fewest} to {most}"
        raise JobError(f"schedule {name} has virtual_stages {allowed}, got {virtual_stages}")
    match name:
        case "gpipe":
            return gpipe(num_stages, num_micro_batches)
        case "1f1b":
            return one_f_one_b(num_stages, num_micro_batches, virtual_stages)
        case "looped-bfs":
            return looped_bfs(num_stages, num_micro_batches, virtual_stages)
        case "zb-h1":
            return zb_h1(num_stages, num_micro_batches)
        case "interleaved-zb":
            return interleaved_zb(num_stages, num_micro_batches, virtual_stages)
        case "zbv":
            return zbv(num_stages, num_micro_batches)
        case _:
            return dualpipev(num_stages, num_micro_batches)
