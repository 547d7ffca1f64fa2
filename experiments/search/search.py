"""Strategy search: an Optuna study that asks ``predict`` about the legal strategies of a model on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.errors import JobError, StepsightError
from stepsight.dataset.files import digest
from stepsight.dataset.hardware import Hardware
from stepsight.dataset.job import Job
from stepsight.experiments.search.strategies import VARIED, Grid, Space, strategies
from stepsight.simulator.memory import Memory, estimate_memory
from stepsight.training.predictor.prediction import Prediction, predict

if TYPE_CHECKING:
    import optuna

    from stepsight.training.predictor.predictor import Predictor

SAMPLERS = ("auto", "tpe", "random")
MOST_SEED = 2**31  # samplers take 32 bits, and a study that goes on adds its trials


@dataclass(frozen=True)
class Choice:
    """One strategy that was asked about.

    Attributes:
        prediction: None where it does not fit in memory: what cannot run takes no time.
    """

    job: Job
    memory: Memory
    prediction: Prediction | None

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def rank(self) -> tuple[bool, float]:
        """Best first: by time, and behind those that fit by how far the others are from fitting."""
        if self.prediction is None or not self.fits:
            return True, self.memory.peak_bytes
        return False, self.prediction.iteration_time_s

    def to_dict(self) -> dict[str, Any]:
        parallel, batch = self.job.parallel, self.job.batch
        return {
            "tp": parallel.tp,
            "cp": parallel.cp,
            "pp": parallel.pp,
            "ep": parallel.ep,
            "dp": parallel.dp,
            "micro_batch": batch.micro_batch,
            "schedule": parallel.schedule,
            "virtual_stages": parallel.virtual_stages,
            "zero_stage": parallel.zero_stage,
            "recompute": parallel.recompute,
            "sequence_parallel": parallel.sequence_parallel,
            "iteration_time_s": None if self.prediction is None else self.prediction.iteration_time_s,
            "low_s": None if self.prediction is None else self.prediction.low_s,
            "high_s": None if self.prediction is None else self.prediction.high_s,
            "memory_bytes": self.memory.peak_bytes,
            "fits": self.fits,
        }


@dataclass
class SearchResult:
    """Distinct strategies, best first; those that do not fit in memory come last.

    Attributes:
        choices: What was evaluated, and the job as it was given if it fits.
        evaluated, legal: How many of how many in the space.
        own: The job as it was given.
    """

    choices: list[Choice] = field(default_factory=list)
    evaluated: int = 0
    legal: int = 0
    own: Choice | None = None

    @property
    def best(self) -> Choice:
        if not self.choices or not self.choices[0].fits:
            raise JobError(f"no strategy fits in memory: {self.evaluated} tried of {self.legal} legal ones")
        return self.choices[0]


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
            f"study {name!r} in {storage} is about another job, space or predictor: choose another name"
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
    job: Job,
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

    The job's own strategy is tried first where it is in the space, and nothing slower is ever best.

    Args:
        job: Gives the model, global batch and cluster; its own strategy is the template for what the space does not
            vary.
        trials: At most so many distinct strategies beside those of a stored study; a space that is not larger is
            enumerated whole (``auto``).
        sampler: ``tpe``, ``random``, or ``auto``: enumeration where ``trials`` allow it, else ``tpe``.
        storage: None, a database URL, or a journal file's path; a stored study of that name goes on.
        on_trial: Called with the number of the strategy and the best time so far.

    Raises:
        JobError: If no legal strategy exists.
    """
    import optuna

    space = space or Space()
    if seed < 0:
        raise StepsightError(f"seed must be >= 0, got {seed}")
    if seed > MOST_SEED:
        raise StepsightError(f"seed must be <= {MOST_SEED}, got {seed}")
    given = predict(job, predictor)  # a job that cannot be answered is refused before a study begins
    if trials < 1:
        raise StepsightError(f"trials must be >= 1, got {trials}")
    if sampler not in SAMPLERS:
        raise StepsightError(f"sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    grid = Grid(job, space)
    study = _study(storage, study_name, _question(job, given.source, space))
    seed += len(study.trials)  # a study that goes on does not repeat its choices
    whole = sampler == "auto" and len(grid) <= trials
    study.sampler = (
        optuna.samplers.RandomSampler(seed) if whole or sampler == "random" else optuna.samplers.TPESampler(seed=seed)
    )
    grid.shuffle(seed)
    own, first = Choice(job, given.memory, given), grid.find(job)
    choices: list[Choice] = []

    def evaluate(index: int) -> Choice:
        candidate = grid.take(index)
        choices.append(own if index == first else _asked(candidate, predictor, given.simulation.hardware))
        return choices[-1]

    states = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED
    for earlier in study.get_trials(deepcopy=False, states=states):
        index = grid.index(earlier.params)
        if index is not None and grid.left[index]:
            evaluate(index)
    for number in range(min(trials, int(grid.left.sum()))):
        if first is not None and grid.left[first]:
            study.enqueue_trial(grid.params(first))
        elif whole:
            study.enqueue_trial(grid.params(int(np.argmax(grid.left))))
        trial, index = _ask(study, grid)
        try:
            choice = evaluate(index)
        except BaseException:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            raise
        trial.set_constraint("memory", choice.memory.peak_bytes - choice.memory.capacity_bytes)
        if choice.prediction is None:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, choice.prediction.iteration_time_s)
        if on_trial is not None:
            on_trial(number, min((c.rank[1] for c in (own, *choices) if c.fits), default=None))
    evaluated = len(choices)
    if own.fits and all(choice.job != job for choice in choices):
        choices.append(own)
    return SearchResult(sorted(choices, key=lambda c: c.rank), evaluated, len(grid), own)


def _asked(job: Job, predictor: Predictor | str | None, hardware: Hardware) -> Choice:
    """A strategy, which is not timed if it cannot fit."""
    memory = estimate_memory(job, hardware)
    return Choice(job, memory, predict(job, predictor) if memory.fits else None)


def _ask(study: optuna.Study, grid: Grid) -> tuple[optuna.Trial, int]:
    """A trial of a strategy that was not evaluated yet; in place of one that was, the nearest that was not."""
    import optuna

    while True:
        trial = study.ask()
        index = grid.suggest(trial)
        if grid.left[index]:
            return trial, index
        study.tell(trial, state=optuna.trial.TrialState.FAIL)  # samplers learn nothing from these
        study.enqueue_trial(grid.params(grid.nearest(index)))


def exhaustive(job: Job, predictor: Predictor | str | None = None, space: Space | None = None) -> SearchResult:
    """Ask about every legal strategy: the reference for ``search``."""
    hardware = predict(job, predictor).simulation.hardware
    choices = [_asked(candidate, predictor, hardware) for candidate in strategies(job, space)]
    return SearchResult(sorted(choices, key=lambda c: c.rank), len(choices), len(choices))
