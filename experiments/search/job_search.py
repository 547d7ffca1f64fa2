"""The search of one job: predicts strategies of its grid until the best is proved, or a limit is reached."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.files import digest
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.bounds import Bounds, grid_bounds
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.experiments.search.expert_loads import ExpertLoads
from stepsight.experiments.search.mapped import MapFn, ask_mapped
from stepsight.experiments.search.risk import MOST_RIVALS, by_expected_regret, find_rivals
from stepsight.experiments.search.settings import REGRET, Goal, SearchSettings, Seconds
from stepsight.experiments.search.space import Space
from stepsight.experiments.search.strategies import VARIED, Grid
from stepsight.experiments.search.study import Evaluations, StoredEvaluations
from stepsight.simulator.memory import estimate_memory
from stepsight.training.prediction.ask_many import ask_many
from stepsight.training.prediction.prediction import Prediction, predict

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

TRIALS = 200  # of samplers, which would never stop
FEWEST, MOST = 32, 1024  # strategies predicted together: with more, some predictions are unnecessary
FEWEST_MAPPED, MOST_MAPPED = 512, 16384  # the same if other processes predict them
Ints = NDArray[np.int64]
OnTrial = Callable[[int, float | None], None]
Choose = Callable[[int], Sequence[int]]  # chooses at most this many of the remaining strategies


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What ``search`` is asked beside the job; attributes as its arguments.

    Raises:
        StepsightError: If a value is not allowed.
    """

    space: Space = field(default_factory=Space)
    goal: Goal = field(default_factory=Goal)
    settings: SearchSettings = field(default_factory=SearchSettings)
    expert_loads: ExpertLoads | None = None
    on_trial: OnTrial | None = None
    map_fn: MapFn | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.goal, Goal):
            raise StepsightError(f"goal must be a Goal, for example Goal(objective='cost'), got {self.goal!r:.80}")
        if self.map_fn is not None and not callable(self.map_fn):
            raise StepsightError(f"map_fn must be a function such as Executor.map, got {self.map_fn!r:.80}")


def search_job(job: Job, predictor: Predictor | str | None, request: SearchRequest) -> SearchResult:
    """Search the strategies of one job on one cluster.

    Raises:
        JobError: If the job cannot be predicted, or no legal strategy exists.
        StepsightError: If the stored study answers another question.
    """
    loads = request.expert_loads
    if loads is not None:
        loads.check(job)
        job = loads.apply(job)
    given = predict(job, predictor)  # an invalid job is an error before a study begins
    request.goal.scale(job)
    grid = Grid(job, request.space, loads)
    question = question_of(job, given.source, grid.space, loads)
    with closing(_evaluations(grid, question, request.settings)) as evaluations:
        search = _JobSearch(grid, given, predictor, request, evaluations)
        search.run()
        return replace(search.result(), expert_loads=loads)


def _evaluations(grid: Grid, question: str, settings: SearchSettings) -> Evaluations:
    """The evaluations of a search: Optuna is used only if a storage or sampler needs it."""
    if settings.storage is None and settings.sampler != "tpe":
        return Evaluations(grid)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return StoredEvaluations(settings.storage, settings.study_name, question, grid)


def question_of(job: Job, source: str, space: Space, loads: ExpertLoads | None = None) -> str:
    """Identity of a study's question: its trials are valid for no other."""
    batch, parallel = replace(job.batch, micro_batch=1), {**asdict(job.parallel), **dict.fromkeys(VARIED)}
    more = () if loads is None else (repr(loads),)
    return digest(
        "3", repr((job.model, batch, job.optimizer, job.cluster, job.framework, parallel, space)), source, *more
    )


