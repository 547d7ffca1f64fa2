"""Strategy search: an Optuna study that asks ``predict`` about the legal strategies of a model on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.errors import StepsightError
from stepsight.dataset.files import digest
from stepsight.dataset.hardware import Hardware
from stepsight.dataset.job import Job, JobLike
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.experiments.search.strategies import VARIED, Grid, Space, strategies
from stepsight.simulator.memory import estimate_memory
from stepsight.training.predictor.prediction import Prediction, predict

if TYPE_CHECKING:
    import optuna

    from stepsight.training.predictor.predictor import Predictor

SAMPLERS = ("auto", "tpe", "random")
MOST_SEED = 2**31  # samplers take 32 bits, and a study that goes on adds its trials


def _question(job: Job, source: str, space: Space) -> str:
    """What a study is about: its trials answer no other question."""
    batch, parallel = replace(job.batch, micro_batch=1), {**asdict(job.parallel), **dict.fromkeys(VARIED)}
    return digest(repr((job.model, batch, job.optimizer, job.cluster, job.framework, parallel, space)), source)


def _study(storage: str | None, name: str | None, question: str) -> optuna.Study:
    """A new study, or the stored one of that name if it asks the same."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        study = optuna.create_study(storage=_storage(storage), study_name=name, load_if_exists=name is not None)
    except (SQLAlchemyError, OSError, ImportError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise StepsightError(
            f"storage must be a database URL or a writable journal file, got {storage}: {reason}"
        ) from None
    if study.user_attrs.get("question", question) != question:
        raise StepsightError(
            f"study {name!r:.80} in {storage} is about another job, space or predictor: choose another name"
        )
    study.set_user_attr("question", question)
    return study


def _storage(storage: str | None) -> Any:
    """Optuna storage: none (memory), a database URL, or the path of a journal file."""
    if storage is None or "://" in storage:
        return storage
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = Path(storage).resolve()  # a relative path would leave a killed search's lock pointing nowhere, for ever
    text = path.read_bytes() if path.is_file() else b""
    if (path.exists() and not path.is_file()) or text[:11] not in (b"", b'{"op_code":'):
        raise StepsightError(f"a study's journal is a new file or one that a search wrote, got {storage}")
    if text and not text.endswith(b"\n"):
        line = text.count(b"\n") + 1
        raise StepsightError(f"a study's journal is of whole lines, got half of line {line} in {storage}: remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(path)))


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
        trials: Number of distinct strategies to evaluate, those of a stored study not counted.
        sampler: ``tpe``, ``random``, or ``auto``: enumerates a space of at most ``trials`` strategies, else ``tpe``.
        seed: Of the sampler, 0 to ``MOST_SEED``.
        storage: None (in memory), a database URL, or the path of a journal file.
        study_name: Name of the study in the storage; a stored study of that name goes on.
        on_trial: Called after each trial with its number and the shortest time so far, in seconds.

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
    study = _study(storage, study_name, _question(job, given.source, grid.space))
    seed += len(study.trials)  # a study that goes on does not repeat its choices
    whole = sampler == "auto" and len(grid) <= trials
    study.sampler = (
        optuna.samplers.RandomSampler(seed) if whole or sampler == "random" else optuna.samplers.TPESampler(seed=seed)
    )
    grid.shuffle(seed)
    asked = _Asked(grid, given, predictor)
    asked.repeat(study)
    for number in range(min(trials, int(grid.left.sum()))):
        _try_one(study, asked, in_order=whole)
        if on_trial is not None:
            on_trial(number, asked.shortest_s)
    return asked.result()


def _check_options(trials: int, sampler: str, seed: int) -> None:
    if not 0 <= seed <= MOST_SEED:
        raise StepsightError(f"seed must be {'>= 0' if seed < 0 else f'<= {MOST_SEED}'}, got {seed}")
    if trials < 1:
        raise StepsightError(f"trials must be >= 1, got {trials}")
    if sampler not in SAMPLERS:
        raise StepsightError(f"sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r:.80}")


class _Asked:
    """The strategies that a search has evaluated."""

    def __init__(self, grid: Grid, given: Prediction, predictor: Predictor | str | None) -> None:
        self.grid = grid
        self.own = Choice(given.job, given.memory, given)
        self.first = grid.find(given.job)  # the job's own strategy; None if it is not in the space
        self._predictor = predictor
        self._hardware = given.simulation.hardware
        self._choices: list[Choice] = []

    def evaluate(self, index: int) -> Choice:
        """Evaluate a strategy of the grid, which is then no longer left."""
        job = self.grid.take(index)
        choice = self.own if index == self.first else _evaluated(job, self._predictor, self._hardware)
        self._choices.append(choice)
        return choice

    def repeat(self, study: optuna.Study) -> None:
        """Evaluate what the stored study evaluated."""
        import optuna

        states = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED
        for earlier in study.get_trials(deepcopy=False, states=states):
            index = self.grid.index(earlier.params)
            if index is not None and self.grid.left[index]:
                self.evaluate(index)

    @property
    def shortest_s(self) -> float | None:
        """Shortest time of those that fit, the job's own included; None if none fits."""
        return min((choice.rank[1] for choice in (self.own, *self._choices) if choice.fits), default=None)

    def result(self) -> SearchResult:
        choices, evaluated = self._choices, len(self._choices)
        if self.own.fits and all(choice.job != self.own.job for choice in choices):
            choices = [*choices, self.own]
        return SearchResult(sorted(choices, key=lambda choice: choice.rank), evaluated, len(self.grid), self.own)


def _evaluated(job: Job, predictor: Predictor | str | None, hardware: Hardware) -> Choice:
    """Estimate the memory of a strategy and, if it fits, its time."""
    memory = estimate_memory(job, hardware)
    return Choice(job, memory, predict(job, predictor) if memory.fits else None)


def _try_one(study: optuna.Study, asked: _Asked, *, in_order: bool) -> None:
    """Run one trial: the job's own strategy first, then the next one in order or the sampler's choice."""
    import optuna

    grid = asked.grid
    if asked.first is not None and grid.left[asked.first]:
        study.enqueue_trial(grid.params(asked.first))
    elif in_order:
        study.enqueue_trial(grid.params(int(np.argmax(grid.left))))
    trial, index = _ask(study, grid)
    try:
        choice = asked.evaluate(index)
    except BaseException:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        raise
    trial.set_constraint("memory", choice.memory.peak_bytes - choice.memory.capacity_bytes)
    if choice.prediction is None:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    else:
        study.tell(trial, choice.prediction.iteration_time_s)


def _ask(study: optuna.Study, grid: Grid) -> tuple[optuna.Trial, int]:
    """Ask for a trial of a strategy that is left; in place of one that was evaluated, take the nearest that is left."""
    import optuna

    while True:
        trial = study.ask()
        index = grid.suggest(trial)
        if grid.left[index]:
            return trial, index
        study.tell(trial, state=optuna.trial.TrialState.FAIL)  # samplers learn nothing from these
        study.enqueue_trial(grid.params(grid.nearest(index)))


def exhaustive(job: Job, predictor: Predictor | str | None = None, space: Space | None = None) -> SearchResult:
    """Evaluate every legal strategy: the reference for ``search``."""
    hardware = predict(job, predictor).simulation.hardware
    choices = [_evaluated(candidate, predictor, hardware) for candidate in strategies(job, space)]
    return SearchResult(sorted(choices, key=lambda choice: choice.rank), len(choices), len(choices))
