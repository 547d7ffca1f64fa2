"""Who answers for a row's hardware."""

from __future__ import annotations

from stepsight.experiments.evaluation.evaluate import PredictorOf
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import shipped_predictor


def predictor_by_hardware(named: Predictor | str | None = None) -> PredictorOf:
    """The named predictor (or roofline) for every row; without one, what is shipped for each hardware, or its facts."""
    if named is None:
        return shipped_predictor
    return lambda hardware: None if isinstance(named, str) else named
