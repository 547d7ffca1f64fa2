"""The record of a search: what is evaluated, and who evaluates what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from stepsight.experiments.search.grid import Grid

Seconds = tuple[float, float, float]  # predicted iteration time, low and high end of its interval
Choose = Callable[[int], Sequence[int]]  # chooses so many strategies that are left in the grid, at most


class Found(NamedTuple):
    """What was found of a strategy.

    Attributes:
        strategy: Its number in the grid.
        seconds: None if it does not fit in memory.
        excess_bytes: Memory that it needs beyond what a device has; negative if it fits.
    """

    strategy: int
    seconds: Seconds | None
    excess_bytes: float


class Record(Protocol):
    """What a search has evaluated, and who evaluates what.

    Attributes:
        done: Strategies that are evaluated, by number in the grid; None where one does not fit in memory.
    """

    done: dict[int, Seconds | None]

    def claim(self, total: int, choose: Choose, most: int) -> list[int]:
        """Claim strategies that are neither evaluated nor claimed; empty: nothing is left to do."""

    def finish(self, found: Sequence[Found]) -> None:
        """Record what was found of strategies that were claimed."""

    def give_up(self) -> None:
        """Free strategies that were claimed and could not be evaluated."""

    def close(self) -> None:
        """End the connections to a storage."""


class Memory:
    """The record of a search with a single process."""

    def __init__(self, grid: Grid) -> None:
        self.done: dict[int, Seconds | None] = {}
        self._grid = grid

    def claim(self, total: int, choose: Choose, most: int) -> list[int]:
        """As ``Record.claim``."""
        room = min(most, total - len(self.done))
        return list(choose(room)) if room > 0 else []

    def finish(self, found: Sequence[Found]) -> None:
        """As ``Record.finish``."""
        for one in found:
            self.done[one.strategy] = one.seconds
            self._grid.left[one.strategy] = False

    def give_up(self) -> None:
        """As ``Record.give_up``: nobody waits for them."""

    def close(self) -> None:
        """As ``Record.close``: nothing is open."""
