"""Search the best legal strategy of a model on a cluster, with a proof, or the best of several clusters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.base.files import digest
from stepsight.dataset.configs.formats import write_config
from stepsight.dataset.job.job import Job, JobLike
from stepsight.experiments.reports.text_table import NotebookBar
from stepsight.experiments.search import sharding
from stepsight.experiments.search.bounds import Bounds, grid_bounds
from stepsight.experiments.search.choices import MOST_RIVALS, Choice, SearchResult, by_expected_regret, find_rivals
from stepsight.experiments.search.settings import REGRET, Goal, Scenarios, SearchSettings, Seconds, Space
from stepsight.experiments.search.sharding import ExpertLoads
from stepsight.experiments.search.strategies import VARIED, Grid, scenario_jobs, strategies
from stepsight.experiments.search.study import Evaluations, MapFn, ask_mapped
from stepsight.simulator.memory import estimate_memory
from stepsight.training.corrections.intervals import seconds_text
from stepsight.training.prediction.ask_many import ask_many
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor

TRIALS = 200  # of samplers, which would never stop
FEWEST, MOST = 32, 1024  # strategies predicted together: with more, some predictions are unnecessary
FEWEST_MAPPED, MOST_MAPPED = 512, 16384  # the same if other processes predict them
MOST_LEGAL = 20_000  # most strategies to check for what a format expresses: some ten seconds
OnTrial = Callable[[int, float | None], None]
Choose = Callable[[int], Sequence[int]]  # chooses at most this many of the remaining strategies


def search(
    job: JobLike,
    predictor: Predictor | str | None = None,
    *,
    space: Space | dict[str, Any] | str | Path | None = None,
    goal: Goal | None = None,
    scenarios: Scenarios | None = None,
    expert_loads: ExpertLoads | str | Path | None = None,
    settings: SearchSettings | None = None,
    on_trial: OnTrial | None = None,
    map_fn: MapFn | None = None,
    **options: Any,
) -> SearchResult:
    """Find the strategy with the shortest predicted iteration that fits in memory.

    Every legal strategy has a lower bound of its time.  Strategies are predicted in the order of their bounds, until no
    bound is below the best time found.  The job's own strategy is included, so ``best`` is never slower than the job.

    Args:
        job: As in ``predict``; everything is kept that the space does not vary: model, global batch, cluster and more.
        predictor: As in ``predict``.
        space: Search space: a ``Space``, or what ``Space.of`` takes; None: ``Space()``.
        goal: Objective; None: the shortest iteration.
        scenarios: Clusters, batches and sequence lengths to compare; None: only those of the job.
        expert_loads: Tokens of each expert, or a CSV file of them: each strategy places its experts by them.
        settings: Limits, sampler and study; None: ``SearchSettings()``.
        on_trial: Called after each strategy with the number before it and the least seconds; None: a bar in notebooks.
        map_fn: A ``map`` function that predicts in other processes, such as ``concurrent.futures.Executor.map``.
        options: Fields of ``SearchSettings``, such as ``trials=200``; they replace those of ``settings``.

    Returns:
        The strategies, best first: ``.best``, ``.gap_percent``, ``.choices``, ``.to_frame()``, ``.to_dict()``.

    Raises:
        JobError: If the job cannot be predicted, or no legal strategy exists.
        StepsightError: If an option has no legal value, or the stored study answers another question.

    Example:
        >>> search("examples/gpt3-175b-1024.toml").best.job.parallel  # doctest: +SKIP
    """
    if scenarios is not None and not isinstance(scenarios, Scenarios):
        raise StepsightError(f"scenarios must be Scenarios, as in Scenarios(nodes=(8, 16)), got {scenarios!r:.80}")
    job = Job.of(job)
    with NotebookBar(progress_words(job, None)[0]) as bar:

        def show(number: int, best: float | None) -> None:
            bar.show(number + 1, more=progress_words(job, best)[1])

        asked = _Asked(
            predictor,
            Space.of(space),
            Goal() if goal is None else goal,
            replace(settings or SearchSettings(), **options),
            ExpertLoads.of(expert_loads),
            on_trial or show,
            map_fn,
        )
        compared = scenarios or Scenarios()
        return _search_one(job, asked) if compared.is_empty else _search_scenarios(job, asked, compared)


def progress_words(job: Job, best: float | None) -> tuple[str, str]:
    """What a search of a job counts, and its best time so far, for progress."""
    if job.model.tables:
        return "placements", ""
    return "strategies", "none fits yet" if best is None else f"best {seconds_text(best)}"


@dataclass(frozen=True)
class _Asked:
    """What ``search`` is asked beside the job."""

    predictor: Predictor | str | None
    space: Space
    goal: Goal
    settings: SearchSettings
    expert_loads: ExpertLoads | None
    on_trial: OnTrial
    map_fn: MapFn | None

    def __post_init__(self) -> None:
        if not isinstance(self.goal, Goal):
            raise StepsightError(f"goal must be a Goal, for example Goal(objective='cost'), got {self.goal!r:.80}")
        if self.map_fn is not None and not callable(self.map_fn):
            raise StepsightError(f"map_fn must be a function such as Executor.map, got {self.map_fn!r:.80}")

    def predict(self, job: Job) -> Any:
        return predict(job, self.predictor)


def _search_one(job: Job, asked: _Asked) -> SearchResult:
    """Search one job on one cluster: its strategies, or the places of its embedding tables."""
    return _search_sharding(job, asked) if job.model.tables else _JobSearch(job, asked).run()


def _search_sharding(job: Job, asked: _Asked) -> SearchResult:
    """Place the tables of a recommendation model; the best placements are predicted in full."""
    settings, goal = asked.settings, asked.goal
    stated = {
        "storage": settings.storage, "study": settings.study_name, "sampler": settings.sampler != "auto",
        "gap": settings.gap, "workers": asked.map_fn, "space": asked.space != Space(),
        "expert_loads": asked.expert_loads,
    }  # fmt: skip
    if unused := ", ".join(name for name, value in stated.items() if value):
        why = "placements of tables are searched in this process, without a study or a space of strategies"
        raise StepsightError(f"{why}: leave out {unused}")

    def predicted(one: Job) -> Choice:
        return Choice.of(asked.predict(one), asked.predict)

    own = predicted(job)
    goal.scale(job)
    assert own.prediction is not None
    costs = sharding.PlacementCosts(job, own.prediction.latency)
    timeout_s = math.inf if settings.timeout_s is None else settings.timeout_s
    trials = settings.trials or sharding.TRIALS
    found, judged = sharding.search_places(costs, trials, settings.seed, timeout_s, asked.on_trial)
    best = [places for places in found[: max(settings.top, sharding.FULL)] if costs.fits(costs.loads(places))]
    choices = [own, *(predicted(sharding.placed(job, places)) for places in best)]
    baselines = dict[str, float | None]()
    for name in (*sharding.BASELINES, *(["torchrec"] if sharding.has_torchrec() else [])):
        baselines[name] = None
        with suppress(StepsightError):
            choice = predicted(sharding.placed(job, sharding.baseline_places(job, name)))
            baselines[name] = choice.timed[0] if choice.fits else None
            choices += [choice] if choice.fits else []
    distinct = {choice.seconds: choice for choice in choices[::-1]}  # the same placement of ranks by other numbers
    ranked = sorted(distinct.values(), key=lambda choice: choice.rank(goal))
    return SearchResult(ranked, judged, judged, own, goal=goal, baselines=baselines)


def _search_scenarios(job: Job, asked: _Asked, scenarios: Scenarios) -> SearchResult:
    """Search every scenario; the result has the strategies of all, and its ``own`` is the job as it was given."""
    goal, study = asked.goal, asked.settings.study_name
    if goal.robust == REGRET:
        raise StepsightError(f"robust {REGRET} is for one cluster and batch: search the best scenario again with it")
    found: list[SearchResult] = []
    skipped: list[str] = []
    for words, candidate in scenario_jobs(job, scenarios):
        named = replace(asked, settings=replace(asked.settings, study_name=study and f"{study}: {words}"))
        try:
            if isinstance(candidate, JobError):
                raise candidate
            found.append(_search_one(candidate, named))
        except JobError as error:
            skipped.append(f"{words}: {error}")
    if not found:
        raise JobError(f"no scenario can be searched: {skipped[0]}")
    own = next((one.own for one in found if one.own is not None and one.own.job == job), None)
    fitting = [one for one in found if one.any_fits]
    plans = sorted((one.best for one in fitting), key=lambda choice: choice.rank(goal))
    gap: float | None = None
    if plans and None not in [one.gap_percent for one in found if one.undecided or one.any_fits]:
        scores = [goal.score(one.best.job, one.best.timed) for one in fitting]
        gaps = [1.0 + (one.gap_percent or 0.0) / 100.0 for one in fitting]
        least = min(score / gap for score, gap in zip(scores, gaps, strict=True))
        gap = max(0.0, 100.0 * (min(scores) / least - 1.0))
    return SearchResult(
        sorted((choice for one in found for choice in one.choices), key=lambda choice: choice.rank(goal)),
        evaluated=sum(one.evaluated for one in found),
        legal=sum(one.legal for one in found),
        own=own or Choice.of(asked.predict(job), asked.predict),
        gap_percent=gap,
        undecided=sum(one.undecided for one in found),
        rivals=next((one.rivals for one in fitting if one.best is plans[0]), ()),
        goal=goal,
        plans=plans,
        skipped=tuple(skipped),
        expert_loads=asked.expert_loads,
    )


class _JobSearch:
    """Predicts strategies of one job on one cluster until the best is proved, or a limit is reached."""

    def __init__(self, job: Job, asked: _Asked) -> None:
        settings, goal, loads = asked.settings, asked.goal, asked.expert_loads
        if loads is not None:
            loads.check(job)
            job = loads.apply(job)
        self._asked, self._settings, self._goal = asked, settings, goal
        self._given = asked.predict(job)  # an invalid job is an error before a study begins
        goal.scale(job)
        self._grid, question = Grid(job, asked.space, loads), ""
        if settings.storage is not None or settings.sampler == "tpe":  # Optuna is used only if they need it
            batch = replace(job.batch, micro_batch=1, flushes=1)
            parallel = {**asdict(job.parallel), **dict.fromkeys(VARIED)}
            about = (job.model, batch, job.optimizer, job.cluster, job.framework, parallel, self._grid.space)
            question = digest("3", repr(about), self._given.source, *([] if loads is None else [repr(loads)]))
        self._evaluations = Evaluations(self._grid, question, settings.storage, settings.study_name)
        self._done = self._evaluations.done
        self._own = Choice.of(self._given, asked.predict)
        self._first = self._grid.find(self._given.job)  # the job's own strategy; None if it is not in the space
        self._wanted = max(settings.top, 1 + MOST_RIVALS) if goal.robust == REGRET else settings.top
        self._known: dict[int, Choice] = {} if self._first is None else {self._first: self._own}

    def run(self) -> SearchResult:
        """Predict strategies until none is worth it, or a limit is reached."""
        settings, evaluations = self._settings, self._evaluations
        with closing(evaluations):
            choose = {"auto": self._by_bounds, "tpe": self._by_tpe}.get(settings.sampler, self._in_order)()
            unlimited = len(self._grid) if settings.sampler in ("auto", "enumerate") else TRIALS
            total = min(len(self._grid), settings.trials or unlimited)
            until = math.inf if settings.timeout_s is None else time.monotonic() + settings.timeout_s
            most, limit = (FEWEST, MOST) if self._asked.map_fn is None else (FEWEST_MAPPED, MOST_MAPPED)
            most, limit = (1, 1) if settings.sampler == "tpe" else (most, limit)
            while time.monotonic() < until:
                evaluations.read()
                room = min(most, total - len(self._done))
                own = [self._first] if self._first is not None and self._grid.remaining[self._first] else []
                chosen = (own or list(choose(room))) if room > 0 else []  # the job's own strategy before all others
                if not chosen:
                    break
                self._evaluate(chosen)
                most = min(2 * most, limit)
            return self._result()

    def _by_bounds(self) -> Choose:
        """The strategies with the least bounds, until no bound is below the best time."""
        bounds, left = self._bounds, self._grid.remaining
        may = np.flatnonzero(bounds.may_fit)
        order: NDArray[np.int64] = may[np.argsort(bounds.seconds[may], kind="stable")]
        random = np.random.default_rng()

        def choose(count: int) -> Sequence[int]:
            known = self._shortest()  # a bound must be below the last of as many as are wanted to be worth predicting
            beat = known[-1] / (1.0 + self._settings.gap / 100.0) if len(known) == self._wanted else math.inf
            ahead = order[: int(np.searchsorted(bounds.seconds[order], beat))]
            ahead = ahead[left[ahead]]
            # Processes that share a study would all evaluate the same strategies if each took the first.
            start = int(random.integers(max(1, len(ahead) - count + 1))) if self._evaluations.shared else 0
            return list(map(int, ahead[start : start + count]))

        return choose

    def _in_order(self) -> Choose:
        """All strategies in their order, or in a random one."""
        order: NDArray[np.int64] = np.arange(len(self._grid))
        if self._settings.sampler == "random":
            order = np.random.default_rng(self._settings.seed).permutation(len(self._grid))
        return lambda count: list(map(int, order[self._grid.remaining[order]][:count]))

    def _by_tpe(self) -> Choose:
        """The choice of Optuna's TPE sampler, or the next remaining one if that was evaluated."""
        import optuna

        grid, seed = self._grid, self._settings.seed + len(self._done)  # a continued study repeats no choices
        study, known = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed)), 0

        def choose(count: int) -> Sequence[int]:
            nonlocal known
            assert self._evaluations.study is not None
            trials = self._evaluations.study.get_trials(deepcopy=False)
            study.add_trials([trial for trial in trials[known:] if trial.state.is_finished()])
            known = len(trials)
            trial = study.ask()
            index = grid.suggest(trial)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)  # samplers learn nothing from these
            left = np.flatnonzero(grid.remaining)  # neighbours in number differ in few choices
            return [int(left[np.abs(left - index).argmin()])]

        return choose

    @cached_property
    def _bounds(self) -> Bounds:
        return grid_bounds(self._grid, self._given)

    def _shortest(self) -> list[float]:
        """The seconds that count of the best strategies that fit, as many as are wanted."""
        times = [seconds for seconds in self._done.values() if seconds is not None]
        if self._own.fits and self._first not in self._done:
            times.append(self._own.timed)
        return sorted(map(self._goal.judged, times))[: self._wanted]

    def _evaluate(self, chosen: list[int]) -> None:
        """Predict strategies and record them."""
        before, asked = len(self._done), self._asked
        new = [index for index in chosen if index not in self._known]
        if jobs := [self._grid.strategy(index) for index in new]:
            if asked.map_fn is None:
                answers = ask_many(jobs, asked.predictor, only_fitting=True)
            else:
                answers = ask_mapped(jobs, asked.predictor, asked.map_fn)
            self._known |= dict(zip(new, Choice.of_answers(jobs, answers, asked.predict), strict=True))
        self._evaluations.add({index: self._known[index] for index in chosen})
        shortest = next(iter(self._shortest()), None)
        for number in range(before, before + len(chosen)):
            asked.on_trial(number, shortest)

    def _result(self) -> SearchResult:
        """All strategies of a study; those that other processes evaluated are predicted on request."""
        done, goal = self._done, self._goal
        choices = [self._known[index] for index in done if index in self._known]
        choices += [self._elsewhere(index, seconds) for index, seconds in done.items() if index not in self._known]
        if self._own.fits and self._first not in done:
            choices.append(self._own)
        if not any(choice.fits for choice in choices):
            choices += self._smallest(choices)
        ranked = sorted(choices, key=lambda choice: choice.rank(goal))
        ranked, regrets = by_expected_regret(ranked) if goal.robust == REGRET else (ranked, ())
        best, left = next(iter(self._shortest()), math.inf), self._grid.remaining
        bounds_s = self._bounds.seconds[left & self._bounds.may_fit] if left.any() else np.array([])
        least = float(bounds_s.min(initial=math.inf))
        gap_percent = None if math.isinf(best) or least <= 0 else max(0.0, 100.0 * (best / least - 1.0))
        if regrets and gap_percent is not None:  # the strategy with the least regret may not be the fastest
            gap_percent = max(0.0, 100.0 * ((1.0 + gap_percent / 100.0) * ranked[0].timed[0] / best - 1.0))
        return SearchResult(
            ranked,
            len(done),
            len(self._grid),
            self._own,
            gap_percent,
            int(np.count_nonzero(bounds_s < best)),
            rivals=find_rivals(ranked) if goal.robust else (),
            regrets=regrets,
            goal=goal,
            expert_loads=self._asked.expert_loads,
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
        job = self._grid.strategy(index)
        memory = estimate_memory(job, self._given.simulation.hardware)
        return Choice(job, memory.peak_bytes, memory.capacity_bytes, seconds, self._asked.predict)


def expresses(to: str, job: Job) -> bool:
    """Whether a format can express all degrees and options of a job's strategy."""
    keys = {f"parallel.{name}" for name in VARIED} | {"batch.micro_batch"}
    return not keys & {line.partition(" = ")[0] for line in write_config(job, to).ignored}


def best_expressed(
    result: SearchResult,
    to: str,
    predictor: Predictor | str | None = None,
    space: Space | dict[str, Any] | str | Path | None = None,
) -> tuple[Choice | None, bool]:
    """Find the best strategy that fits in memory and that a format can express.

    If the format does not express the best strategy, all legal strategies that it expresses are predicted: the search
    evaluated only those that could have been the best of all.  Spaces of more than ``MOST_LEGAL`` strategies, and
    strategies with placed experts, are not looked through.  Returned with it: whether all legal ones were considered.
    """
    found = next((each for each in result.choices if each.fits and expresses(to, each.job)), None)
    if found is result.best or result.legal > MOST_LEGAL or result.expert_loads is not None:
        return found, found is result.best
    best = result.best.job
    even = replace(best, parallel=replace(best.parallel, stage_layers=()))
    jobs = [job for job in strategies(even, Space.of(space)) if expresses(to, job)]
    known: list[Choice | None] = [found]
    if jobs:
        answers = ask_many(jobs, predictor, only_fitting=True)
        known += Choice.of_answers(jobs, answers, lambda job: predict(job, predictor))
    fitting = [choice for choice in known if choice is not None and choice.fits]
    return min(fitting, key=lambda choice: choice.rank(result.goal), default=None), True
