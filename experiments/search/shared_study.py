"""An Optuna study that several processes share: each strategy is evaluated by one of them, and all stop at one total.

Strategies are claimed and recorded in batches.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.bounded import read_file
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.processes import is_gone, process_name
from stepsight.experiments.search.database_trials import add_finished, count_trials
from stepsight.experiments.search.grid import Grid
from stepsight.experiments.search.journal import BatchedJournal
from stepsight.experiments.search.record import Choose, Found, Seconds
from stepsight.training.store_lock import store_lock

if TYPE_CHECKING:
    import optuna

_CLAIMED = "claimed"  # attribute of a study: the claims of processes, with times
_SECONDS = "seconds"  # attribute of a trial: its ``Seconds``
_POLL_S = 0.1  # seconds between checks of the strategies that others evaluate
# A claim that is unchanged for so long is void, as that of a machine that was switched off: evaluating takes seconds.
# If its process comes back, what both evaluated is recorded once.
_LOST_S = 60.0
_MOST_S = 1e12  # of a stored time
_SQLITE_WAIT_S = 60.0
_BEGINNING = b'{"op_code":'  # of a journal
_DATABASES = (".db", ".sqlite", ".sqlite3")


class SharedStudy:
    """The strategies of a grid, some of which are evaluated or claimed by processes that share a study.

    A strategy becomes a trial once it is evaluated.  Until then it stands among the claims of a process, which are an
    attribute of the study.

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
        self._claimed: set[int] = set()  # by other processes
        self._seen = 0  # trials that are in ``done``
        self._key = f"{_CLAIMED} {uuid.uuid4().hex[:8]}"
        self._evaluated = 0  # by this process
        self._since: dict[str, tuple[Any, float]] = {}  # claims of others, and when each was first seen, by our clock
        self._place = _place_of(storage)
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
        """Close the connections to a database."""
        self._storage.remove_session()
        if engine := getattr(self._storage, "engine", None):
            engine.dispose()

    def claim(self, total: int, choose: Choose, most: int) -> list[int]:
        """Claim strategies that no process has evaluated or claimed.

        Waits while only claims of other processes lead to the total: if such a process ends, its strategies are free.

        Args:
            total: Strategies to evaluate in this study.
            choose: Chooses strategies; no other process claims meanwhile.
            most: Strategies to claim.

        Returns:
            Numbers in the grid; none if the total is reached, or nothing was chosen and no other process is at work.
        """
        while True:
            with self._lock():
                self._look()
                room = total - len(self.done) - len(self._claimed)
                chosen = list(choose(min(most, room))) if room > 0 else []
                if chosen:
                    self._hold(chosen)
                    return chosen
                if len(self.done) >= total or not self._claimed:
                    return []
            time.sleep(_POLL_S)

    def finish(self, found: Sequence[Found]) -> None:
        """Record the evaluations of strategies that this process claimed."""
        with self._lock():
            self._look()
            # Strategies that are done already were evaluated by another process: the claim had expired.
            trials = [self._trial(one) for one in found if one.strategy not in self.done]
            with self._batch():
                first = add_finished(self._storage, self._id, trials)
                if first is None:
                    for trial in trials:
                        self._storage.create_new_trial(self._id, trial)
                self._evaluated += len(trials)
                self._hold([])
            if first == self._seen:  # no other process added any: these need not be read again
                self._note(trials)
            self._look()

    def _trial(self, found: Found) -> optuna.trial.FrozenTrial:
        from optuna.trial import FrozenTrial, TrialState

        fits, now = found.seconds is not None, datetime.now()
        trial = FrozenTrial(  # ``create_trial`` looks for distributions of old versions, which takes half of a trial
            number=-1,
            trial_id=-1,
            state=TrialState.COMPLETE if fits else TrialState.PRUNED,
            value=found.seconds[0] if found.seconds is not None else None,
            datetime_start=now,
            datetime_complete=now,
            params=self._grid.params(found.strategy),
            distributions=self._grid.distributions(found.strategy),
            user_attrs={_SECONDS: found.seconds},
            system_attrs={},
            intermediate_values={},
        )
        trial.set_constraint("memory", found.excess_bytes)
        return trial

    def give_up(self) -> None:
        """Free the strategies that this process claimed and could not evaluate."""
        with self._lock():
            self._hold([])

    def _hold(self, indices: list[int]) -> None:
        """Claim some strategies, and no others."""
        claim = [process_name(), self._evaluated, indices]
        self._storage.set_study_system_attr(self._id, self._key, claim)

    def _look(self) -> None:
        """Bring ``done``, the claims and what is left in the grid up to date."""
        with self._reading():
            ended = self._news()
            claims = self._storage.get_study_system_attrs(self._id)
            held = [index for key, claim in claims.items() if key != self._key for index in self._held(key, claim)]
        left = self._grid.left
        left[list(self._claimed)] = True
        self._claimed = {index for index in held if index < len(left)} - self.done.keys()
        left[[*self._claimed, *ended, *self.done]] = False

    def _held(self, key: str, claim: Any) -> list[int]:
        """Strategies that another process evaluates, by an attribute of the study; none if it seems to have ended."""
        indices = _claims(key, claim)
        if indices and claim != self._since.get(key, (None, 0.0))[0]:
            self._since[key] = claim, time.monotonic()
        return indices if indices and time.monotonic() - self._since[key][1] <= _LOST_S else []

    def _news(self) -> list[int]:
        """Strategies that finished since the last check."""
        if count_trials(self._storage, self._id) == self._seen:
            return []
        trials = self._study.get_trials(deepcopy=False)
        return self._note(trials[self._seen :])

    def _note(self, trials: Sequence[optuna.trial.FrozenTrial]) -> list[int]:
        """Read the study's next trials; return the strategies of the finished ones."""
        from optuna.trial import TrialState

        ended: list[int] = []
        for trial in trials:
            index = self._grid.index(trial.params)
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and index is not None:
                self.done[index] = _seconds_of(trial)
                self.finished.append(trial)
                ended.append(index)
        self._seen += len(trials)
        return ended

    @contextmanager
    def _batch(self) -> Iterator[None]:
        """Write to a journal once, at the end."""
        backend = getattr(self._storage, "_backend", None)
        with backend.batch() if isinstance(backend, BatchedJournal) else nullcontext():
            yield

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the storage's lock; its errors become ``StepsightError``."""
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
        """Convert any error: Optuna trusts the content of a journal or database, and fails in many ways."""
        try:
            yield
        except StepsightError:
            raise
        except Exception as error:
            raise _unusable(self._place, error) from None


