"""Evaluations of strategies: kept in memory or as trials of an Optuna study, and predicted in other processes.

An Optuna storage keeps a search: it continues from the trials that the study holds, and several processes may use one
study.  They do not agree on who evaluates what, so a strategy may be evaluated by more than one of them.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property, partial
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.base.bounded import read_file
from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job, JobLike
from stepsight.experiments.search.bounds import Bounds, grid_bounds
from stepsight.experiments.search.choices import Choice
from stepsight.experiments.search.settings import Seconds, Space
from stepsight.experiments.search.strategies import Grid
from stepsight.training.prediction.ask_many import Answers, ask_many
from stepsight.training.prediction.prediction import predict

if TYPE_CHECKING:
    import optuna

    from stepsight.training.predictor.predictor import Predictor

_SECONDS = "seconds"  # attribute of a trial: its ``Seconds``
_MOST_S = 1e12  # of a stored time
_SQLITE_WAIT_S = 60.0
_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)  # before a study is created again
_BEGINNING = b'{"op_code":'  # of a journal
_DATABASES = (".db", ".sqlite", ".sqlite3")


class Evaluations:
    """The evaluated strategies of a grid: in memory, and as the finished trials of an Optuna study if there is one.

    Args:
        grid: Of the strategies.
        question: Digest of what the study is about; empty: there is no study, and Optuna is not imported.
        storage: None (in memory), a database URL, or the path of a journal file.
        name: Of the study in the storage, which continues if it exists; None for a new one.

    Attributes:
        done: Seconds by number in the grid; None where a strategy does not fit in memory.
        shared: Whether other processes evaluate strategies meanwhile.
        trials: Of the strategies in ``done``, if there is a study.
    """

    def __init__(self, grid: Grid, question: str = "", storage: str | None = None, name: str | None = None) -> None:
        self.done: dict[int, Seconds | None] = {}
        self.trials: list[optuna.trial.FrozenTrial] = []
        self.shared = False
        self._grid, self._place = grid, storage if storage is None or "://" in storage else Path(storage).resolve()
        if isinstance(self._place, Path) and self._place.suffix in _DATABASES:
            better = f"write sqlite:///{storage:.200} for a database, or choose another ending for a journal"
            raise StepsightError(f"a journal must not be named as a database, got {storage!r:.200}: {better}")
        self._study: optuna.Study | None = None
        self._seen = self._added = 0  # trials that were read, and those of them that this process added
        if not question:
            return
        with self._usable():
            self._study, self._storage = _create(self._place, name)
            known = self._study.user_attrs.get("question")
            if known is None:
                self._study.set_user_attr("question", question)
            elif known != question:
                raise StepsightError(
                    f"study {name!r:.80} in {storage} is about another job, space or predictor: choose another name"
                )
            self.read()
            self.shared = False

    def read(self) -> None:
        """Read what other processes evaluated."""
        if self._study is None:
            return
        from optuna.trial import TrialState

        with self._usable():
            new = self._study.get_trials(deepcopy=False)[self._seen :]
            for trial in new:
                index = self._grid.index(trial.params)
                if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and index is not None:
                    if index not in self.done:
                        self.trials.append(trial)
                    self._note(index, _seconds_of(trial))
        self._seen += len(new)
        self.shared = self.shared or len(new) > self._added
        self._added = 0

    def add(self, found: Mapping[int, Choice]) -> None:
        """Add strategies that this process predicted, by number in the grid."""
        if self._study is None:
            for index, choice in found.items():
                self._note(index, choice.seconds if choice.fits else None)
            return
        self.read()
        trials = [self._trial(index, choice) for index, choice in found.items() if index not in self.done]
        with self._usable():
            self._study.add_trials(trials)
        self._added = len(trials)
        self.read()

    def _note(self, strategy: int, seconds: Seconds | None) -> None:
        self.done[strategy] = seconds
        self._grid.remaining[strategy] = False

    def _trial(self, index: int, choice: Choice) -> optuna.trial.FrozenTrial:
        from optuna.trial import FrozenTrial, TrialState

        seconds, now = choice.seconds if choice.fits else None, datetime.now()
        params = self._grid.params(index)
        trial = FrozenTrial(  # ``create_trial`` looks for distributions of old versions, which takes half of a trial
            number=-1,
            trial_id=-1,
            state=TrialState.COMPLETE if seconds else TrialState.PRUNED,
            value=seconds[0] if seconds else None,
            datetime_start=now,
            datetime_complete=now,
            params=params,
            distributions=self._grid.distributions[params["layout"]],
            user_attrs={_SECONDS: seconds},
            system_attrs={},
            intermediate_values={},
        )
        trial.set_constraint("memory", choice.peak_bytes - choice.capacity_bytes)
        return trial

    def close(self) -> None:
        """Close the connections to a storage."""
        if self._study is not None:
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
            raise StepsightError(
                "storage must be a database URL, or the path of a new journal or of one that a search wrote, got "
                f"{self._place}: {type(error).__name__}: {reason:.200}"
            ) from None


def _create(place: str | Path | None, name: str | None) -> tuple[optuna.Study, Any]:
    """Create or load a study in a storage; again after a pause if processes create the tables of a database at once."""
    import optuna
    from sqlalchemy.exc import DatabaseError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for pause_s in (*_PAUSES_S, None):
        try:
            storage = open_storage(place)
            return optuna.create_study(storage=storage, study_name=name, load_if_exists=name is not None), storage
        except (DatabaseError, optuna.exceptions.StorageInternalError):
            if pause_s is None:
                raise
            time.sleep(pause_s)
    raise AssertionError


def open_storage(place: str | Path | None) -> Any:
    """Open an Optuna storage: in memory, of a database URL, or of a journal file."""
    from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
    from sqlalchemy.engine import make_url

    if place is None:
        return InMemoryStorage()
    if isinstance(place, str):
        sqlite = place.startswith("sqlite")
        if sqlite and (database := make_url(place).database):
            Path(database).parent.mkdir(parents=True, exist_ok=True)
        return RDBStorage(place, engine_kwargs={"connect_args": {"timeout": _SQLITE_WAIT_S}} if sqlite else {})
    # The path is absolute: a relative one would leave the lock of a killed search pointing to a missing file.
    text = read_file(place) if place.is_file() else b""
    if (place.exists() and not place.is_file()) or text[: len(_BEGINNING)] != _BEGINNING[: len(text)]:
        raise StepsightError(f"a study's journal is a new file or one that a search wrote, got {place}")
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = JournalFileSymlinkLock(str(place))
    if not text.endswith(b"\n") and text:
        lock.acquire()
        try:  # drop the line that a killed process wrote only partly; no other one is writing
            with place.open("r+b") as file:
                written = file.read()
                file.truncate(written.rfind(b"\n") + 1)
        finally:
            lock.release()
    return JournalStorage(JournalFileBackend(str(place), lock_obj=lock))


def _seconds_of(trial: optuna.trial.FrozenTrial) -> Seconds | None:
    """Times that a finished trial recorded."""
    seconds = trial.user_attrs.get(_SECONDS)
    if seconds is None and trial.value is None:
        return None
    numbers = isinstance(seconds, list | tuple) and all(isinstance(s, float) and 0 < s < _MOST_S for s in seconds)
    if not numbers or len(seconds) != 3 or seconds[0] != trial.value or not seconds[1] <= seconds[0] <= seconds[2]:
        raise StepsightError(
            f"a finished trial must hold its time and the interval around it, got {seconds!r:.80} and "
            f"{trial.value!r:.80} in trial {trial.number}: choose another storage"
        )
    return seconds[0], seconds[1], seconds[2]


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
        """Queue the strategies with the least time bounds that may fit in memory; the study evaluates them first.

        Returns:
            How many were queued that the study did not have.
        """
        order = np.argsort(self.bounds.seconds, kind="stable")
        before = len(study.get_trials(deepcopy=False))
        for index in order[self.bounds.may_fit[order]][:most].tolist():
            study.enqueue_trial(self._grid.params(index), skip_if_exists=True)
        return len(study.get_trials(deepcopy=False)) - before

    def objective(self, trial: optuna.Trial) -> float:
        """Predicted iteration time of a trial's strategy, in seconds, with memory as a constraint.

        A strategy whose bound is above the best value of the study is pruned without asking for its time.

        Raises:
            optuna.TrialPruned: If the strategy cannot be the best.
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
_DEATH_SIGNAL = 1


