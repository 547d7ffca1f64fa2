"""An Optuna study that several processes share: each strategy is evaluated by one of them, all stop at one total.

Strategies are claimed and recorded in batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.bounded import read_file
from stepsight.dataset.errors import StepsightError
from stepsight.dataset.processes import is_gone, process_name
from stepsight.experiments.search.grid import Grid
from stepsight.experiments.search.journal import BatchedJournal
from stepsight.experiments.search.record import Choose, Claim, Found, Seconds
from stepsight.training.store_lock import store_lock

if TYPE_CHECKING:
    import optuna

_CLAIMED, _SECONDS = "claimed", "seconds"  # attributes of a trial: who claimed it when; its ``Seconds``
_POLL_S = 0.1  # between two looks at the strategies that others evaluate
_LOST_S = 600.0  # a claim so old is void: evaluating takes milliseconds, and the lock seconds where many wait for it
_MOST_S = 1e12  # of a stored time
_SQLITE_WAIT_S = 60.0
_BEGINNING = b'{"op_code":'  # of a journal


class SharedStudy:
    """The strategies of a grid, of which some are evaluated or claimed by processes that share a study.

    Args:
        storage: None (in memory), a database URL, or the path of a journal file.
        name: Of the study in the storage, which goes on if it exists; None for a new one.
        question: Digest of what the study is about.
        grid: Its ``left`` is kept up to date.

    Attributes:
        done: Strategies evaluated by any process, by number in the grid; None where one does not fit in memory.
        finished: The trials of ``done``.

    Raises:
        StepsightError: If the storage cannot be used, or the stored study answers another question.
    """

    def __init__(self, storage: str | None, name: str | None, question: str, grid: Grid) -> None:
        import optuna

        self.done: dict[int, Seconds | None] = {}
        self.finished: list[optuna.trial.FrozenTrial] = []
        self._grid = grid
        self._claimed: set[int] = set()
        self._settled: set[int] = set()  # numbers of trials that ended
        self._skipped = 0  # trials before this number have ended
        self._place = None if storage is None else storage if "://" in storage else Path(storage).resolve()
        with self._lock():
            with self._reading():
                self._storage = _open(self._place)
                self._study = optuna.create_study(
                    storage=self._storage, study_name=name, load_if_exists=name is not None
                )
                self._id = self._storage.get_study_id_from_name(self._study.study_name)
            known = self._study.user_attrs.get("question")
            if known is None:
                self._study.set_user_attr("question", question)
            elif known != question:
                raise StepsightError(
                    f"study {name!r:.80} in {storage} is about another job, space or predictor: choose another name"
                )

    def close(self) -> None:
        """End the connections to a database."""
        self._storage.remove_session()
        if engine := getattr(self._storage, "engine", None):
            engine.dispose()

    def claim(self, total: int, choose: Choose, most: int) -> list[Claim]:
        """Claim strategies that no process has evaluated or claimed.

        Waits while only claims of other processes lead to the total: if such a process ends, its strategies are free.

        Args:
            total: Strategies to evaluate in this study.
            choose: Chooses strategies; no other process claims meanwhile.
            most: Strategies to claim.

        Returns:
            Number of each trial in the storage, and of its strategy in the grid; none if the total is reached, or
            nothing was chosen and no other process is at work.
        """
        while True:
            with self._lock():
                self._look()
                room = total - len(self.done) - len(self._claimed)
                chosen = choose(min(most, room)) if room > 0 else ()
                if chosen:
                    with self._batch():
                        return [(self._begin(index), index) for index in chosen]
                if len(self.done) >= total or not self._claimed:
                    return []
            time.sleep(_POLL_S)

    def _begin(self, index: int) -> int:
        """A new trial that this process claims."""
        import optuna

        trial = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=self._grid.params(index),
            distributions=self._grid.distributions(index),
            user_attrs={_CLAIMED: [process_name(), time.time()]},
        )
        return int(self._storage.create_new_trial(self._id, trial))

    def finish(self, found: Sequence[tuple[Claim, Found]]) -> None:
        """Record what was found of strategies that this process claimed."""
        with self._lock():
            with self._batch():
                for (trial, _), (seconds, excess_bytes) in found:
                    self._end(trial, seconds, excess_bytes)
            self._look()

    def _end(self, trial: int, seconds: Seconds | None, excess_bytes: float) -> None:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import Trial, TrialState

        with suppress(UpdateFinishedTrialError):  # a void claim: another process evaluates this strategy
            Trial(self._study, trial).set_constraint("memory", excess_bytes)
            self._storage.set_trial_user_attr(trial, _SECONDS, seconds)
            state, values = (TrialState.PRUNED, None) if seconds is None else (TrialState.COMPLETE, [seconds[0]])
            self._storage.set_trial_state_values(trial, state, values)

    def give_up(self, claims: Sequence[Claim]) -> None:
        """Free strategies that this process claimed and could not evaluate."""
        with self._lock():
            for trial, _ in claims:
                self._fail(trial)

    @contextmanager
    def _batch(self) -> Iterator[None]:
        """Write to a journal once, at the end; a database writes at once."""
        backend = getattr(self._storage, "_backend", None)
        with backend.batch() if isinstance(backend, BatchedJournal) else nullcontext():
            yield

    def _look(self) -> None:
        """Bring ``done``, the claims and what is left in the grid up to date; end trials whose claim is void."""
        with self._reading():
            claimed, ended = self._news()
        left = self._grid.left
        left[list(self._claimed)] = True
        left[[*claimed, *ended]] = False
        self._claimed = claimed - self.done.keys()

    def _news(self) -> tuple[set[int], list[int]]:
        """Strategies that are claimed now, and those that ended since the last look."""
        from optuna.trial import TrialState

        claimed: set[int] = set()
        ended: list[int] = []
        for trial in self._study.get_trials(deepcopy=False)[self._skipped :]:
            if trial.number in self._settled:
                continue
            index = self._grid.index(trial.params)
            if trial.state == TrialState.RUNNING and not _is_void(trial):
                claimed |= set() if index is None else {index}
                continue
            if trial.state == TrialState.RUNNING:
                self._fail(self._storage.get_trial_id_from_study_id_trial_number(self._id, trial.number))
            elif trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and index is not None:
                self._note(index, trial)
                ended.append(index)
            self._settled.add(trial.number)
        while self._skipped in self._settled:
            self._skipped += 1
        return claimed, ended

    def _note(self, index: int, trial: optuna.trial.FrozenTrial) -> None:
        self.done[index] = _seconds_of(trial)
        self.finished.append(trial)

    def _fail(self, trial: int) -> None:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        with suppress(UpdateFinishedTrialError):
            self._storage.set_trial_state_values(trial, TrialState.FAIL)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the storage's lock; its errors become ours."""
        from optuna.exceptions import OptunaError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with nullcontext() if self._place is None else store_lock(self._place):
                if isinstance(self._place, Path):
                    _drop_half_line(self._place)
                yield
        except (SQLAlchemyError, OptunaError, OSError) as error:
            raise _unusable(self._place, error) from None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn any error into ours: Optuna believes what a journal or database holds, and fails in many ways."""
        try:
            yield
        except StepsightError:
            raise
        except Exception as error:
            raise _unusable(self._place, error) from None


def _unusable(storage: str | Path | None, error: Exception) -> StepsightError:
    reason = (str(error).splitlines() or [""])[0]
    return StepsightError(
        f"storage must be a database URL, or the path of a new journal or of one that a search wrote, got {storage}: "
        f"{type(error).__name__}: {reason:.200}"
    )


def _open(place: str | Path | None) -> Any:
    """Optuna storage: in memory, of a database URL, or of a journal file."""
    from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if place is None:
        return InMemoryStorage()
    if isinstance(place, str):
        wait = {"connect_args": {"timeout": _SQLITE_WAIT_S}} if place.startswith("sqlite") else {}
        return RDBStorage(place, engine_kwargs=wait)
    # The path is absolute: a relative one would leave a killed search's lock pointing nowhere, for ever.
    text = read_file(place) if place.is_file() else b""
    if (place.exists() and not place.is_file()) or text[: len(_BEGINNING)] not in (b"", _BEGINNING):
        raise StepsightError(f"a study's journal is a new file or one that a search wrote, got {place}")
    return JournalStorage(BatchedJournal(JournalFileBackend(str(place))))


def _drop_half_line(journal: Path) -> None:
    """Drop the line that a killed process left half written; whoever writes holds the lock, so nobody is at it."""
    if not journal.is_file() or not journal.stat().st_size:
        return
    with journal.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        start = file.read(len(_BEGINNING))
        if start != _BEGINNING[: len(start)]:
            return  # it is no journal, which whoever opens it says
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def _is_void(trial: optuna.trial.FrozenTrial) -> bool:
    """Whether nobody evaluates a trial that is marked as running."""
    process, since = trial.user_attrs.get(_CLAIMED) or ("", 0.0)
    return is_gone(process) or abs(time.time() - since) > _LOST_S


def _seconds_of(trial: optuna.trial.FrozenTrial) -> Seconds | None:
    """Times that a finished trial recorded.

    Raises:
        StepsightError: If they are none.
    """
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
