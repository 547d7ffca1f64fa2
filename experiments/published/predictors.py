"""Who answers for a row's hardware."""

from __future__ import annotations

from stepsight.experiments.published.evaluate import PredictorOf
from stepsight.training.predictor import Predictor
from stepsight.training.shipped import shipped_predictor


def predictor_by_hardware(named: Predictor | None = None) -> PredictorOf:
    """The named predictor for every row; without one, what is shipped for each hardware, or hardware facts."""
    return shipped_predictor if named is None else lambda hardware: named
