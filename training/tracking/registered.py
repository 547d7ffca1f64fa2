"""Predictors of MLflow's registry, by name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.hardware.hardware import canonical_hardware
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.predictor.predictor_manifest import MANIFEST, REGISTERED
from stepsight.training.shipped.catalogue import shipped_predictor
from stepsight.training.tracking.store import check_exists, first_line, store_client

ALIAS = "champion"
ARTIFACT = "predictor"


def model_name(hardware: str) -> str:
    """Name in the registry of a hardware's predictors."""
    return f"stepsight-{hardware}"


def load_predictor(name: str | Path) -> Predictor:
    """Read a predictor: a folder, a shipped one by its name or its hardware's, or one of MLflow's registry.

    A shipped one is the same that ``predict`` takes by default for its hardware.

    Args:
        name: As ``runs/mine``, ``h100-sxm``, ``h100-sxm-96gb`` or ``models:/h100@champion``; a folder goes before.

    Raises:
        PredictorError: As ``Predictor.load`` and ``load_model_uri``.
    """
    if str(name).startswith(REGISTERED):
        return load_model_uri(str(name))
    shipped = None if Path(name).exists() else shipped_predictor(str(name))
    return Predictor.load(name) if shipped is None else shipped


def load_model_uri(uri: str, store: str = "") -> Predictor:
    """Load a registered predictor by MLflow's names: ``models:/h100@champion``, ``models:/stepsight-h100-sxm-80gb/3``.

    Args:
        uri: Its name is a registered model's, or a hardware's.
        store: The registry; empty: the one that ``MLFLOW_REGISTRY_URI`` or ``MLFLOW_TRACKING_URI`` names, else
            ``mlflow.db`` in the current folder.

    Raises:
        PredictorError: If there is no registry, or it holds no such version.
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
    check_exists(store)
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
