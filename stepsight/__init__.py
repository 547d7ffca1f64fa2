"""Predict the time of one training iteration of a large hybrid-parallel deep-learning job.

>>> import stepsight
>>> stepsight.predict("examples/gpt3-175b-1024.toml")  # doctest: +SKIP
Prediction(21.55 s, 20.30 to 24.03 s, 24.7 GB, gpt3-175b on 1024 x a100-sxm-80gb)

Ask with ``predict``, ``predict_many`` and ``search``; learn with ``train`` and ``calibrate``; compare predictions with
measured runs with ``evaluate``; read and write configurations of training frameworks with ``read_configs`` and
``write_config``.  ``help`` of each shows its arguments and an example.  ``step`` marks the end of a training step in a
script of yours, and ``clear_caches`` frees memory.

A job is a ``Job``, the tables of one as a dict, or the path of a job file.  A ``Program`` is the graph of what one rank
executes; it can be edited, and ``predict`` takes it too.  A ``TensorProgram`` is a model in a file, which data, tensor
and pipeline parallelism distribute; ``model_grid`` tries their products.  Every error that a user can correct is a
``StepsightError``.

The public interface is the names in ``__all__``, ``stepsight.registries`` (parts of your own), ``stepsight.testing``
(contracts that check them) and the ``stepsight`` command.  All else is private: it may change in any release.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepsight.dataset.base.caching import clear_caches as clear_caches
    from stepsight.dataset.base.errors import CaptureError as CaptureError
    from stepsight.dataset.base.errors import CollectError as CollectError
    from stepsight.dataset.base.errors import JobError as JobError
    from stepsight.dataset.base.errors import PredictorError as PredictorError
    from stepsight.dataset.base.errors import StepsightError as StepsightError
    from stepsight.dataset.base.errors import TableError as TableError
    from stepsight.dataset.base.errors import TraceError as TraceError
    from stepsight.dataset.configs.drafts import Given as Given
    from stepsight.dataset.configs.formats import ConfigJob as ConfigJob
    from stepsight.dataset.configs.formats import read_configs as read_configs
    from stepsight.dataset.configs.formats import write_config as write_config
    from stepsight.dataset.graph.program import Program as Program
    from stepsight.dataset.harness.scripts.step_marks import step as step
    from stepsight.dataset.job.job import BatchSpec as BatchSpec
    from stepsight.dataset.job.job import ClusterSpec as ClusterSpec
    from stepsight.dataset.job.job import Job as Job
    from stepsight.dataset.job.job import ModelSpec as ModelSpec
    from stepsight.dataset.job.job import OptimizerSpec as OptimizerSpec
    from stepsight.dataset.job.job import ParallelSpec as ParallelSpec
    from stepsight.dataset.job.specs import OtherDevices as OtherDevices
    from stepsight.dataset.job.specs import SlowLink as SlowLink
    from stepsight.dataset.job.specs import Straggler as Straggler
    from stepsight.dataset.tensors.program import TensorProgram as TensorProgram
    from stepsight.experiments.calibration.calibrate_runs import CalibrationReport as CalibrationReport
    from stepsight.experiments.calibration.calibrate_runs import calibrate as calibrate
    from stepsight.experiments.evaluation.evaluate import Evaluation as Evaluation
    from stepsight.experiments.evaluation.evaluate import evaluate as evaluate
    from stepsight.experiments.search.choices import Choice as Choice
    from stepsight.experiments.search.choices import SearchResult as SearchResult
    from stepsight.experiments.search.model_grid import ModelGrid as ModelGrid
    from stepsight.experiments.search.model_grid import model_grid as model_grid
    from stepsight.experiments.search.search import search as search
    from stepsight.experiments.search.settings import Goal as Goal
    from stepsight.experiments.search.settings import Scenarios as Scenarios
    from stepsight.experiments.search.settings import SearchSettings as SearchSettings
    from stepsight.experiments.search.settings import Space as Space
    from stepsight.training.fitting.train_runs import train as train
    from stepsight.training.prediction.ask_many import predict as predict
    from stepsight.training.prediction.ask_many import predict_many as predict_many
    from stepsight.training.prediction.prediction import Prediction as Prediction
    from stepsight.training.predictor.predictor import Predictor as Predictor

__version__ = "0.1.0"
# The imports above say what is public.  A module is imported when a name of it is first used, so that ``import
# stepsight`` takes milliseconds.
_PUBLIC = re.compile(r"^    from (stepsight\.[\w.]+) import (\w+) as", re.M)
_MODULES = {name: module for module, name in _PUBLIC.findall(Path(__file__).read_text("utf-8"))}
if not TYPE_CHECKING:
    __all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("optuna", "registries", "testing"):
        return import_module(f"stepsight.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from stepsight.dataset.base.errors import missing_extra

        raise ModuleNotFoundError(missing_extra(error) or str(error), name=error.name) from None
    return value


def __dir__() -> list[str]:
    return [*sorted(_MODULES), "__version__"]