class _JobSearch:
    """Chooses and predicts strategies of a grid, and proves how good the best one is."""

    def __init__(
        self,
        grid: Grid,
        given: Prediction,
        predictor: Predictor | str | None,
        request: SearchRequest,
        evaluations: Evaluations,
    ) -> None:
        settings, goal = request.settings, request.goal
        self._ask_one = lambda job: predict(job, predictor)
        self._own = Choice.of(given, self._ask_one)
        self._first = grid.find(given.job)  # index of the job's own strategy; None if it is not in the space
        self._grid, self._given, self._predictor = grid, given, predictor
        self._request, self._settings, self._goal = request, settings, goal
        self._evaluations, self._done = evaluations, evaluations.done
        self._wanted = max(settings.top, 1 + MOST_RIVALS) if goal.robust == REGRET else settings.top
        self._shortest = [goal.judged(self._own.timed)] if self._own.fits else []  # of the ``_wanted`` best strategies
        self._known: dict[int, Choice] = {} if self._first is None else {self._first: self._own}
        self._seen = 0  # strategies of ``_done`` that are in ``_shortest``

    def run(self) -> None:
        """Predict strategies until none is worth it, or a limit is reached."""
        settings, evaluations = self._settings, self._evaluations
        choose = {"auto": self._by_bounds, "tpe": self._by_tpe}.get(settings.sampler, self._in_order)()
        unlimited = len(self._grid) if settings.sampler in ("auto", "enumerate") else TRIALS
        total = min(len(self._grid), settings.trials or unlimited)
        until = math.inf if settings.timeout_s is None else time.monotonic() + settings.timeout_s
        most, limit = (FEWEST, MOST) if self._request.map_fn is None else (FEWEST_MAPPED, MOST_MAPPED)
        most, limit = (1, 1) if settings.sampler == "tpe" else (most, limit)
        while time.monotonic() < until:
            evaluations.read()
            room = min(most, total - len(self._done))
            chosen = list(choose(room)) if room > 0 else []
            if not chosen:
                return
            self._evaluate(chosen)
            most = min(2 * most, limit)

    def _by_bounds(self) -> Choose:
        """The strategies with the least bounds, until no bound is below the best time."""
        bounds, left = self._bounds, self._grid.remaining
        may = np.flatnonzero(bounds.may_fit)
        order: Ints = may[np.argsort(bounds.seconds[may], kind="stable")]
        random = np.random.default_rng()

        def choose(count: int) -> Sequence[int]:
            if own := self._own_first():
                return own
            ahead = order[: int(np.searchsorted(bounds.seconds[order], self._to_beat()))]
            ahead = ahead[left[ahead]]
            # Processes that share a study would all evaluate the same strategies if each took the first.
            start = int(random.integers(max(1, len(ahead) - count + 1))) if self._evaluations.shared else 0
            return list(map(int, ahead[start : start + count]))

        return choose

    def _in_order(self) -> Choose:
        """All strategies in their order, or in a random one."""
        order: Ints = np.arange(len(self._grid))
        if self._settings.sampler == "random":
            order = np.random.default_rng(self._settings.seed).permutation(len(self._grid))
        if self._first is not None:
            order = np.concatenate([[self._first], order[order != self._first]])
        return lambda count: list(map(int, order[self._grid.remaining[order]][:count]))

    def _by_tpe(self) -> Choose:
        """The choice of Optuna's TPE sampler, or the nearest remaining one if that was evaluated."""
        import optuna

        grid, evaluations, seed = self._grid, self._evaluations, self._settings.seed
        assert isinstance(evaluations, StoredEvaluations)
        turn = np.random.default_rng(seed).permutation(len(grid))
        sampler = optuna.samplers.TPESampler(seed=seed + len(self._done))  # a continued study repeats no choices
        study, known = optuna.create_study(sampler=sampler), 0

        def choose(count: int) -> Sequence[int]:
            nonlocal known
            if own := self._own_first():
                return own
            study.add_trials(evaluations.trials[known:])
            known = len(evaluations.trials)
            trial = study.ask()
            index = grid.suggest(trial)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)  # samplers learn nothing from these
            return [index if grid.remaining[index] else grid.nearest(index, turn)]

        return choose

    def _own_first(self) -> list[int]:
        """The job's own strategy until it is evaluated: it is tried before all others."""
        return [self._first] if self._first is not None and self._grid.remaining[self._first] else []

    def _to_beat(self) -> float:
        """The value that a bound must be below to be worth predicting."""
        self._learn()
        known, wanted = self._shortest, self._wanted
        return known[wanted - 1] / (1.0 + self._settings.gap / 100.0) if len(known) >= wanted else math.inf

    @cached_property
    def _bounds(self) -> Bounds:
        """Lower bounds of all strategies."""
        return grid_bounds(self._grid, self._given)

    def _best_s(self) -> float:
        """Smallest relevant seconds of all strategies that fit."""
        self._learn()
        return self._shortest[0] if self._shortest else math.inf

    def _learn(self) -> None:
        """Add the new times."""
        for index, seconds in list(self._done.items())[self._seen :]:
            if seconds is not None and (index != self._first or not self._own.fits):
                bisect.insort(self._shortest, self._goal.judged(seconds))
                del self._shortest[self._wanted :]
        self._seen = len(self._done)

    def _evaluate(self, chosen: list[int]) -> None:
        """Predict strategies and record them."""
        before, map_fn, on_trial = len(self._done), self._request.map_fn, self._request.on_trial
        new = [index for index in chosen if index not in self._known]
        if jobs := [self._grid.strategy(index) for index in new]:
            if map_fn is None:
                answers = ask_many(jobs, self._predictor, only_fitting=True)
            else:
                answers = ask_mapped(jobs, self._predictor, map_fn)
            self._known |= dict(zip(new, Choice.of_answers(jobs, answers, self._ask_one), strict=True))
        self._evaluations.add({index: self._known[index] for index in chosen})
        shortest = self._best_s()
        for number in range(before, before + len(chosen)):
            if on_trial is not None:
                on_trial(number, None if math.isinf(shortest) else shortest)

    def result(self) -> SearchResult:
        """All strategies of a study; those that other processes evaluated are predicted on request."""
        done = self._done
        choices = [self._known[index] for index in done if index in self._known]
        choices += [self._elsewhere(index, seconds) for index, seconds in done.items() if index not in self._known]
        if self._own.fits and self._first not in done:
            choices.append(self._own)
        if not any(choice.fits for choice in choices):
            choices += self._smallest(choices)
        ranked = sorted(choices, key=lambda choice: choice.rank(self._goal))
        ranked, regrets = by_expected_regret(ranked) if self._goal.robust == REGRET else (ranked, ())
        gap_percent, undecided = self._proof()
        if regrets and gap_percent is not None:  # the strategy with the least regret may not be the fastest
            slower = (1.0 + gap_percent / 100.0) * ranked[0].timed[0] / self._best_s()
            gap_percent = max(0.0, 100.0 * (slower - 1.0))
        return SearchResult(
            ranked,
            len(done),
            len(self._grid),
            self._own,
            gap_percent,
            undecided,
            rivals=find_rivals(ranked) if self._goal.robust else (),
            regrets=regrets,
            goal=self._goal,
        )

    def _smallest(self, choices: list[Choice]) -> list[Choice]:
        """The strategy that needs the least memory, if none fits; empty if it was evaluated, or some may fit."""
        bounds, left = self._bounds.peak_bytes, self._grid.remaining
        if (self._bounds.may_fit & left).any():
            return []
        least, found = min((choice.peak_bytes for choice in choices), default=math.inf), []
        order = np.argsort(bounds, kind="stable")
        for index in order[left[order]].tolist():
            if bounds[index] >= least:
                break
            choice = self._elsewhere(index, None)
            if choice.peak_bytes < least:
                least, found = choice.peak_bytes, [choice]
        return found

    def _elsewhere(self, index: int, seconds: Seconds | None) -> Choice:
        """A strategy that this process did not predict."""
        memory = estimate_memory(self._grid.strategy(index), self._given.simulation.hardware)
        return Choice(self._grid.strategy(index), memory.peak_bytes, memory.capacity_bytes, seconds, self._ask_one)

    def _proof(self) -> tuple[float | None, int]:
        """How much longer than the optimum the best takes at most, in percent; and how many others may be better."""
        best, left = self._best_s(), self._grid.remaining
        if not left.any():
            return (None if math.isinf(best) else 0.0), 0
        bounds_s = self._bounds.seconds[left & self._bounds.may_fit]
        undecided = int(np.count_nonzero(bounds_s < best))
        least = float(bounds_s.min(initial=math.inf))
        if math.isinf(best) or least <= 0:
            return None, undecided
        return max(0.0, 100.0 * (best / least - 1.0)), undecided
