"""Training runs and predictors in MLflow: parameters, data digests, errors, the folder, and the champion.

Also whether a store of MLflow can be used, its client, and predictors by name, as of its registry.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sqlite3
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import PredictorError, StepsightError
from stepsight.dataset.base.files import check_output_file, set_aside
from stepsight.dataset.hardware.hardware import canonical_hardware
from stepsight.dataset.harness.base.atomic_files import locked
from stepsight.training.corrections.intervals import Intervals
from stepsight.training.predictor.model_tables import MANIFEST, REGISTERED, check_output
from stepsight.training.predictor.predictor import Predictor, shipped_names
from stepsight.training.shipped.catalogue import shipped_predictor

EXPERIMENT = "stepsight"
JOB = "job"  # input column of a served model: a job's tables as JSON, as ``Job.to_json`` writes them
ANSWERS = ("iteration_time_s", "low_s", "high_s", "tokens_per_s", "peak_memory_bytes")
CHALLENGER = "challenger"
Compare = Callable[[Predictor], tuple[float, float] | None]
_PARAMS = ("seed", "num_ops", "num_collectives", "samples", "like")  # of the manifest


def default_uri(out: Path) -> str:
    """An SQLite database next to a predictor's folder."""
    return f"sqlite:///{(out.resolve().parent / 'mlflow.db')}"


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

    def finish(self, predictor: Predictor, out: Path, compare: Compare) -> None:
        """Log and publish a trained predictor that is saved in ``out``; ``compare`` as in ``publish``."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        manifest, hardware = predictor.manifest, predictor.hardware.name
        params = {"hardware": hardware, **{key: manifest[key] for key in _PARAMS if key in manifest}}
        if "runs" in manifest:
            params |= {
                "num_runs": len(manifest["runs"]),
                "context_form": manifest["context"].get("form", "none"),
                "families_with_trees": " ".join(sorted(predictor.kernel.regressor.trees)) or "none",
                "interval_coverage": predictor.intervals.coverage if predictor.intervals != Intervals() else 0.0,
            }
        metrics = {key.replace("@", "_"): value for key, value in manifest["metrics"].items()}
        for name, figures in manifest.get("held_out", {}).items():
            metrics[f"held_out_{name.replace('/', '_')}_mape_percent"] = figures["mape"]
        tags = {"hardware": hardware, "digest": manifest["digest"]}
        tags |= {f"version.{name}": value for name, value in manifest["versions"].items()}
        self.log(params, metrics, tags)
        files = {name[:200]: file["digest"] for name, file in list(manifest.get("sources", {}).items())[:50]}
        for name, value in manifest.get("data_digests", files).items():
            if value:  # identifies the data
                data, tag = Dataset(name, value, "local", "{}"), InputTag("mlflow.data.context", "training")
                self._client.log_inputs(self.run_id, [DatasetInput(data, [tag])])
        self.publish(out, hardware, tags, compare)

    def publish(
        self, folder: Path, hardware: str, tags: Mapping[str, str], compare: Compare = lambda champion: None
    ) -> str:
        """Store a predictor as a model that ``mlflow.pyfunc.load_model`` serves, and register it; returns its version.
        The first of a hardware becomes its champion, a later one only if it is better on data that neither saw
        (``compare``: the errors of both, None: nothing judges); else it is the challenger.
        """
        with TemporaryDirectory() as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mlflow import pyfunc
            from mlflow.exceptions import MlflowException
            from mlflow.models import ModelSignature
            from mlflow.types import ColSpec, DataType, Schema

            inputs = Schema([ColSpec(DataType.string, JOB)])
            outputs = Schema([ColSpec(DataType.double, answer) for answer in ANSWERS])
            pyfunc.save_model(  # in MLflow's own form: loading it imports a module of the package
                str(Path(place) / ARTIFACT),
                loader_module="stepsight.training.served_model",
                data_path=str(folder),
                signature=ModelSignature(inputs=inputs, outputs=outputs),
                pip_requirements=[f"stepsight=={version('stepsight')}"],
            )
            self._client.log_artifacts(self.run_id, str(Path(place) / ARTIFACT), ARTIFACT)
        name = model_name(hardware)
        source = f"{self._client.get_run(self.run_id).info.artifact_uri}/{ARTIFACT}"
        with store_lock(self._uri):  # versions are numbered consecutively
            _create(self._client.create_registered_model, name, {"hardware": hardware})
            made = self._client.create_model_version(name, source, self.run_id, dict(tags))
            champion, alias, told = None, ALIAS, dict[str, str]()
            with suppress(MlflowException, OSError, PredictorError):  # none yet, or one that this version cannot read
                champion = download(self._client, self._client.get_model_version_by_alias(name, ALIAS))
            if champion is not None:
                alias, told = CHALLENGER, {"judged": "nothing that both can be judged by"}
                if (errors := compare(champion)) is not None:
                    alias = ALIAS if errors[0] < errors[1] else CHALLENGER
                    told = {"error_percent": f"{errors[0]:.3f}", "champion_error_percent": f"{errors[1]:.3f}"}
            for key, value in told.items():
                self._client.set_model_version_tag(name, made.version, key, value)
            self._client.set_registered_model_alias(name, alias, made.version)
        return str(made.version)


def begin_training(out: Path, stated: str | None, progress: bool) -> tuple[str, Callable[[str], None]]:
    """Check, before long work, that a predictor can be written and tracked (by default beside ``out``); returns the
    store's URI, and what reports progress with the seconds since the beginning.
    """
    started = time.monotonic()

    def say(text: str) -> None:
        if progress:
            print(f"  train: [{time.monotonic() - started:4.1f} s] {text}", file=sys.stderr, flush=True)

    uri = stated or default_uri(out)
    check_output(out)
    check_store(uri)
    if stated and is_missing(uri):
        check_output_file(database_file(uri))
        say(f"there is no MLflow store {uri}: creating it")
    return uri, say


@contextmanager
def tracked(uri: str, run_name: str) -> Iterator[TrackedRun]:
    """An MLflow run, ended as what the block did; a store that cannot be used is a ``PredictorError`` before it."""
    from mlflow.exceptions import MlflowException

    check_store(uri)
    try:
        with store_lock(uri), impatient():  # two processes that create a store break each other's migrations
            create_store(uri)
            client = store_client(uri)
            client.search_registered_models(max_results=1)  # a store without a registry would fail at the end
            if client.get_experiment_by_name(EXPERIMENT) is None:
                beside = (database_file(uri).resolve().parent / "mlartifacts").as_uri()  # of a database
                _create(client.create_experiment, EXPERIMENT, beside if uri.startswith("sqlite:///") else None)
            experiment = client.get_experiment_by_name(EXPERIMENT)
    except (MlflowException, ImportError) as error:
        rule = "tracking needs a URI of an MLflow store with a registry"
        raise PredictorError(f"{rule}, got {uri}: {first_line(error)}") from None
    run_id = client.create_run(experiment.experiment_id, run_name=run_name).info.run_id

    def end(status: str) -> None:
        with suppress(MlflowException):  # an unreachable store must not hide the original error
            client.set_terminated(run_id, status)

    try:
        yield TrackedRun(run_id, client, uri)
        client.set_terminated(run_id, "FINISHED")
    except MlflowException as error:
        end("FAILED")
        raise PredictorError(f"tracking needs a persistent store, got {uri}: {first_line(error)}") from None
    except BaseException as error:
        end("KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED")
        raise


def reopened(uri: str, run_id: str) -> TrackedRun:
    """A finished run, to add later results."""
    return TrackedRun(run_id, store_client(uri), uri)


def _create(make: Callable[..., Any], *arguments: Any) -> None:
    """Create something in a store, unless another process created it first."""
    from mlflow.exceptions import MlflowException

    try:
        make(*arguments)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


PATIENCE_S = 5
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}


def check_store(uri: str) -> None:
    """Refuse a store that cannot be reached, before long work: MLflow itself would retry for minutes."""
    try:
        if uri.startswith("sqlite:"):
            path = database_file(uri)
            check_output_file(path, made=True)
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

        for name in ("mlflow.store.db.utils", "alembic"):  # a new store tells of its tables
            logging.getLogger(name).setLevel(logging.WARNING)
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
    """Create the tables of an SQLite store that is not there, under its lock: whole, or not at all.  MLflow migrates a
    new database in many steps; one that was killed between them refuses every later use.
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

    ``name``: as ``runs/mine``, ``h100-sxm``, ``h100-sxm-96gb`` or ``models:/h100@champion``; a folder goes before, and
    is read again if its files changed.  A shipped one is the same that ``predict`` takes by default for its hardware.
    Raises ``PredictorError`` if there is none, or as ``Predictor.load`` and ``load_model_uri``.
    """
    if str(name).startswith(REGISTERED):
        return load_model_uri(str(name))
    folder = Path(name)
    if folder.is_dir():
        facts = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(folder.iterdir())]
        return _read(folder.resolve(), tuple(facts))
    found = None if folder.exists() else shipped_predictor(str(name))
    if found is None and not folder.exists() and set_aside(folder) is None:
        rule = f"a predictor is a folder with manifest.json, or {', '.join(shipped_names())}, their hardware"
        raise PredictorError(f"{rule}, roofline, physics or {REGISTERED}NAME@ALIAS, got {str(name)!r:.80}")
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
