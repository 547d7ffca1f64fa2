"""Evaluations of strategies: kept in memory or as trials of an Optuna study, and predicted in other processes.

A search continues from the trials that its study holds.  Several processes may use one study; they do not agree on who
evaluates what, so a strategy may be evaluated by more than one of them.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.base.bounded import read_file
from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.files import check_output_file
from stepsight.dataset.harness.base.cores import die_with
from stepsight.dataset.job.job import Job, JobLike
from stepsight.experiments.search.bounds import Bounds, grid_bounds
from stepsight.experiments.search.choices import Choice
from stepsight.experiments.search.settings import Seconds, Space
from stepsight.experiments.search.strategies import Grid
from stepsight.training.prediction.ask_many import Answers, ask_many
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor

if TYPE_CHECKING:
    import optuna

_SECONDS = "seconds"  # attribute of a trial: its ``Seconds``
_MOST_S = 1e12  # of a stored time
MOST_WORKERS = 1024  # processes
_SQLITE_WAIT_S = 60.0
_BEGINNING = b'{"op_code":'  # of a journal


class Evaluations:
    """The evaluated strategies of a grid: in memory, or as the finished trials of an Optuna study.

    ``question`` is a digest of what the study is about; empty: there is no study, and Optuna is not imported.
    ``storage`` and ``name`` are as in ``SearchSettings``. ``done`` has seconds by number in the grid; None where a
    strategy does not fit in memory.
    """

    def __init__(self, grid: Grid, question: str = "", storage: str | None = None, name: str | None = None) -> None:
        self.done: dict[int, Seconds | None] = {}
        self.study: optuna.Study | None = None
        self._grid, self._place = grid, storage
        self._seen = self._own = 0  # trials that were read, and those of them before this search or by it
        if not question:
            return
        with self._usable():
            self.study, self._storage = _create(storage, name)
            if self.study.user_attrs.setdefault("question", question) != question:
                about = f"study {name!r:.80} in {storage} is about another job, space or predictor"
                raise StepsightError(f"{about}: choose another name")
            self.study.set_user_attr("question", question)
        self.read()
        self._own = self._seen

    @property
    def shared(self) -> bool:
        """Whether other processes evaluate strategies meanwhile."""
        return self._seen > self._own

    def read(self) -> None:
        """Read what other processes evaluated."""
        if self.study is None:
            return
        with self._usable():
            for trial in self.study.get_trials(deepcopy=False)[self._seen :]:
                self._seen += 1
                index = self._grid.index(trial.params)
                if trial.state.name in ("COMPLETE", "PRUNED") and index is not None:
                    self._note(index, _seconds_of(trial))

    def add(self, found: Mapping[int, Choice]) -> None:
        """Add strategies that this process predicted, by number in the grid."""
        self.read()
        new = {index: choice for index, choice in found.items() if index not in self.done}
        if self.study is not None:
            with self._usable():
                self.study.add_trials([self._trial(index, choice) for index, choice in new.items()])
            self._own += len(new)
            self.read()
        for index, choice in new.items():
            self._note(index, choice.seconds if choice.fits else None)

    def _note(self, strategy: int, seconds: Seconds | None) -> None:
        self.done[strategy] = seconds
        self._grid.remaining[strategy] = False

    def _trial(self, index: int, choice: Choice) -> optuna.trial.FrozenTrial:
        from optuna.trial import TrialState, create_trial

        seconds, params = choice.seconds if choice.fits else None, self._grid.params(index)
        trial = create_trial(
            state=TrialState.COMPLETE if seconds else TrialState.PRUNED,
            value=seconds[0] if seconds else None,
            params=params,
            distributions=self._grid.distributions[params["layout"]],
            user_attrs={_SECONDS: seconds},
        )
        trial.set_constraint("memory", choice.peak_bytes - choice.capacity_bytes)
        return trial

    def close(self) -> None:
        """Close the connections to a storage."""
        if self.study is not None:
            self._storage.remove_session()
            if engine := getattr(self._storage, "engine", None):
                engine.dispose()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Convert any error: Optuna trusts the content of a journal or database, and fails in many ways."""
        try:
            yield
        except StepsightError:
            raise
        except OSError as error:
            raise StepsightError(f"cannot read or write the storage {self._place}: {error.strerror or error}") from None
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            rule = "storage must be a database URL, or the path of a new journal or of one that a search wrote"
            raise StepsightError(f"{rule}, got {self._place}: {type(error).__name__}: {reason:.200}") from None


