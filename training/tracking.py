"""Training runs and predictors in MLflow: parameters, data digests, errors, the folder, and the champion."""

from __future__ import annotations

import logging
import os
import re
import socket
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from stepsight.dataset.caching import cached
from stepsight.dataset.errors import PredictorError, StepsightError
from stepsight.dataset.files import check_output_file
from stepsight.dataset.hardware import canonical_hardware
from stepsight.dataset.processes import is_gone, process_name
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.predictor.predictor_manifest import MANIFEST
from stepsight.training.served_model import ANSWERS, JOB
from stepsight.training.store_lock import store_lock

EXPERIMENT = "stepsight"
ALIAS, CHALLENGER = "champion", "challenger"
ARTIFACT = "predictor"
Compare = Callable[[Predictor], tuple[float, float] | None]
PROCESS = "stepsight.process"  # tag: the process that wrote a run
PATIENCE_S = 5
_EXISTS = "RESOURCE_ALREADY_EXISTS"
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}


def default_uri(out: Path) -> str:
    """An SQLite database next to a predictor's folder."""
    return f"sqlite:///{(out.resolve().parent / 'mlflow.db')}"


def model_name(hardware: str) -> str:
    """Name in the registry of a hardware's predictors."""
    return f"stepsight-{hardware}"


@dataclass
class TrackedRun:
    """An open MLflow run."""

    run_id: str
    _client: Any
    _uri: str

    def log(self, params: Mapping[str, Any], metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
        """Log everything in one request."""
        from mlflow.entities import Metric, Param, RunTag

        self._client.log_batch(
            self.run_id,
            metrics=[Metric(key, float(value), 0, 0) for key, value in metrics.items()],
            params=[Param(key, str(value)) for key, value in params.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )

    def log_data(self, name: str, digest: str, context: str) -> None:
        """Identify the data by its digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(name=name, digest=digest, source_type="local", source="{}")
        tag = InputTag("mlflow.data.context", context)
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, [tag])])

    def publish(
        self, folder: Path, hardware: str, tags: Mapping[str, str], compare: Compare = lambda champion: None
    ) -> str:
        """Store a predictor as a model that ``mlflow.pyfunc.load_model`` serves, and register it.

        The first of a hardware becomes its champion.  A later one becomes the champion only if it is better than the
        champion on the same data, which neither saw; else it is the challenger.

        Args:
            folder: The saved predictor.
            hardware: What it is for.
            tags: Of the version.
            compare: Errors of this predictor and of the champion on the same held-out data; None if there is none.

        Returns:
            The version's number.
        """
        from mlflow.exceptions import MlflowException

        with TemporaryDirectory() as place:
            _save_model(folder, Path(place) / ARTIFACT)
            self._client.log_artifacts(self.run_id, str(Path(place) / ARTIFACT), ARTIFACT)
        name = model_name(hardware)
        source = f"{self._client.get_run(self.run_id).info.artifact_uri}/{ARTIFACT}"
        with store_lock(self._uri):  # versions are numbered consecutively
            try:
                self._client.create_registered_model(name, {"hardware": hardware})
            except MlflowException as error:
                if error.error_code != _EXISTS:
                    raise
            version = self._client.create_model_version(name, source, self.run_id, dict(tags))
            alias, told = _alias_of_new(self._client, name, compare)
            for key, value in told.items():
                self._client.set_model_version_tag(name, version.version, key, value)
            self._client.set_registered_model_alias(name, alias, version.version)
        return str(version.version)


def _alias_of_new(client: Any, name: str, compare: Compare) -> tuple[str, dict[str, str]]:
    """Decide whether a new version is the champion or the challenger; also how it was judged."""
    from mlflow.exceptions import MlflowException

    try:
        champion = _download(client, client.get_model_version_by_alias(name, ALIAS))
    except (MlflowException, OSError, PredictorError):  # none yet, or one that this version cannot read
        return ALIAS, {}
    errors = compare(champion)
    if errors is None:
        return CHALLENGER, {"judged": "nothing that both can be judged by"}
    own, its = errors
    told = {"error_percent": f"{own:.3f}", "champion_error_percent": f"{its:.3f}"}
    return (ALIAS if own < its else CHALLENGER), told


def _save_model(folder: Path, out: Path) -> None:
    """Write a predictor in MLflow's own form, with its signature; loading it imports a module of the package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import pyfunc
        from mlflow.models import ModelSignature
        from mlflow.types import ColSpec, DataType, Schema

        signature = ModelSignature(
            inputs=Schema([ColSpec(DataType.string, JOB)]),
            outputs=Schema([ColSpec(DataType.double, answer) for answer in ANSWERS]),
        )
        pyfunc.save_model(
            str(out),
            loader_module="stepsight.training.served_model",
            data_path=str(folder),
            signature=signature,
            pip_requirements=[f"stepsight=={version('stepsight')}"],
        )


def _download(client: Any, version: Any) -> Predictor:
    """The predictor of a registered version."""
    from mlflow.models import Model

    folder = Path(client.download_artifacts(version.run_id, ARTIFACT))
    if (folder / MANIFEST).is_file():  # format of earlier versions
        return Predictor.load(folder)
    flavor = Model.load(str(folder)).flavors["python_function"]
    return Predictor.load(folder / str(flavor["data"]))


@contextmanager
def tracked(uri: str, run_name: str) -> Iterator[TrackedRun]:
    """An MLflow run that ends as ``FINISHED``, ``FAILED`` if the block raises, or ``KILLED`` if it is interrupted.

    Raises:
        PredictorError: If the store cannot be used; within seconds, before the block begins.
    """
    from mlflow.exceptions import MlflowException

    client, experiment_id = _open(uri)
    _end_killed(client, experiment_id)
    tags = {PROCESS: process_name()}
    run_id = client.create_run(experiment_id, run_name=run_name, tags=tags).info.run_id

    def end(status: str) -> None:
        with suppress(MlflowException):  # an unreachable store must not hide the original error
            client.set_terminated(run_id, status)

    try:
        yield TrackedRun(run_id, client, uri)
        client.set_terminated(run_id, "FINISHED")
    except MlflowException as error:
        end("FAILED")
        raise PredictorError(f"tracking needs a store that stays, got {uri}: {_first_line(error)}") from None
    except BaseException as error:
        end("KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED")
        raise


def reopened(uri: str, run_id: str) -> TrackedRun:
    """A finished run, to add later results."""
    return TrackedRun(run_id, _client(uri), uri)


def check_store(uri: str) -> None:
    """Check that a store can be reached; called before long work.

    Raises:
        PredictorError: If not.
    """
    problem = _unreachable(uri)
    if problem:
        raise PredictorError(f"tracking needs a store that can be reached, got {uri}: {problem}")


def _open(uri: str) -> tuple[Any, str]:
    """Client and experiment of a reachable store."""
    from mlflow.exceptions import MlflowException

    check_store(uri)
    try:
        with store_lock(uri), _impatient(), _quiet():  # two processes that create a store break each other's migrations
            client = _client(uri)
            client.search_registered_models(max_results=1)  # a store without a registry would fail at the end
            return client, _experiment_id(client, uri)
    except (MlflowException, ImportError) as error:
        raise PredictorError(
            f"tracking needs a URI of an MLflow store with a registry, got {uri}: {_first_line(error)}"
        ) from None


def _experiment_id(client: Any, uri: str) -> str:
    """Number of the experiment, created if the store does not have it."""
    from mlflow.exceptions import MlflowException

    if client.get_experiment_by_name(EXPERIMENT) is None:
        try:
            client.create_experiment(EXPERIMENT, artifact_location=_artifact_location(uri))
        except MlflowException as error:  # another process created it first
            if error.error_code != _EXISTS:
                raise
    return str(client.get_experiment_by_name(EXPERIMENT).experiment_id)


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
    path = _database(uri)
    try:
        check_output_file(path)
        if path.exists() and path.stat().st_size:
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
                connection.execute("SELECT name FROM sqlite_master").fetchall()
    except (OSError, StepsightError, sqlite3.Error) as error:
        return str(error)
    return ""


def _database(uri: str) -> Path:
    """File of an sqlite URL."""
    return Path(uri.partition("://")[2].partition("?")[0].removeprefix("/") or ".")


@contextmanager
def _impatient() -> Iterator[None]:
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
def _quiet() -> Iterator[None]:
    """Suppress the messages of a new store that creates its tables."""
    logger = logging.getLogger("mlflow.store.db.utils")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _end_killed(client: Any, experiment_id: str) -> None:
    """End the runs whose process on this machine ended without closing them."""
    for run in client.search_runs([experiment_id], "attributes.status = 'RUNNING'"):
        if is_gone(run.data.tags.get(PROCESS, "")):
            client.set_terminated(run.info.run_id, "KILLED")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].strip()[:300]


def load_registered(hardware: str, uri: str, alias: str = ALIAS) -> Predictor:
    """Load a hardware's predictor from the registry.

    Raises:
        PredictorError: If none is registered under the alias.
    """
    from mlflow.exceptions import MlflowException

    client = _client(uri)
    try:
        return _download(client, client.get_model_version_by_alias(model_name(hardware), alias))
    except (MlflowException, OSError) as error:
        raise PredictorError(
            f"the registry at {uri} must hold {model_name(hardware)}@{alias}, got: {_first_line(error)}"
        ) from None


def load_model_uri(uri: str) -> Predictor:
    """Load a registered predictor by MLflow's names: ``models:/h100@champion``, ``models:/stepsight-h100-sxm-80gb/3``.

    The name is a registered model's, or a hardware's.  The registry is the one that ``MLFLOW_REGISTRY_URI`` or
    ``MLFLOW_TRACKING_URI`` names, else ``mlflow.db`` in the current folder.

    Raises:
        PredictorError: If there is no registry, or it holds no such version.
    """
    from mlflow.exceptions import MlflowException

    parts = re.fullmatch(r"models:/+([^@/]+)(?:([@/])([^@/]+))?", uri)
    if parts is None:
        raise PredictorError(f"a registered predictor is models:/NAME@ALIAS or models:/NAME/VERSION, got {uri!r:.80}")
    name, mark, which = parts.groups()
    store = os.environ.get("MLFLOW_REGISTRY_URI") or os.environ.get("MLFLOW_TRACKING_URI")
    if not store:
        if not Path("mlflow.db").is_file():
            raise PredictorError(f"{uri} needs a registry: set MLFLOW_TRACKING_URI, as sqlite:///runs/mlflow.db")
        store = "sqlite:///mlflow.db"
    check_store(store)
    client, tried = _client(store), dict.fromkeys([name, model_name(name), model_name(canonical_hardware(name))])
    problem = ""
    for registered in tried:
        try:
            if mark == "/":
                found = client.get_model_version(registered, which)
            else:
                found = client.get_model_version_by_alias(registered, which or ALIAS)
            return _loaded(store, str(found.name), str(found.version))
        except (MlflowException, OSError) as error:
            problem = problem or _first_line(error)
    raise PredictorError(f"the registry at {store} must hold {uri} ({' or '.join(tried)}), got: {problem}")


@cached(maxsize=8)
def _loaded(store: str, name: str, version: str) -> Predictor:
    """A registered version; an alias moves, a version never changes."""
    client = _client(store)
    return _download(client, client.get_model_version(name, version))


def _client(uri: str) -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow

        if uri.startswith("sqlite:///"):
            _database(uri).parent.mkdir(parents=True, exist_ok=True)
        return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def _artifact_location(uri: str) -> str | None:
    """Artifact folder next to a SQLite database; a server has its own."""
    if not uri.startswith("sqlite:///"):
        return None
    return (_database(uri).resolve().parent / "mlartifacts").as_uri()