def ask_mapped(jobs: Sequence[Job], predictor: Predictor | str | None, map_fn: MapFn) -> Answers:
    """Predict jobs in the processes of a ``map_fn``; those that do not fit in memory are not timed."""
    size = max(SMALLEST_PART, -(-len(jobs) // MOST_PARTS))
    parts = [jobs[at : at + size] for at in range(0, len(jobs), size)]
    packed = predictor if predictor is None or isinstance(predictor, str) else pickle.dumps(predictor)
    found = list(map_fn(partial(_answers, packed), parts))
    kinds = {type(answers).__name__ for answers in found if not isinstance(answers, Answers)}
    if kinds or [len(answers.seconds) for answers in found] != list(map(len, parts)):
        raise StepsightError(
            "map_fn must return the result of each call in order, as concurrent.futures.Executor.map does, got "
            f"{len(found)} results for {len(parts)} calls{f', of type {sorted(kinds)[0]}' if kinds else ''}"
        )
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
    if workers == 1:
        yield None
        return
    forks = "fork" in get_all_start_methods() and threading.active_count() == 1  # forked processes inherit the caches
    pool = ProcessPoolExecutor(
        workers,
        mp_context=get_context("fork" if forks else "spawn"),
        initializer=_begin_worker,
        initargs=(os.getpid(),),
    )
    try:
        yield pool.map
    except BrokenProcessPool:
        raise StepsightError(
            f"one of {workers} worker processes ended early, perhaps for lack of memory: use fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(parent: int) -> None:
    """Ignore Ctrl-C, which the search handles, and end with the search, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
