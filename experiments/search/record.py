"""The record of a search: what is evaluated, and who evaluates what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from stepsight.experiments.search.grid import Grid

Seconds = tuple[float, float, float]  # predicted iteration time, low and high end of its interval
Claim = tuple[int, int]  # number of a trial in the record, and of its strategy in the grid
Found = tuple[Seconds | None, float]  # None: does not fit in memory; bytes needed beyond what a device has
Choose = Callable[[int], Sequence[int]]  # chooses so many strategies that are left in the grid, at most


class Record(Protocol):
    """What a search has evaluated, and who evaluates what.

    Attributes:
        done: Strategies that are evaluated, by number in the grid; None where one does not fit in memory.
    """

    done: dict[int, Seconds | None]

    def claim(self, total: int, choose: Choose, most: int) -> list[Claim]:
        """Claim strategies that nobody has evaluated or claimed; empty: there is nothing left to do."""

    def finish(self, found: Sequence[tuple[Claim, Found]]) -> None:
        """Record what was found of strategies that were claimed."""

    def give_up(self, claims: Sequence[Claim]) -> None:
        """Free strategies that were claimed and could not be evaluated."""

    def close(self) -> None:
        """End the connections to a storage."""


class Memory:
    """The record of a search that nobody else takes part in."""

    def __init__(self, grid: Grid) -> None:
        self.done: dict[int, Seconds | None] = {}
        self._grid = grid

    def claim(self, total: int, choose: Choose, most: int) -> list[Claim]:
        """As ``Record.claim``."""
        room = min(most, total - len(self.done))
        return [(index, index) for index in (choose(room) if room > 0 else ())]

    def finish(self, found: Sequence[tuple[Claim, Found]]) -> None:
        """As ``Record.finish``."""
        for (_, index), (seconds, _) in found:
            self.done[index] = seconds
            self._grid.left[index] = False

    def give_up(self, claims: Sequence[Claim]) -> None:
        """Nobody waits for them."""

    def close(self) -> None:
        """Nothing is open."""
