"""The legal strategies of a job, for a user's own Optuna study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.job.job import Job, JobLike
from stepsight.experiments.search.bounds import Bounds, grid_bounds
from stepsight.experiments.search.grid import Grid
from stepsight.experiments.search.space import Space
from stepsight.training.predictor.prediction import predict

if TYPE_CHECKING:
    import optuna

    from stepsight.training.predictor.predictor import Predictor


class LegalStrategies:
    """Suggests legal strategies, so that a study has no illegal trials.

    A trial has a parameter ``layout`` (the parallel degrees) and one for each further choice.

    Args:
        job: A ``Job``, the tables of one, or the path of a job file.
        space: Choices to try: a ``Space``, or what ``Space.of`` takes.
        predictor: As in ``predict``.

    Raises:
        JobError: If the job cannot be predicted, or has no legal strategy.

    Example:
        >>> strategies = LegalStrategies("examples/gpt3-175b-1024.toml")  # doctest: +SKIP
        >>> study.optimize(strategies.objective, n_trials=100)  # doctest: +SKIP
    """

    def __init__(
        self, job: JobLike, space: Space | dict[str, Any] | str | None = None, predictor: Predictor | str | None = None
    ) -> None:
        self._given = predict(job, predictor)
        self._predictor = predictor
        self._grid = Grid(self._given.job, Space.of(space))
        self._bounds: Bounds | None = None

    def __len__(self) -> int:
        return len(self._grid)

    @property
    def bounds(self) -> Bounds:
        """Lower bounds of every strategy, in seconds and in bytes."""
        if self._bounds is None:
            timer, hardware = self._given.simulation.timer, self._given.simulation.hardware
            self._bounds = grid_bounds(self._grid, timer, hardware, self._given.predictor)
        return self._bounds

    def suggest(self, trial: optuna.Trial) -> Job:
        """The job in the strategy that a trial's sampler chooses."""
        return self._grid.strategy(self._grid.suggest(trial))

    def enqueue(self, study: optuna.Study, most: int = 100) -> int:
        """Queue the strategies with the least time bounds that may fit in memory; the study evaluates them first.

        Returns:
            How many were queued that the study did not have.
        """
        order = np.argsort(self.bounds.seconds, kind="stable")
        chosen = order[self.bounds.may_fit[order]][:most].tolist()
        before = len(study.get_trials(deepcopy=False))
        for index in chosen:
            study.enqueue_trial(self._grid.params(index), skip_if_exists=True)
        return len(study.get_trials(deepcopy=False)) - before

    def objective(self, trial: optuna.Trial) -> float:
        """Predicted iteration time of a trial's strategy, in seconds, with memory as a constraint.

        A strategy whose bound is above the best value of the study is pruned without asking for its time.

        Raises:
            optuna.TrialPruned: If the strategy cannot be the best.
        """
        import optuna

        index = self._grid.suggest(trial)
        if self.bounds.seconds[index] > _best(trial.study):
            trial.set_user_attr("bound_s", float(self.bounds.seconds[index]))
            raise optuna.TrialPruned
        prediction = predict(self._grid.strategy(index), self._predictor)
        memory = prediction.memory
        trial.set_constraint("memory", memory.peak_bytes - memory.capacity_bytes)
        trial.set_user_attr("interval_s", [prediction.low_s, prediction.high_s])
        return prediction.iteration_time_s


def _best(study: optuna.Study) -> float:
    """The least value of the trials that satisfy the constraint; infinite if there is none."""
    try:
        return float(study.best_value)
    except ValueError:
        return float("inf")
