"""An Optuna journal that writes many changes at once, because each write waits for the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from optuna.storages.journal import BaseJournalBackend

Log = dict[str, Any]


class BatchedJournal(BaseJournalBackend):  # type: ignore[misc]  # optuna has no types here
    """Optuna's journal backend around another one.

    Within ``batch``, logs are kept and written together at its end; who reads meanwhile gets them too.  Nobody else may
    write during a batch: a lock of the caller's own sees to that.

    Args:
        journal: Where logs are kept.
    """

    def __init__(self, journal: BaseJournalBackend) -> None:
        self._journal = journal
        self._count = 0  # logs that are known to be in the journal
        self._waiting: list[Log] | None = None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Write the changes of this block together at its end."""
        self._count += sum(1 for _ in self._journal.read_logs(self._count))
        self._waiting = []
        try:
            yield
            waiting, self._waiting = self._waiting, None
            if waiting:
                self._journal.append_logs(waiting)
        finally:
            self._waiting = None

    def read_logs(self, log_number_from: int) -> Iterator[Log]:
        """Logs from an index on."""
        if log_number_from < self._count or self._waiting is None:
            for number, log in enumerate(self._journal.read_logs(log_number_from), start=log_number_from):
                self._count = max(self._count, number + 1)
                yield log
        if self._waiting is not None:
            yield from self._waiting[max(0, log_number_from - self._count) :]

    def append_logs(self, logs: list[Log]) -> None:
        """Add logs."""
        if self._waiting is None:
            self._journal.append_logs(logs)
        else:
            self._waiting += logs
