"""Pipeline schedules as data: for every stage the order in which it runs its actions.

One format for all: an array of rows ``(kind, micro_batch, chunk)`` per stage.  A chunk is one of the stage's virtual
stages; ``placement`` says which stage and chunk hold the model's n-th part.

A schedule is declared once, as a ``ScheduleKind``: a built-in one in the table of its module, a user's with
``register_schedule`` or with an entry point of the group ``stepsight.schedules``.
"""

from collections.abc import Callable

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.registry import Registry, instance_of
from stepsight.dataset.schedules.base import Schedule, ScheduleKind
from stepsight.dataset.schedules.single import LOOPED_SCHEDULES
from stepsight.dataset.schedules.vee import V_SCHEDULES

SCHEDULES: Registry[ScheduleKind] = Registry(
    "schedule",
    {**LOOPED_SCHEDULES, **V_SCHEDULES},
    group="stepsight.schedules",
    check=instance_of(ScheduleKind),
    error=JobError,
    more="a .csv file of actions",
)


def register_schedule(
    name: str,
    make: Callable[[int, int, int], Schedule],
    *,
    virtual_stages: tuple[int, int] = (1, 1),
    doc: str = "",
) -> ScheduleKind:
    """Let jobs name a schedule of your own: ``parallel.schedule = "<name>"``.

    Check it with ``stepsight.testing.ScheduleContract``.

    Args:
        name: Not taken yet.
        make, virtual_stages, doc: See ``ScheduleKind``.

    Returns:
        The kind, as ``SCHEDULES[name]`` gives it.

    Raises:
        JobError: If the name is taken, or the kind is not valid.
    """
    return SCHEDULES.register(name, ScheduleKind(make, virtual_stages, doc))