def _create(storage: str | None, name: str | None) -> tuple[optuna.Study, Any]:
    """Create or load a study in a storage; again after a pause if processes create the tables of a database at once."""
    import optuna
    from sqlalchemy.exc import DatabaseError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for pause_s in (0.1, 0.2, 0.4, 0.8, 1.6, math.inf):
        try:
            place = open_storage(storage)
            return optuna.create_study(storage=place, study_name=name, load_if_exists=name is not None), place
        except (DatabaseError, optuna.exceptions.StorageInternalError):
            if pause_s == math.inf:
                raise
            time.sleep(pause_s)
    raise AssertionError


def open_storage(place: str | None) -> Any:
    """Open an Optuna storage: in memory, of a database URL, or of a journal file."""
    from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
    from sqlalchemy.engine import make_url

    if place is None:
        return InMemoryStorage()
    if "://" in place:
        sqlite = place.startswith("sqlite")
        if sqlite and (database := make_url(place).database):
            check_output_file(Path(database))
        return RDBStorage(place, engine_kwargs={"connect_args": {"timeout": _SQLITE_WAIT_S}} if sqlite else {})
    journal = Path(place).resolve()  # a relative path would leave the lock of a killed search pointing to no file
    if journal.suffix in (".db", ".sqlite", ".sqlite3"):
        better = f"write sqlite:///{place:.200} for a database, or choose another ending for a journal"
        raise StepsightError(f"a journal must not be named as a database, got {place!r:.200}: {better}")
    text = read_file(journal) if journal.is_file() else b""
    if (journal.exists() and not journal.is_file()) or text[: len(_BEGINNING)] != _BEGINNING[: len(text)]:
        raise StepsightError(f"a study's journal is a new file or one that a search wrote, got {journal}")
    check_output_file(Path(place))
    lock = JournalFileSymlinkLock(str(journal))
    if not text.endswith(b"\n") and text:
        lock.acquire()
        try:  # drop the line that a killed process wrote only partly; no other one is writing
            with journal.open("r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        finally:
            lock.release()
    return JournalStorage(JournalFileBackend(str(journal), lock_obj=lock))


def _seconds_of(trial: optuna.trial.FrozenTrial) -> Seconds | None:
    """Times that a finished trial recorded."""
    seconds = trial.user_attrs.get(_SECONDS)
    if seconds is None and trial.value is None:
        return None
    with suppress(TypeError, ValueError):
        time_s, low_s, high_s = seconds
        if time_s == trial.value and 0 < low_s <= time_s <= high_s < _MOST_S:
            return time_s, low_s, high_s
    got = f"{seconds!r:.80} and {trial.value!r:.80} in trial {trial.number}: choose another storage"
    raise StepsightError(f"a finished trial must hold its time and the interval around it, got {got}")


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

    def __len__(self) -> int:
        return len(self._grid)

    @cached_property
    def bounds(self) -> Bounds:
        """Lower bounds of every strategy, in seconds and in bytes."""
        return grid_bounds(self._grid, self._given)

    def suggest(self, trial: optuna.Trial) -> Job:
        """The job in the strategy that a trial's sampler chooses."""
        return self._grid.strategy(self._grid.suggest(trial))

    def enqueue(self, study: optuna.Study, most: int = 100) -> int:
        """Queue the strategies with the least time bounds that may fit in memory, which the study evaluates first; how
        many were queued that it did not have.
        """
        order = np.argsort(self.bounds.seconds, kind="stable")
        before = len(study.get_trials(deepcopy=False))
        for index in order[self.bounds.may_fit[order]][:most].tolist():
            study.enqueue_trial(self._grid.params(index), skip_if_exists=True)
        return len(study.get_trials(deepcopy=False)) - before

    def objective(self, trial: optuna.Trial) -> float:
        """Predicted iteration time of a trial's strategy, in seconds, with memory as a constraint.

        A strategy whose bound is above the best value of the study is pruned without asking for its time.
        """
        import optuna

        index, best = self._grid.suggest(trial), math.inf
        with suppress(ValueError):  # no trial satisfies the constraint
            best = float(trial.study.best_value)
        if self.bounds.seconds[index] > best:
            trial.set_user_attr("bound_s", float(self.bounds.seconds[index]))
            raise optuna.TrialPruned
        prediction = predict(self._grid.strategy(index), self._predictor)
        memory = prediction.memory
        trial.set_constraint("memory", memory.peak_bytes - memory.capacity_bytes)
        trial.set_user_attr("interval_s", [prediction.low_s, prediction.high_s])
        return prediction.iteration_time_s


Ask = Callable[[Sequence[Job]], Answers]
MapFn = Callable[[Ask, Sequence[Sequence[Job]]], Iterable[Answers]]
MOST_PARTS = 64  # parts of a batch of jobs
SMALLEST_PART = 128  # jobs; the common work of a part's jobs is computed once


def ask_mapped(jobs: Sequence[Job], predictor: Predictor | str | None, map_fn: MapFn) -> Answers:
    """Predict jobs in the processes of a ``map_fn``; those that do not fit in memory are not timed."""
    size = max(SMALLEST_PART, -(-len(jobs) // MOST_PARTS))
    parts = [jobs[at : at + size] for at in range(0, len(jobs), size)]
    packed = predictor if predictor is None or isinstance(predictor, str) else pickle.dumps(predictor)
    found = list(map_fn(partial(_answers, packed), parts))
    kinds = {type(answers).__name__ for answers in found if not isinstance(answers, Answers)}
    if kinds or [len(answers.seconds) for answers in found] != list(map(len, parts)):
        got = f"{len(found)} results for {len(parts)} calls{f', of type {sorted(kinds)[0]}' if kinds else ''}"
        raise StepsightError(f"map_fn must return the result of each call in order, as Executor.map does, got {got}")
    return Answers(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _answers(packed: bytes | str | None, jobs: Sequence[Job]) -> Answers:
    """The function that a process of ``map_fn`` runs."""
    return ask_many(jobs, _unpacked(packed) if isinstance(packed, bytes) else packed, only_fitting=True)


@cached(2)
def _unpacked(packed: bytes) -> Predictor:
    """The predictor, the same object each time, because it caches durations."""
    predictor: Predictor = pickle.loads(packed)  # written by this search
    return predictor


@contextmanager
def local_map(workers: int) -> Iterator[MapFn | None]:
    """Provide a ``map_fn`` with a number of processes on this machine; None for one: the search predicts itself."""
    if not 1 <= workers <= MOST_WORKERS:
        raise StepsightError(f"workers must be from 1 to {MOST_WORKERS}, got {workers!r:.40}")
    if workers == 1:
        yield None
        return
    forks = "fork" in get_all_start_methods() and threading.active_count() == 1  # forked processes inherit the caches
    pool = ProcessPoolExecutor(
        workers, get_context("fork" if forks else "spawn"), initializer=_begin_worker, initargs=(os.getpid(),)
    )
    try:
        yield pool.map
    except BrokenProcessPool:
        why = f"one of {workers} worker processes ended early, perhaps for lack of memory"
        raise StepsightError(f"{why}: use fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(parent: int) -> None:
    """Ignore Ctrl-C, which the search handles, and end with the search, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(parent)
