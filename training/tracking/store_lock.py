"""A lock on a store that several processes share: an MLflow store, or the storage of an Optuna study."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.harness.atomic_files import locked

_SERVER_LOCK = 0x7374657073696768  # number of the advisory lock; every PostgreSQL database has its own
# By these a server ends the connection of a machine that was switched off, and frees its lock, within half a minute:
# probes where nothing is under way, else a limit for what is not acknowledged.
_KEEP_ALIVE = {
    "tcp_keepalives_idle": "10s",
    "tcp_keepalives_interval": "5s",
    "tcp_keepalives_count": "4",
    "tcp_user_timeout": "30s",
}


@contextmanager
def store_lock(store: str | Path) -> Iterator[None]:
    """Hold the lock of a store until the block or this process ends; wait while another process holds it.

    SQLite databases and files are locked through a file beside them, PostgreSQL through an advisory lock.  Other
    stores have no lock.

    Args:
        store: A database URL, or the path of a file.

    Raises:
        StepsightError: If no file can be written beside the store.
    """
    path = _lock_file(store)
    with ExitStack() as stack:
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(path, wait=True))
            except OSError as error:
                raise StepsightError(f"a store needs a folder that can be written to, got {store}: {error}") from None
        elif str(store).startswith("postgresql"):
            _lock_server(str(store), stack)
        yield


def _lock_file(store: str | Path) -> Path | None:
    """The file next to a store that processes lock; None for a server or a database in memory.

    It is not the store itself: closing any handle of an SQLite file would release SQLite's own locks on it.
    """
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    if isinstance(store, str):
        try:
            url = make_url(store)
        except ArgumentError:
            return None
        if url.get_backend_name() != "sqlite" or not url.database or url.database.startswith((":memory:", "file:")):
            return None
        store = Path(url.database)
    store = store.resolve()
    return store.with_name(f".{store.name}.lock")


def _lock_server(url: str, stack: ExitStack) -> None:
    """Take the lock of a database until the stack ends; if it is out of reach, the caller's next call reports it."""
    import sqlalchemy
    from sqlalchemy.exc import SQLAlchemyError

    with suppress(SQLAlchemyError, ImportError):
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        connection = stack.enter_context(engine.connect())
        settings = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _KEEP_ALIVE.items())
        connection.execute(sqlalchemy.text(f"SELECT {settings}"))
        connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:number)"), {"number": _SERVER_LOCK})
