"""Training runs and predictors in MLflow: parameters, data digests, errors, the folder, and the champion."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stepsight.dataset.base.errors import PredictorError
from stepsight.training.corrections.intervals import Intervals
from stepsight.training.predictor.model_tables import check_output
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.tracking.store import (
    ALIAS,
    ARTIFACT,
    check_store,
    create_store,
    database_file,
    download,
    first_line,
    impatient,
    is_missing,
    model_name,
    store_client,
    store_lock,
)

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

    def log_data(self, name: str, digest: str, context: str) -> None:
        """Identify the data by its digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(name=name, digest=digest, source_type="local", source="{}")
        tag = InputTag("mlflow.data.context", context)
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, [tag])])

    def finish(self, predictor: Predictor, out: Path, compare: Compare) -> None:
        """Log and publish a trained predictor that is saved in ``out``; ``compare`` as in ``publish``."""
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
            if value:
                self.log_data(name, value, "training")
        self.publish(out, hardware, tags, compare)

    def publish(
        self, folder: Path, hardware: str, tags: Mapping[str, str], compare: Compare = lambda champion: None
    ) -> str:
        """Store a predictor as a model that ``mlflow.pyfunc.load_model`` serves, and register it; returns its version.
        The first of a hardware becomes its champion, a later one only if it is better on data that neither saw
        (``compare``: the errors of both, None: nothing judges); else it is the challenger.
        """
        with TemporaryDirectory() as place:
            _save_model(folder, Path(place) / ARTIFACT)
            self._client.log_artifacts(self.run_id, str(Path(place) / ARTIFACT), ARTIFACT)
        name = model_name(hardware)
        source = f"{self._client.get_run(self.run_id).info.artifact_uri}/{ARTIFACT}"
        with store_lock(self._uri):  # versions are numbered consecutively
            _create(self._client.create_registered_model, name, {"hardware": hardware})
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
        champion = download(client, client.get_model_version_by_alias(name, ALIAS))
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
        say(f"there is no MLflow store {uri}: creating it")
    return uri, say


@contextmanager
def tracked(uri: str, run_name: str) -> Iterator[TrackedRun]:
    """An MLflow run, ended as what the block did; a store that cannot be used is a ``PredictorError`` before it."""
    from mlflow.exceptions import MlflowException

    client, experiment_id = _open(uri)
    run_id = client.create_run(experiment_id, run_name=run_name).info.run_id

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


def _open(uri: str) -> tuple[Any, str]:
    """Client and experiment of a reachable store; a database has the experiment's artifacts in a folder beside it."""
    from mlflow.exceptions import MlflowException

    check_store(uri)
    try:
        with store_lock(uri), impatient():  # two processes that create a store break each other's migrations
            create_store(uri)
            client = store_client(uri)
            client.search_registered_models(max_results=1)  # a store without a registry would fail at the end
            if client.get_experiment_by_name(EXPERIMENT) is None:
                beside = (database_file(uri).resolve().parent / "mlartifacts").as_uri()
                _create(client.create_experiment, EXPERIMENT, beside if uri.startswith("sqlite:///") else None)
            return client, str(client.get_experiment_by_name(EXPERIMENT).experiment_id)
    except (MlflowException, ImportError) as error:
        raise PredictorError(
            f"tracking needs a URI of an MLflow store with a registry, got {uri}: {first_line(error)}"
        ) from None


def _create(make: Callable[..., Any], *arguments: Any) -> None:
    """Create something in a store, unless another process created it first."""
    from mlflow.exceptions import MlflowException

    try:
        make(*arguments)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
