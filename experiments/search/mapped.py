"""Predictions of a search in other processes: on this machine, or with any engine that has a ``map``."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_all_start_methods, get_context
from typing import TYPE_CHECKING

import numpy as np

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.training.prediction.ask_many import Answers, ask_many

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

Ask = Callable[[Sequence[Job]], Answers]
MapFn = Callable[[Ask, Sequence[Sequence[Job]]], Iterable[Answers]]
MOST_PARTS = 64  # parts of a batch of jobs
SMALLEST_PART = 128  # jobs; the common work of a part's jobs is computed once
_DEATH_SIGNAL = 1


def ask_mapped(jobs: Sequence[Job], predictor: Predictor | str | None, map_fn: MapFn) -> Answers:
    """Predict jobs in the processes of a ``map_fn``; those that do not fit in memory are not timed.

    Args:
        jobs: Are split into parts of neighbours, which share most.
        predictor: As in ``predict``.  Each process unpacks it once.
        map_fn: Calls a function with each part and returns the results in order, as
            ``concurrent.futures.Executor.map``.

    Raises:
        JobError: As ``predict``.
        StepsightError: If ``map_fn`` returns something else.
    """
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
    """Provide a ``map_fn`` with a number of processes on this machine; None for one: the search predicts itself.

    Raises:
        StepsightError: If a process ends early.
    """
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
