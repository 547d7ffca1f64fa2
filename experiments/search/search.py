"""Strategy search: an Optuna study that asks ``predict`` about the legal strategies of a model on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np

from stepsight.dataset.errors import StepsightError
from stepsight.dataset.files import digest
from stepsight.dataset.hardware import Hardware
from stepsight.dataset.job import Job, JobLike
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.experiments.search.shared_study import Seconds, SharedStudy
from stepsight.experiments.search.strategies import VARIED, Grid, Space, strategies
from stepsight.simulator.memory import estimate_memory
from stepsight.training.predictor.prediction import Prediction, predict

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

SAMPLERS = ("auto", "tpe", "random")
MOST_SEED = 2**31  # samplers take 32 bits, and a study that goes on adds its trials


def _question(job: Job, source: str, space: Space) -> str:
    """What a study is about: its trials answer no other question."""
    batch, parallel = replace(job.batch, micro_batch=1), {**asdict(job.parallel), **dict.fromkeys(VARIED)}
    return digest("2", repr((job.model, batch, job.optimizer, job.cluster, job.framework, parallel, space)), source)


def search(
    job: JobLike,
    predictor: Predictor | str | None = None,
    *,
    space: Space | None = None,
    trials: int = 200,
    sampler: str = "auto",
    seed: int = 0,
    storage: str | None = None,
    study_name: str | None = None,
    on_trial: Callable[[int, float | None], None] | None = None,
) -> SearchResult:
    """Find the strategy with the shortest predicted iteration that fits in memory.

    The job's own strategy is tried first where it is in the space, so that ``best`` is never slower than the job.

    Args:
        job: A ``Job``, the tables of one, or the path of a job file.  It gives the model, global batch and cluster;
            what the space does not vary stays as the job has it.
        predictor: As in ``predict``.
        space: Choices to try; by default those of ``Space()``.
        trials: Total number of strategies evaluated in the study at the end, those that earlier searches or other
            processes evaluated included.
        sampler: ``tpe``, ``random``, or ``auto``: enumerates a space of at most ``trials`` strategies, else ``tpe``.
        seed: Of the sampler, 0 to ``MOST_SEED``.
        storage: None (in memory), a database URL, or the path of a journal file.  Several processes may search with
            one study in an SQLite or PostgreSQL database or a journal: each evaluates other strategies.
        study_name: Name of the study in the storage; a stored study of that name goes on.
        on_trial: Called after each strategy of this process, with the number of strategies that the study had
            evaluated before and the shortest time so far, in seconds.

    Returns:
        The strategies, best first: ``.best``, ``.choices``, ``.to_frame()``, ``.to_dict()``.

    Raises:
        JobError: If the job cannot be predicted, or no legal strategy exists.
        StepsightError: If an option has no legal value, or the stored study answers another question.

    Example:
        >>> result = search("examples/gpt3-175b-1024.toml", trials=300)  # doctest: +SKIP
        >>> result.best.job.parallel, result.best.prediction.iteration_time_s  # doctest: +SKIP
    """
    import optuna

    job = Job.of(job)
    _check_options(trials, sampler, seed)
    given = predict(job, predictor)  # a job that cannot be answered is refused before a study begins
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    grid = Grid(job, space or Space())
    question = _question(job, given.source, grid.space)
    whole = sampler == "auto" and len(grid) <= trials
    asked = _Asked(grid, given, predictor)
    with closing(SharedStudy(storage, study_name, question, grid)) as study:
        choose = _chooser(grid, study, asked.first, seed, "order" if whole else sampler)
        while (claimed := study.claim(min(trials, len(grid)), choose)) is not None:
            _try(*claimed, study, asked)
            if on_trial is not None:
                times = [given.iteration_time_s] * given.memory.fits + [study.shortest_s]
                on_trial(len(study.done) - 1, min((seconds for seconds in times if seconds is not None), default=None))
        return asked.result(study.done)


def _try(trial: int, index: int, study: SharedStudy, asked: _Asked) -> None:
    """Evaluate a strategy that this process claimed; free it if that fails."""
    try:
        choice = asked.evaluate(index)
    except BaseException:
        study.give_up(trial)
        raise
    excess_bytes = choice.memory.peak_bytes - choice.memory.capacity_bytes
    study.finish(trial, choice.seconds if choice.fits else None, excess_bytes)


def _check_options(trials: int, sampler: str, seed: int) -> None:
    if not 0 <= seed <= MOST_SEED:
        raise StepsightError(f"seed must be {'>= 0' if seed < 0 else f'<= {MOST_SEED}'}, got {seed}")
    if trials < 1:
        raise StepsightError(f"trials must be >= 1, got {trials}")
    if sampler not in SAMPLERS:
        raise StepsightError(f"sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r:.80}")


class _Asked:
    """The strategies that this process has evaluated."""

    def __init__(self, grid: Grid, given: Prediction, predictor: Predictor | str | None) -> None:
        self.own = _predicted(given)
        self.first = grid.find(given.job)  # the job's own strategy; None if it is not in the space
        self._grid, self._predictor = grid, predictor
        self._hardware = given.simulation.hardware
        self._choices: dict[int, Choice] = {} if self.first is None else {self.first: self.own}

    def evaluate(self, index: int) -> Choice:
        """Evaluate a strategy of the grid."""
        if index not in self._choices:
            self._choices[index] = _evaluated(self._grid.job(index), self._predictor, self._hardware)
        return self._choices[index]

    def result(self, done: dict[int, Seconds | None]) -> SearchResult:
        """All strategies of a study; those that other processes evaluated are predicted when they are asked for."""
        choices = [self._choices.get(index) or self._elsewhere(index, seconds) for index, seconds in done.items()]
        if self.own.fits and self.first not in done:
            choices.append(self.own)
        return SearchResult(sorted(choices, key=lambda choice: choice.rank), len(done), len(self._grid), self.own)

    def _elsewhere(self, index: int, seconds: Seconds | None) -> Choice:
        job = self._grid.job(index)
        return Choice(job, estimate_memory(job, self._hardware), seconds, lambda job: predict(job, self._predictor))


def _predicted(prediction: Prediction) -> Choice:
    seconds = prediction.iteration_time_s, prediction.low_s, prediction.high_s
    return Choice(prediction.job, prediction.memory, seconds, lambda _: prediction)


def _evaluated(job: Job, predictor: Predictor | str | None, hardware: Hardware) -> Choice:
    """Estimate the memory of a strategy and, if it fits, its time."""
    memory = estimate_memory(job, hardware)
    if memory.fits:
        return _predicted(predict(job, predictor))
    return Choice(job, memory, None, lambda job: predict(job, predictor))


def _chooser(grid: Grid, study: SharedStudy, first: int | None, seed: int, sampler: str) -> Callable[[], int]:
    """Function that returns the next strategy: the job's own one, then as the sampler says (``order``: one by one)."""
    shuffled = np.random.default_rng(seed).permutation(len(grid))
    order = np.arange(len(grid)) if sampler == "order" else shuffled
    grid.shuffle(seed)
    tpe = _Tpe(grid, study, seed) if sampler in ("auto", "tpe") else None

    def choose() -> int:
        if first is not None and grid.left[first]:
            return first
        return tpe.choose() if tpe is not None else int(order[np.argmax(grid.left[order])])

    return choose


class _Tpe:
    """Optuna's TPE sampler on what a study has evaluated."""

    def __init__(self, grid: Grid, study: SharedStudy, seed: int) -> None:
        import optuna

        self._grid, self._study, self._known = grid, study, 0
        seed += len(study.done)  # a study that goes on does not repeat its choices
        self._own = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    def choose(self) -> int:
        """The sampler's choice; in place of one that is not left, the nearest that is."""
        import optuna

        self._own.add_trials(self._study.finished[self._known :])
        self._known = len(self._study.finished)
        trial = self._own.ask()
        index = self._grid.suggest(trial)
        self._own.tell(trial, state=optuna.trial.TrialState.FAIL)  # samplers learn nothing from these
        return index if self._grid.left[index] else self._grid.nearest(index)


def exhaustive(job: Job, predictor: Predictor | str | None = None, space: Space | None = None) -> SearchResult:
    """Evaluate every legal strategy: the reference for ``search``."""
    hardware = predict(job, predictor).simulation.hardware
    choices = [_evaluated(candidate, predictor, hardware) for candidate in strategies(job, space)]
    return SearchResult(sorted(choices, key=lambda choice: choice.rank), len(choices), len(choices))
