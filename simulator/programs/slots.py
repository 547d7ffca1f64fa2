"""Slots: placeholders for passages and collectives in a plan of events, which the work of one rank fills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepsight.simulator.programs.segment import Segment

TWICE = "_twice"
ROOT = -1  # replaces a unit's index: the units that FSDP wraps with the model itself


class Slot(NamedTuple):
    """A placeholder for a passage or a collective.

    Attributes:
        what: ``run`` (a unit's own passage); ``copy_in``, ``copy_out`` and ``gather`` of its parameters, with ``TWICE``
            where recomputation and backward each gather; ``grad_in``, ``grad_lists``, ``reduce`` and ``add`` of its
            gradients.
        unit: Index of the unit, or ``ROOT``.
        expert: Whether it is for experts' parameters.
        second: Of two collectives that sum gradients, whether it is the one between hybrid shards.
        num_nodes: Of a passage.
    """

    what: str
    unit: int
    expert: bool = False
    second: bool = False
    num_nodes: int = 1


class UnitPattern(NamedTuple):
    """The properties of a unit that the events of a segment depend on.

    Attributes:
        number: Position of the unit in its part.
        name, first, times, root: As in ``Unit``.
        num_nodes: Of its passage.
        loss_nodes: Of these, the first that belong to the head's loss.
        tensors: Number of its parameter tensors, of others and of experts.
        numel, expert_numel: Whether it has parameters at all, others' and experts'.
    """

    number: int
    name: str
    first: int
    times: int
    root: bool
    num_nodes: int
    loss_nodes: int
    tensors: tuple[int, int]
    numel: bool
    expert_numel: bool

    @property
    def run(self) -> Slot:
        """The slot of its own passage."""
        return Slot("run", self.number, num_nodes=self.num_nodes)


@dataclass(frozen=True, eq=False)
class Plan:
    """A segment with slots instead of work.

    Attributes:
        segment: Its ``passages`` and ``sent`` are slots.
    """

    segment: Segment

    def filled(self, work: Callable[[Slot], Any]) -> Segment:
        """The segment of one rank.

        Args:
            work: The passage or the collective of a slot.
        """
        own = self.segment
        return Segment(
            own.label,
            tuple([work(slot) for slot in own.passages]),  # type: ignore[arg-type]
            tuple([work(slot) for slot in own.sent]),  # type: ignore[arg-type]
            own.events,
            own.names,
            own.compute_share,
            own.joined,
        )
