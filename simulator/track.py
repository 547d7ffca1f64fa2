"""A schedule as what its ranks do, entry by entry, in one order that can run; worked out once for all jobs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.errors import JobError
from stepsight.simulator.runtimes import asynchronous, find_messages, torch_entries
from stepsight.simulator.schedules import Order, Schedule, find_schedule, order_actions

FIRST, MIDDLE, LAST = range(3)
RUNTIMES = ("asynchronous", "torch")

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Track:
    """Every action of a schedule, the messages between stages, and what ranks do with them.

    Attributes:
        schedule: The order of each stage.
        runtime: Who runs it, one of ``RUNTIMES``.
        stage, kind, micro_batch, part: Of every action, in an order that can run, shape ``(num_actions,)``.
        turn: ``FIRST`` for the first time that a part runs this pass, ``LAST`` for the last time (also if it is the
            first), ``MIDDLE`` between; same shape.  Passes are forwards, split input gradients, and backwards that
            give weight gradients (``B`` and ``W`` together).
        source, target: Actions that make and need each message between stages, shape ``(num_messages,)``.
        entry_op: ``COMPUTE``, ``POST`` or ``WAIT`` (see ``runtimes``), in an order that can run,
            shape ``(num_entries,)``.
        entry_stage: Whose entry it is; same shape.
        entry_index: The action that is computed, or the message that is posted or waited for; same shape.
        entry_side: 0 for the sender's side of a message, 1 for the receiver's; same shape.
    """

    schedule: Schedule
    runtime: str
    stage: Ints
    kind: Ints
    micro_batch: Ints
    part: Ints
    turn: Ints
    source: Ints
    target: Ints
    entry_op: Ints
    entry_stage: Ints
    entry_index: Ints
    entry_side: Ints

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages

    @property
    def num_actions(self) -> int:
        return len(self.stage)

    @property
    def num_messages(self) -> int:
        return len(self.source)


@lru_cache(maxsize=256)
def find_track(
    name: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1, runtime: str = "asynchronous"
) -> Track:
    """The track of a schedule by its name."""
    return track(find_schedule(name, num_stages, num_micro_batches, virtual_stages), runtime)


def track(schedule: Schedule, runtime: str = "asynchronous") -> Track:
    """The track of a schedule.

    Args:
        schedule: What every stage does.
        runtime: ``asynchronous``: an action asks for its message, waits for it, and its result is sent by the way.
            ``torch``: ``torch.distributed.pipelining`` 2.13 over gloo.

    Raises:
        JobError: If the schedule cannot run.
    """
    if runtime not in RUNTIMES:
        raise JobError(f"runtime must be one of {', '.join(RUNTIMES)}, got {runtime!r}")
    order = order_actions(schedule)
    messages = find_messages(order)
    entries = asynchronous(order, messages) if runtime == "asynchronous" else torch_entries(schedule, order, messages)
    return Track(
        schedule, runtime, order.stage, order.kind, order.micro_batch, order.part, _turns(order),
        messages.source, messages.target, entries.op, entries.stage, entries.index, entries.side,
    )  # fmt: skip


def _turns(order: Order) -> Ints:
    group = order.part * 3 + np.array([0, 2, 1, 2], dtype=np.int32)[order.kind]
    numbers = np.arange(len(order))
    first = np.zeros(int(group.max()) + 1, dtype=np.int64)
    last = first.copy()
    first[group[::-1]] = numbers[::-1]  # the last to be written stays
    last[group] = numbers
    turn = np.full(len(order), MIDDLE, dtype=np.int32)
    turn[first[group]] = FIRST
    turn[last[group]] = LAST
    return turn
