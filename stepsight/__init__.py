"""Predict the time of one training iteration of a large hybrid-parallel deep-learning job.

>>> import stepsight
>>> stepsight.predict("examples/gpt3-175b-1024.toml")  # doctest: +SKIP
Prediction(21.58 s, 18.92 to 24.62 s, 24.7 GB, gpt3-175b on 1024 x a100-sxm-80gb)

Ask with ``predict``, ``predict_many`` and ``search``; learn with ``train`` and ``calibrate``; compare predictions with
measured runs with ``evaluate``; read and write configurations of training frameworks with ``read_configs`` and
``write_config``.  ``step`` marks the end of a training step in a script of yours.  ``help`` of each shows its
arguments and an example.

A job is a ``Job``, the tables of one as a dict, or the path of a job file; ``Job`` is made of ``ModelSpec``,
``ParallelSpec``, ``BatchSpec``, ``OptimizerSpec`` and ``ClusterSpec`` (with ``Straggler``, ``SlowLink`` and
``OtherDevices``).  Every error that a user can correct is a ``StepsightError``.  ``clear_caches`` frees memory.

The public interface is the names in ``__all__``, ``stepsight.registries`` (where you add parts of your own),
``stepsight.testing`` (contracts that check them) and the ``stepsight`` command.  Every other module is private: it
may change in any release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepsight.dataset.base.caching import clear_caches
    from stepsight.dataset.base.errors import (
        CaptureError,
        CollectError,
        JobError,
        PredictorError,
        StepsightError,
        TableError,
        TraceError,
    )
    from stepsight.dataset.configs.config_job import ConfigJob, read_configs
    from stepsight.dataset.configs.drafts import Given
    from stepsight.dataset.configs.formats import write_config
    from stepsight.dataset.harness.scripts.step_marks import step
    from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, OptimizerSpec, ParallelSpec
    from stepsight.dataset.job.specs import OtherDevices, SlowLink, Straggler
    from stepsight.experiments.calibration.calibrate_runs import CalibrationReport, calibrate
    from stepsight.experiments.evaluation.evaluate import Evaluation, evaluate
    from stepsight.experiments.search.choices import Choice, SearchResult
    from stepsight.experiments.search.search import search
    from stepsight.experiments.search.settings import Goal, Scenarios, SearchSettings
    from stepsight.experiments.search.space import Space
    from stepsight.training.fitting.train_runs import train
    from stepsight.training.prediction.ask_many import predict_many
    from stepsight.training.prediction.prediction import Prediction, predict
    from stepsight.training.predictor.predictor import Predictor

__version__ = "0.1.0"
__all__ = [
    "BatchSpec",
    "CalibrationReport",
    "CaptureError",
    "Choice",
    "ClusterSpec",
    "CollectError",
    "ConfigJob",
    "Evaluation",
    "Given",
    "Goal",
    "Job",
    "JobError",
    "ModelSpec",
    "OptimizerSpec",
    "OtherDevices",
    "ParallelSpec",
    "Prediction",
    "Predictor",
    "PredictorError",
    "Scenarios",
    "SearchResult",
    "SearchSettings",
    "SlowLink",
    "Space",
    "StepsightError",
    "Straggler",
    "TableError",
    "TraceError",
    "calibrate",
    "clear_caches",
    "evaluate",
    "predict",
    "predict_many",
    "read_configs",
    "search",
    "step",
    "train",
    "write_config",
]

# Modules are imported when a name of theirs is first used, so that ``import stepsight`` takes milliseconds.
_MODULES = {
    "dataset.base.caching": ("clear_caches",),
    "dataset.configs.config_job": ("ConfigJob", "read_configs"),
    "dataset.configs.drafts": ("Given",),
    "dataset.configs.formats": ("write_config",),
    "dataset.base.errors": (
        "CaptureError",
        "CollectError",
        "JobError",
        "PredictorError",
        "StepsightError",
        "TableError",
        "TraceError",
    ),
    "dataset.harness.scripts.step_marks": ("step",),
    "dataset.job.job": ("BatchSpec", "ClusterSpec", "Job", "ModelSpec", "OptimizerSpec", "ParallelSpec"),
    "dataset.job.specs": ("OtherDevices", "SlowLink", "Straggler"),
    "experiments.calibration.calibrate_runs": ("CalibrationReport", "calibrate"),
    "experiments.evaluation.evaluate": ("Evaluation", "evaluate"),
    "experiments.search.choices": ("Choice", "SearchResult"),
    "experiments.search.search": ("search",),
    "experiments.search.settings": ("Goal", "Scenarios", "SearchSettings"),
    "experiments.search.space": ("Space",),
    "training.fitting.train_runs": ("train",),
    "training.prediction.ask_many": ("predict_many",),
    "training.prediction.prediction": ("Prediction", "predict"),
    "training.predictor.predictor": ("Predictor",),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("optuna", "registries", "testing"):
        return import_module(f"stepsight.{name}")
    for module, names in _MODULES.items():
        if name in names:
            try:
                value = globals()[name] = getattr(import_module(f"stepsight.{module}"), name)
            except ModuleNotFoundError as error:
                from stepsight.dataset.base.errors import missing_extra

                raise ModuleNotFoundError(missing_extra(error) or str(error), name=error.name) from None
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
