"""Training runs and predictors in MLflow: parameters, data digests, errors, the folder, and who is champion."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsight.dataset.errors import PredictorError
from stepsight.training.predictor import Predictor

EXPERIMENT = "stepsight"
ALIAS = "champion"
ARTIFACT = "predictor"


def default_uri(out: Path) -> str:
    """An sqlite database beside a predictor's folder."""
    return f"sqlite:///{(out.resolve().parent / 'mlflow.db')}"


def model_name(hardware: str) -> str:
    """Name in the registry of a hardware's predictors."""
    return f"stepsight-{hardware}"


@dataclass
class TrackedRun:
    """An open MLflow run."""

    run_id: str
    _client: Any

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
        """Name the data by its digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(name=name, digest=digest, source_type="local", source="{}")
        tag = InputTag("mlflow.data.context", context)
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, [tag])])

    def publish(self, folder: Path, hardware: str, tags: Mapping[str, str]) -> str:
        """Store a predictor's folder and make it the hardware's champion; returns its version."""
        from mlflow.exceptions import MlflowException

        self._client.log_artifacts(self.run_id, str(folder), ARTIFACT)
        name = model_name(hardware)
        try:
            self._client.create_registered_model(name, {"hardware": hardware})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{self._client.get_run(self.run_id).info.artifact_uri}/{ARTIFACT}"
        version = self._client.create_model_version(name, source, self.run_id, dict(tags))
        self._client.set_registered_model_alias(name, ALIAS, version.version)
        return str(version.version)


@contextmanager
def tracked(uri: str, run_name: str) -> Iterator[TrackedRun]:
    """An MLflow run that ends as ``FINISHED``, or ``FAILED`` if the block raises."""
    from mlflow.exceptions import MlflowException

    try:
        client = _client(uri)
        client.search_registered_models(max_results=1)  # a store without a registry is of no use at the end
        experiment = client.get_experiment_by_name(EXPERIMENT)
    except MlflowException as error:
        reason = str(error).splitlines()[0]
        raise PredictorError(
            f"tracking needs a URI of an MLflow store with a registry, got {uri}: {reason.strip()}"
        ) from None
    if experiment is None:
        location = _artifact_location(uri)
        experiment_id = client.create_experiment(EXPERIMENT, artifact_location=location)
    else:
        experiment_id = experiment.experiment_id
    run = client.create_run(experiment_id, run_name=run_name)
    try:
        yield TrackedRun(run.info.run_id, client)
    except BaseException:
        client.set_terminated(run.info.run_id, "FAILED")
        raise
    client.set_terminated(run.info.run_id, "FINISHED")


def load_registered(hardware: str, uri: str, alias: str = ALIAS) -> Predictor:
    """Load a hardware's predictor from the registry.

    Raises:
        PredictorError: If none is registered under the alias.
    """
    from mlflow.exceptions import MlflowException

    client = _client(uri)
    try:
        version = client.get_model_version_by_alias(model_name(hardware), alias)
        folder = client.download_artifacts(version.run_id, ARTIFACT)
    except (MlflowException, OSError) as error:
        raise PredictorError(
            f"the registry at {uri} must hold {model_name(hardware)}@{alias}, got: {str(error).splitlines()[0]}"
        ) from None
    return Predictor.load(folder)


def _client(uri: str) -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow

        if uri.startswith("sqlite:///"):
            Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def _artifact_location(uri: str) -> str | None:
    """Beside an sqlite database; a server knows its own."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts").as_uri()
