"""FSDP's all-gathers of parameters as events; each unit is gathered some units before its use."""

from __future__ import annotations

from collections.abc import Sequence

from stepsight.simulator.clock.codes import DATA, SECOND
from stepsight.simulator.programs.replicas import Replicas
from stepsight.simulator.programs.segment import SegmentBuilder
from stepsight.simulator.programs.slots import TWICE, Slot, UnitPattern


class Gathers:
    """FSDP's all-gathers of parameters; if they overlap, they run some units ahead of the computation.

    Args:
        builder: Where to.
        replicas: Who shares.
        units: What is gathered, in the order of use, each with its number; equal units are one object.
        ahead: Whether the next unit is asked for early even where that hides nothing (backward on CPU).
        early: Whether all are on their way before the computation begins (parameters that stay, once an iteration).
        twice: Whether recomputation and backward each gather what they use.
    """

    def __init__(
        self,
        builder: SegmentBuilder,
        replicas: Replicas,
        units: Sequence[tuple[UnitPattern, int]],
        *,
        ahead: bool,
        early: bool = False,
        twice: bool = False,
    ) -> None:
        self._builder = builder
        self._replicas = replicas
        self._units = units
        self._early = early and replicas.beside
        self._suffix = TWICE if twice else ""
        self._ahead = replicas.gathering.prefetch if ahead or replicas.beside else 0
        self._asked = self._used = 0
        self._steady = 0  # consecutive units with the same events
        self._flying: list[tuple[int, ...]] = []  # events of gathers whose unit has not been used yet

    def ask(self) -> None:
        """Start the all-gathers of the next units."""
        while self._asked < len(self._units) and len(self._flying) < self._ahead:
            self._issue()

    def arrive(self) -> None:
        """Wait for the oldest gathered unit, and copy it out into parameters."""
        again = self._used > 0 and self._units[self._used][0] is self._units[self._used - 1][0]
        self._steady = self._steady + 1 if again and len(self._flying) == self._ahead else 0
        if not self._flying:
            self._issue()
        for event in self._flying.pop(0):
            self._builder.wait(event)
        unit, number = self._units[self._used]
        self._used += 1
        self._builder.run(Slot(f"copy_out{self._suffix}", unit.number), unit.name, number)

    def alike(self) -> int:
        """Count the next units that have the same events as the last one: the same sizes waited for and gathered."""
        if self._steady <= self._ahead or len(self._flying) < self._ahead:
            return 0  # the gather that it waited for was started by a unit of another kind
        units, used, asked, count = self._units, self._used, self._asked, 0
        while asked + count < len(units):
            if units[used + count][0] is not units[used - 1][0] or units[asked + count][0] is not units[used - 1][0]:
                break
            count += 1
        return count

    def skip(self, count: int, shift: int) -> None:
        """Record that the events of the last unit were repeated ``count`` times, which shifted events by ``shift``."""
        self._used += count
        self._asked += count
        self._flying = [tuple(event + shift for event in events) for events in self._flying]

    def _issue(self) -> None:
        (unit, number), groups = self._units[self._asked], self._replicas.groups
        self._asked += 1
        gathering = self._replicas.gathering
        nodes = 3 if gathering.lists else 1 + gathering.casts  # lists: with the whole tensor, and the host's list work
        self._builder.run(Slot(f"copy_in{self._suffix}", unit.number, num_nodes=nodes), unit.name, number)
        events = []
        for group, there, clock in ((groups.shard, unit.numel, DATA), (groups.experts, unit.expert_numel, SECOND)):
            if not there or group.size == 1:
                continue
            gather = Slot(f"gather{self._suffix}", unit.number, clock == SECOND)
            name = f"{unit.name}.parameters"
            if self._replicas.beside:
                events.append(self._builder.send(gather, clock, name, number, early=self._early))
            else:
                self._builder.block(gather, clock, name, number)
        self._flying.append(tuple(events))