def _unusable(storage: str | Path | None, error: Exception) -> StepsightError:
    reason = (str(error).splitlines() or [""])[0]
    if isinstance(error, OSError) and error.strerror:
        return StepsightError(f"cannot read or write the storage {storage}: {error.strerror}")
    return StepsightError(
        f"storage must be a database URL, or the path of a new journal or of one that a search wrote, got {storage}: "
        f"{type(error).__name__}: {reason:.200}"
    )


def _place_of(storage: str | None) -> str | Path | None:
    """Where a study is stored: a database URL, the path of a journal, or memory."""
    if storage is None or "://" in storage:
        return storage
    path = Path(storage)
    if path.suffix in _DATABASES:
        raise StepsightError(
            f"a journal must not be named as a database, got {storage!r:.200}: write sqlite:///{storage:.200} for a "
            "database, or choose another ending for a journal"
        )
    return path.resolve()


def _open(place: str | Path | None) -> Any:
    """Optuna storage: in memory, of a database URL, or of a journal file."""
    from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if place is None:
        return InMemoryStorage()
    if isinstance(place, str):
        wait = {"connect_args": {"timeout": _SQLITE_WAIT_S}} if place.startswith("sqlite") else {}
        return RDBStorage(place, engine_kwargs=wait)
    # The path is absolute: a relative one would leave the lock of a killed search pointing to a missing file.
    text = read_file(place) if place.is_file() else b""
    if (place.exists() and not place.is_file()) or text[: len(_BEGINNING)] not in (b"", _BEGINNING):
        raise StepsightError(f"a study's journal is a new file or one that a search wrote, got {place}")
    return JournalStorage(BatchedJournal(JournalFileBackend(str(place))))


def _drop_half_line(journal: Path) -> None:
    """Drop the line that a killed process wrote only partly; the writer holds the lock, so no other process is
    writing.
    """
    if not journal.is_file() or not journal.stat().st_size:
        return
    with journal.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        start = file.read(len(_BEGINNING))
        if start != _BEGINNING[: len(start)]:
            return  # it is not a journal: opening it reports that
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def _claims(key: str, value: Any) -> list[int]:
    """Strategies that a process evaluates, by an attribute of the study; none if it ended on this machine."""
    if not key.startswith(_CLAIMED) or not isinstance(value, list | tuple) or len(value) != 3:
        return []
    process, _, indices = value
    if not isinstance(process, str) or not isinstance(indices, list | tuple) or is_gone(process):
        return []
    return [index for index in indices if isinstance(index, int) and index >= 0]


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
