"""The record of a search: evaluated strategies, and claims by processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from stepsight.experiments.search.grid import Grid

Seconds = tuple[float, float, float]  # predicted iteration time, low and high end of its interval
Choose = Callable[[int], Sequence[int]]  # chooses at most this many of the remaining strategies


class Found(NamedTuple):
    """The evaluation of a strategy.

    Attributes:
        strategy: Its number in the grid.
        seconds: None if it does not fit in memory.
        excess_bytes: Memory that it needs beyond what a device has; negative if it fits.
    """

    strategy: int
    seconds: Seconds | None
    excess_bytes: float


class Record(Protocol):
    """Evaluated strategies of a search, and claims by processes.

    Attributes:
        done: Strategies that are evaluated, by number in the grid; None where one does not fit in memory.
    """

    done: dict[int, Seconds | None]

    def claim(self, total: int, choose: Choose, most: int) -> list[int]:
        """Claim strategies that are neither evaluated nor claimed; empty: none is left."""

    def finish(self, found: Sequence[Found]) -> None:
        """Record the evaluations of claimed strategies."""

    def give_up(self) -> None:
        """Release claimed strategies that could not be evaluated."""

    def close(self) -> None:
        """Close the connections to a storage."""


class Memory:
    """The record of a search with a single process."""

    def __init__(self, grid: Grid) -> None:
        self.done: dict[int, Seconds | None] = {}
        self._grid = grid

    def claim(self, total: int, choose: Choose, most: int) -> list[int]:
        """See ``Record.claim``."""
        room = min(most, total - len(self.done))
        return list(choose(room)) if room > 0 else []

    def finish(self, found: Sequence[Found]) -> None:
        """See ``Record.finish``."""
        for one in found:
            self.done[one.strategy] = one.seconds
            self._grid.left[one.strategy] = False

    def give_up(self) -> None:
        """See ``Record.give_up``; there are no other processes."""

    def close(self) -> None:
        """See ``Record.close``; nothing is open."""
