"""Pipeline schedules as data: for every stage the order in which it runs its actions.

One format for all: an array of rows ``(kind, micro_batch, chunk)`` per stage.  A chunk is one of the stage's virtual
stages; ``placement`` says which stage and chunk hold the model's n-th part.

A schedule is declared once, as a ``ScheduleKind``: a built-in one in the table of its module, a user's with
``SCHEDULES.register(name, ScheduleKind(make))`` or with an entry point of the group ``stepsight.schedules``.
"""

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.registry import Registry, instance_of
from stepsight.dataset.schedules.schedule import BUILT_IN, Schedule, ScheduleKind, alternate

SCHEDULES: Registry[ScheduleKind] = Registry(
    "schedule",
    BUILT_IN,
    group="stepsight.schedules",
    check=instance_of(ScheduleKind),
    error=JobError,
    more="a .csv file of actions",
)


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
