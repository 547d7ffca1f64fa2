"""The predictor of a row's hardware."""

from __future__ import annotations

from collections.abc import Callable

from stepsight.training.predictor.prediction import ROOFLINE, named_predictor
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import shipped_predictor, shipped_without

PredictorOf = Callable[[str], Predictor | None]  # of a hardware's name; None: hardware facts answer


def without_source(predictor: Predictor | None, source: str) -> Predictor | None:
    """A shipped predictor without what it learned from one source of published runs; other predictors unchanged."""
    if predictor is None or predictor is not shipped_predictor(predictor.hardware.name):
        return predictor
    return shipped_without(predictor.hardware.name, source)


def predictor_by_hardware(asked: Predictor | str | None = None) -> PredictorOf:
    """The given predictor (or hardware facts) for every row; if none is given, the shipped one for each hardware.

    Raises:
        PredictorError: If the package has no predictor of that name.
    """
    if asked is None:
        return shipped_predictor
    if asked == ROOFLINE:
        return lambda hardware: None
    predictor = named_predictor(asked) if isinstance(asked, str) else asked
    return lambda hardware: predictor
