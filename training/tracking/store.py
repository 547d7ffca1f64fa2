"""A store of MLflow: whether it can be used, its client, and the predictors of its registry by name."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import PredictorError, StepsightError
from stepsight.dataset.base.files import check_output_file, set_aside
from stepsight.dataset.hardware.hardware import canonical_hardware
from stepsight.dataset.harness.base.atomic_files import locked
from stepsight.training.predictor.model_tables import MANIFEST, REGISTERED
from stepsight.training.predictor.predictor import Predictor, shipped_names
from stepsight.training.shipped.catalogue import shipped_predictor

PATIENCE_S = 5
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}


def check_store(uri: str) -> None:
    """Check that a store can be reached, before long work: MLflow itself would retry for minutes.

    Raises ``PredictorError`` if not.
    """
    try:
        if uri.startswith("sqlite:"):
            path = database_file(uri)
            check_output_file(path)
            if path.exists() and path.stat().st_size:
                with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
                    connection.execute("SELECT name FROM sqlite_master").fetchall()
        else:
            url = urlsplit(uri)
            port = url.port or _PORTS.get(url.scheme.split("+")[0], 0)
            if url.hostname and port:
                socket.create_connection((url.hostname, port), timeout=PATIENCE_S).close()
    except (OSError, ValueError, sqlite3.Error) as error:
        raise PredictorError(f"tracking needs a store that can be reached, got {uri}: {error}") from None


def is_missing(uri: str) -> bool:
    """Whether a store is a database file that is not there: MLflow creates it at the first use."""
    return uri.startswith("sqlite:") and not database_file(uri).is_file()


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


@contextmanager
def store_lock(uri: str) -> Iterator[None]:
    """Hold the lock of an SQLite store, a file beside it, until the block or this process ends; others have none.

    It is not the store itself: closing any handle of an SQLite file would release SQLite's own locks on it.  Raises
    ``StepsightError`` if no file can be written beside the store.
    """
    with ExitStack() as stack:
        if uri.startswith("sqlite:///"):
            path = database_file(uri).resolve()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(path.with_name(f".{path.name}.lock"), wait=True))
            except OSError as error:
                raise StepsightError(f"a store needs a folder that can be written to, got {uri}: {error}") from None
        yield


def create_store(uri: str) -> None:
    """Create the tables of an SQLite store that is not there, under its lock: whole, or not at all.

    MLflow migrates a new database in many steps; one that was killed between them refuses every later use.
    """
    path = database_file(uri).resolve()
    if not uri.startswith("sqlite:///") or (path.is_file() and path.stat().st_size):
        return
    new = path.with_name(f".{path.name}.new")
    for left in path.parent.glob(f"{new.name}*"):  # with its journal, of a process that was killed
        left.unlink()
    store_client(f"sqlite:///{new}").search_registered_models(max_results=1)
    new.replace(path)


ALIAS = "champion"
ARTIFACT = "predictor"


def model_name(hardware: str) -> str:
    """Name in the registry of a hardware's predictors."""
    return f"stepsight-{hardware}"


def load_predictor(name: str | Path) -> Predictor:
    """Read a predictor: a folder, a shipped one by its name or its hardware's, or one of MLflow's registry.

    A shipped one is the same that ``predict`` takes by default for its hardware.  A folder is read again if its files
    changed.

    Args:
        name: As ``runs/mine``, ``h100-sxm``, ``h100-sxm-96gb`` or ``models:/h100@champion``; a folder goes before.

    Raises:
        PredictorError: If there is none, or as ``Predictor.load`` and ``load_model_uri``.
    """
    if str(name).startswith(REGISTERED):
        return load_model_uri(str(name))
    folder = Path(name)
    if folder.is_dir():
        facts = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(folder.iterdir())]
        return _read(folder.resolve(), tuple(facts))
    found = None if folder.exists() else shipped_predictor(str(name))
    if found is None and not folder.exists() and set_aside(folder) is None:
        raise PredictorError(
            f"a predictor is a folder with manifest.json, or {', '.join(shipped_names())}, their hardware, roofline, "
            f"physics or {REGISTERED}NAME@ALIAS, got {str(name)!r:.80}"
        )
    return Predictor.load(folder) if found is None else found


@cached(8)
def _read(folder: Path, files: tuple[tuple[str, int, int], ...]) -> Predictor:
    """The predictor of a folder whose files have these names, times and sizes."""
    return Predictor.load(folder)


def load_model_uri(uri: str, store: str = "") -> Predictor:
    """Load a registered predictor by MLflow's names: ``models:/h100@champion``, ``models:/stepsight-h100-sxm-80gb/3``.

    ``uri``: its name is a registered model's, or a hardware's.  ``store``: the registry; empty: the one that
    ``MLFLOW_REGISTRY_URI`` or ``MLFLOW_TRACKING_URI`` names, else ``mlflow.db`` in the current folder.  Raises
    ``PredictorError`` if there is no registry, or it holds no such version.
    """
    from mlflow.exceptions import MlflowException

    parts = re.fullmatch(r"models:/+([^@/]+)(?:([@/])([^@/]+))?", uri)
    if parts is None:
        raise PredictorError(f"a registered predictor is models:/NAME@ALIAS or models:/NAME/VERSION, got {uri!r:.80}")
    name, mark, which = parts.groups()
    store = store or os.environ.get("MLFLOW_REGISTRY_URI") or os.environ.get("MLFLOW_TRACKING_URI") or ""
    if not store:
        if not Path("mlflow.db").is_file():
            raise PredictorError(f"{uri} needs a registry: set MLFLOW_TRACKING_URI, as sqlite:///runs/mlflow.db")
        store = "sqlite:///mlflow.db"
    check_store(store)
    if is_missing(store):  # MLflow would create it
        raise PredictorError(f"the store must exist, got {store}: there is no file {database_file(store)}")
    client, tried = store_client(store), dict.fromkeys([name, model_name(name), model_name(canonical_hardware(name))])
    problem = ""
    for registered in tried:
        try:
            if mark == "/":
                found = client.get_model_version(registered, which)
            else:
                found = client.get_model_version_by_alias(registered, which or ALIAS)
            return _loaded(store, str(found.name), str(found.version))
        except (MlflowException, OSError) as error:
            problem = problem or first_line(error)
    raise PredictorError(f"the registry at {store} must hold {uri} ({' or '.join(tried)}), got: {problem}")


@cached(maxsize=8)
def _loaded(store: str, name: str, version: str) -> Predictor:
    """A registered version; an alias moves, a version never changes."""
    client = store_client(store)
    return download(client, client.get_model_version(name, version))


def download(client: Any, version: Any) -> Predictor:
    """The predictor of a registered version."""
    from mlflow.models import Model

    folder = Path(client.download_artifacts(version.run_id, ARTIFACT))
    if (folder / MANIFEST).is_file():  # format of earlier versions
        return Predictor.load(folder)
    flavor = Model.load(str(folder)).flavors["python_function"]
    return Predictor.load(folder / str(flavor["data"]))
