"""A store of MLflow: whether it can be used, and its client."""

from __future__ import annotations

import os
import socket
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stepsight.dataset.base.errors import PredictorError, StepsightError
from stepsight.dataset.base.files import check_output_file
from stepsight.dataset.harness.base.atomic_files import locked

PATIENCE_S = 5
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}


def check_store(uri: str) -> None:
    """Check that a store can be reached; called before long work.

    Raises:
        PredictorError: If not.
    """
    problem = _unreachable(uri)
    if problem:
        raise PredictorError(f"tracking needs a store that can be reached, got {uri}: {problem}")


def is_missing(uri: str) -> bool:
    """Whether a store is a database file that is not there: MLflow creates it at the first use."""
    return uri.startswith("sqlite:") and not database_file(uri).is_file()


def check_exists(uri: str) -> None:
    """Check that a store can be reached and is there; MLflow would create a database that is missing.

    Raises:
        PredictorError: If not.
    """
    check_store(uri)
    if is_missing(uri):
        raise PredictorError(f"the store must exist, got {uri}: there is no file {database_file(uri)}")


def store_client(uri: str) -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow

        if uri.startswith("sqlite:///"):
            database_file(uri).parent.mkdir(parents=True, exist_ok=True)
        return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].strip()[:300]


def database_file(uri: str) -> Path:
    """File of an sqlite URL."""
    return Path(uri.partition("://")[2].partition("?")[0].removeprefix("/") or ".")


@contextmanager
def impatient() -> Iterator[None]:
    """Let requests to a tracking server fail within seconds, unless the user has set other limits."""
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(PATIENCE_S)}
    own = {key: value for key, value in limits.items() if key not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for key in own:
            del os.environ[key]


def _unreachable(uri: str) -> str:
    """Why a store is out of reach, "" if it is reachable: MLflow itself would retry for minutes."""
    if uri.startswith("sqlite:"):
        return _unusable_database(uri)
    try:
        url = urlsplit(uri)
        port = url.port or _PORTS.get(url.scheme.split("+")[0], 0)
        if url.hostname and port:
            socket.create_connection((url.hostname, port), timeout=PATIENCE_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _unusable_database(uri: str) -> str:
    path = database_file(uri)
    try:
        check_output_file(path)
        if path.exists() and path.stat().st_size:
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
                connection.execute("SELECT name FROM sqlite_master").fetchall()
    except (OSError, StepsightError, sqlite3.Error) as error:
        return str(error)
    return ""


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
