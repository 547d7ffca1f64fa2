"""The search of one job: predicts strategies of its grid until the best is proved, or a limit is reached."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.files import digest
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.bounds import Bounds, grid_bounds
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.experiments.search.choosers import BestFirst, InOrder, Tpe
from stepsight.experiments.search.expert_loads import ExpertLoads
from stepsight.experiments.search.grid import Grid
from stepsight.experiments.search.mapped import MapFn, ask_mapped
from stepsight.experiments.search.objectives import REGRET, Goal
from stepsight.experiments.search.record import Choose, Found, Memory, Record, Seconds
from stepsight.experiments.search.risk import MOST_RIVALS, by_expected_regret, find_rivals
from stepsight.experiments.search.settings import SearchSettings
from stepsight.experiments.search.space import Space
from stepsight.experiments.search.strategies import VARIED
from stepsight.simulator.memory import estimate_memory
from stepsight.training.predictor.ask_many import ask_many
from stepsight.training.predictor.prediction import Prediction, predict

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

TRIALS = 200  # of samplers, which would never stop
FEWEST, MOST = 32, 1024  # strategies predicted together: with more, some predictions are unnecessary
FEWEST_MAPPED, MOST_MAPPED = 512, 16384  # the same if other processes predict them
OnTrial = Callable[[int, float | None], None]


@dataclass(frozen=True, kw_only=True)
class Manner(SearchSettings):
    """Everything that a search is told; attributes as the arguments of ``search``.

    Raises:
        StepsightError: If a value is not allowed.
    """

    space: Space = field(default_factory=Space)
    goal: Goal = field(default_factory=Goal)
    on_trial: OnTrial | None = None
    map_fn: MapFn | None = None
    expert_loads: ExpertLoads | None = None

    @property
    def sought(self) -> int:
        """Number of best strategies to find and prove: ``top``, or all whose regrets are compared."""
        return max(self.top, 1 + MOST_RIVALS) if self.goal.robust == REGRET else self.top

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.goal, Goal):
            raise StepsightError(f"goal must be a Goal, for example Goal(objective='cost'), got {self.goal!r:.80}")
        if self.map_fn is not None and not callable(self.map_fn):
            raise StepsightError(f"map_fn must be a function such as Executor.map, got {self.map_fn!r:.80}")


def search_job(job: Job, predictor: Predictor | str | None, manner: Manner) -> SearchResult:
    """Search the strategies of one job on one cluster.

    Raises:
        JobError: If the job cannot be predicted, or no legal strategy exists.
        StepsightError: If the stored study answers another question.
    """
    loads = manner.expert_loads
    if loads is not None:
        loads.check(job)
        job = loads.apply(job)
    given = predict(job, predictor)  # an invalid job is an error before a study begins
    manner.goal.scale(job)
    grid = Grid(job, manner.space, loads)
    engine = _Engine(grid, given, predictor, manner)
    with closing(_record(grid, _question(job, given.source, grid.space, loads), manner)) as record:
        choose = engine.chooser(record)
        by_chance = manner.sampler in ("tpe", "random")
        total = min(len(grid), manner.trials or (TRIALS if by_chance else len(grid)))
        until = math.inf if manner.timeout_s is None else time.monotonic() + manner.timeout_s
        most, limit = (FEWEST, MOST) if manner.map_fn is None else (FEWEST_MAPPED, MOST_MAPPED)
        most = 1 if manner.sampler == "tpe" else most
        while time.monotonic() < until and (claimed := record.claim(total, choose, most)):
            engine.evaluate(claimed, record)
            most = min(2 * most, limit) if most > 1 else 1
        return engine.result(record.done)


def _record(grid: Grid, question: str, manner: Manner) -> Record:
    """The record of a search's evaluations: Optuna is used only if a storage or sampler needs it."""
    if manner.storage is None and manner.sampler != "tpe":
        return Memory(grid)
    import optuna

    from stepsight.experiments.search.shared_study import SharedStudy

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return SharedStudy(manner.storage, manner.study_name, question, grid)


def _question(job: Job, source: str, space: Space, loads: ExpertLoads | None = None) -> str:
    """Identity of a study's question: its trials are valid for no other."""
    batch, parallel = replace(job.batch, micro_batch=1), {**asdict(job.parallel), **dict.fromkeys(VARIED)}
    more = () if loads is None else (repr(loads),)
    return digest(
        "3", repr((job.model, batch, job.optimizer, job.cluster, job.framework, parallel, space)), source, *more
    )


