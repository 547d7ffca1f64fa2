"""Predict the time of one training iteration of a large hybrid-parallel deep-learning job.

>>> from stepsight import Job, predict
>>> predict(Job.from_file("examples/gpt3-175b-1024.toml")).iteration_time_s  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepsight.dataset.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec

if TYPE_CHECKING:
    from stepsight.training.predictor.prediction import Prediction, predict, predict_many
    from stepsight.training.predictor.predictor import Predictor

__version__ = "0.1.0"
__all__ = [
    "BatchSpec",
    "ClusterSpec",
    "Job",
    "ModelSpec",
    "ParallelSpec",
    "Prediction",
    "Predictor",
    "predict",
    "predict_many",
]

_LAZY = {
    "Prediction": "stepsight.training.predictor.prediction",
    "Predictor": "stepsight.training.predictor.predictor",
    "predict": "stepsight.training.predictor.prediction",
    "predict_many": "stepsight.training.predictor.prediction",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
