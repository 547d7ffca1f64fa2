"""Order in which strategies are predicted: by the least bound, in a fixed order, or by a sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepsight.experiments.search.bounds import Bounds
from stepsight.experiments.search.grid import Grid

if TYPE_CHECKING:
    from stepsight.experiments.search.shared_study import SharedStudy

Ints = NDArray[np.int64]


class BestFirst:
    """Chooses the strategy with the least bound, until no bound is below the best time.

    Args:
        grid: The strategies.
        bounds: Of the strategies.
        first: Chosen before all others; None: nothing is.
        to_beat: Returns the seconds that a bound must be below to be worth asking about.
    """

    def __init__(self, grid: Grid, bounds: Bounds, first: int | None, to_beat: Callable[[], float]) -> None:
        may = np.flatnonzero(bounds.may_fit)
        self._order: Ints = may[np.argsort(bounds.seconds[may], kind="stable")]
        self._grid, self._bounds, self._first, self._to_beat = grid, bounds, first, to_beat

    def __call__(self, count: int) -> Sequence[int]:
        if self._first is not None and self._grid.left[self._first]:
            return [self._first]
        return list(map(int, self.waiting()[:count]))

    def waiting(self) -> Ints:
        """Remaining strategies worth predicting, the least bound first."""
        end = int(np.searchsorted(self._bounds.seconds[self._order], self._to_beat()))
        ahead = self._order[:end]
        return ahead[self._grid.left[ahead]]


class InOrder:
    """Chooses strategies in a fixed order.

    Args:
        grid: The strategies.
        order: Numbers of all of them.
        first: Chosen before all others; None: nothing is.
    """

    def __init__(self, grid: Grid, order: Ints, first: int | None) -> None:
        self._grid, self._first = grid, first
        self._order = order if first is None else np.concatenate([[first], order[order != first]])

    def __call__(self, count: int) -> Sequence[int]:
        found = self._order[self._grid.left[self._order]]
        return list(map(int, found[:count]))


class Tpe:
    """Optuna's TPE sampler on the evaluated strategies of a study.

    Args:
        grid: The strategies.
        study: What was evaluated.
        seed: Of the sampler.
        first: Chosen before all others; None: nothing is.
    """

    def __init__(self, grid: Grid, study: SharedStudy, seed: int, first: int | None) -> None:
        import optuna

        self._grid, self._study, self._known, self._first = grid, study, 0, first
        seed += len(study.done)  # a continued study does not repeat its choices
        self._own = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    def __call__(self, count: int) -> Sequence[int]:
        """The sampler's choice, or the nearest remaining one if that was evaluated."""
        import optuna

        if not count or not self._grid.left.any():
            return []
        if self._first is not None and self._grid.left[self._first]:
            return [self._first]
        self._own.add_trials(self._study.finished[self._known :])
        self._known = len(self._study.finished)
        trial = self._own.ask()
        index = self._grid.suggest(trial)
        self._own.tell(trial, state=optuna.trial.TrialState.FAIL)  # samplers learn nothing from these
        return [index if self._grid.left[index] else self._grid.nearest(index)]