class _Engine:
    """Predicts the strategies of a grid, and tracks what this process has predicted."""

    def __init__(self, grid: Grid, given: Prediction, predictor: Predictor | str | None, manner: Manner) -> None:
        self._ask_one = lambda job: predict(job, predictor)
        self.own = Choice.of(given, self._ask_one)
        self.first = grid.find(given.job)  # index of the job's own strategy; None if it is not in the space
        self._grid, self._predictor, self._goal, self._manner = grid, predictor, manner.goal, manner
        self._given = given
        self._shortest = [manner.goal.judged(self.own.timed)] if self.own.fits else []  # of the best strategies
        self._known: dict[int, Choice] = {} if self.first is None else {self.first: self.own}
        self._bounds: Bounds | None = None
        self._seen = 0  # strategies of the record that are in ``_shortest``

    def chooser(self, record: Record) -> Choose:
        """The next strategies to predict."""
        sampler, seed = self._manner.sampler, self._manner.seed
        if sampler == "auto":
            return BestFirst(self._grid, self.bounds, self.first, lambda: self._to_beat(record.done))
        if sampler == "tpe":
            from stepsight.experiments.search.shared_study import SharedStudy

            assert isinstance(record, SharedStudy)
            self._grid.shuffle(seed)
            return Tpe(self._grid, record, seed, self.first)
        order = np.arange(len(self._grid))
        shuffled = np.random.default_rng(seed).permutation(len(self._grid)) if sampler == "random" else order
        return InOrder(self._grid, shuffled, self.first)

    def _to_beat(self, done: dict[int, Seconds | None]) -> float:
        """The value that a bound must be below to be worth predicting."""
        self._learn(done)
        known, wanted = self._shortest, self._manner.sought
        return known[wanted - 1] / (1.0 + self._manner.gap / 100.0) if len(known) >= wanted else math.inf

    @property
    def bounds(self) -> Bounds:
        """Lower bounds of all strategies."""
        if self._bounds is None:
            given = self._given
            timer, hardware = given.simulation.timer, given.simulation.hardware
            self._bounds = grid_bounds(self._grid, timer, hardware, given.predictor)
        return self._bounds

    def shortest(self, done: dict[int, Seconds | None]) -> float:
        """Smallest relevant seconds of all strategies that fit."""
        self._learn(done)
        return self._shortest[0] if self._shortest else math.inf

    def _learn(self, done: dict[int, Seconds | None]) -> None:
        """Add the new times of a record."""
        for index, seconds in list(done.items())[self._seen :]:
            if seconds is not None and (index != self.first or not self.own.fits):
                bisect.insort(self._shortest, self._goal.judged(seconds))
                del self._shortest[self._manner.sought :]
        self._seen = len(done)

    def evaluate(self, claimed: list[int], record: Record) -> None:
        """Evaluate strategies that this process claimed; release them if that fails."""
        before = len(record.done)
        try:
            choices = self._asked(claimed)
        except BaseException:
            record.give_up()
            raise
        record.finish(
            [
                Found(index, choice.seconds if choice.fits else None, choice.peak_bytes - choice.capacity_bytes)
                for index, choice in zip(claimed, choices, strict=True)
            ]
        )
        shortest = self.shortest(record.done)
        on_trial = self._manner.on_trial
        for number in range(len(claimed)):
            if on_trial is not None:
                on_trial(before + number, None if math.isinf(shortest) else shortest)

    def _asked(self, indices: list[int]) -> list[Choice]:
        """Choices of strategies."""
        new = [index for index in indices if index not in self._known]
        jobs = [self._grid.strategy(index) for index in new]
        if jobs:
            map_fn = self._manner.map_fn
            if map_fn is None:
                answers = ask_many(jobs, self._predictor, only_fitting=True)
            else:
                answers = ask_mapped(jobs, self._predictor, map_fn)
            for index, job, (time_s, low_s, high_s, peak, capacity) in zip(
                new, jobs, np.array(answers).T.tolist(), strict=True
            ):
                seconds = (time_s, low_s, high_s) if peak <= capacity else None
                self._known[index] = Choice(job, peak, capacity, seconds, self._ask_one)
        return [self._known[index] for index in indices]

    def result(self, done: dict[int, Seconds | None]) -> SearchResult:
        """All strategies of a study; those that other processes evaluated are predicted on request."""
        elsewhere = [index for index in done if index not in self._known]
        choices = [self._known[index] for index in done if index in self._known]
        choices += [self._elsewhere(index, done[index]) for index in elsewhere]
        if self.own.fits and self.first not in done:
            choices.append(self.own)
        if not any(choice.fits for choice in choices):
            choices += self._smallest(choices, done)
        ranked = sorted(choices, key=lambda choice: choice.rank(self._goal))
        ranked, regrets = by_expected_regret(ranked) if self._goal.robust == REGRET else (ranked, ())
        rivals = find_rivals(ranked) if self._goal.robust else ()
        gap_percent, undecided = self._proof(done)
        if regrets and gap_percent is not None:  # the strategy with the least regret may not be the fastest
            gap_percent = max(
                0.0, 100.0 * ((1.0 + gap_percent / 100.0) * ranked[0].timed[0] / self.shortest(done) - 1.0)
            )
        return SearchResult(
            ranked,
            len(done),
            len(self._grid),
            self.own,
            gap_percent,
            undecided,
            rivals=rivals,
            regrets=regrets,
            goal=self._goal,
            expert_loads=self._manner.expert_loads,
        )

    def _smallest(self, choices: list[Choice], done: dict[int, Seconds | None]) -> list[Choice]:
        """The strategy that needs the least memory, if none fits; empty if it was evaluated, or some may fit."""
        bounds, left = self.bounds.peak_bytes, np.ones(len(self._grid), dtype=np.bool_)
        left[list(done)] = False
        if (self.bounds.may_fit & left).any():
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
        memory = estimate_memory(self._grid.strategy(index), self._given.simulation.hardware)
        return Choice(self._grid.strategy(index), memory.peak_bytes, memory.capacity_bytes, seconds, self._ask_one)

    def _proof(self, done: dict[int, Seconds | None]) -> tuple[float | None, int]:
        """Upper limit of how much longer than the optimum the best takes, in percent; and how many others may be
        better.
        """
        best = self.shortest(done)
        left = np.ones(len(self._grid), dtype=np.bool_)
        left[list(done)] = False
        if not left.any():
            return (None if math.isinf(best) else 0.0), 0
        bounds_s = self.bounds.seconds[left & self.bounds.may_fit]
        undecided = int(np.count_nonzero(bounds_s < best))
        least = float(bounds_s.min(initial=math.inf))
        if math.isinf(best) or least <= 0:
            return None, undecided
        return max(0.0, 100.0 * (best / least - 1.0)), undecided
