"""Names and version of features: a model says which features it reads, and gets those columns.

A name always means one formula: a feature with another formula gets another name.  ``FEATURE_VERSION`` goes up
only where that cannot be, and then predictors of earlier versions are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from stepsight.dataset.base.errors import PredictorError

FEATURE_VERSION = 1


def columns_of(asked: Sequence[str], known: Sequence[str], model: str) -> list[int]:
    """Index in ``known`` of each feature that a model reads.

    Raises:
        PredictorError: If some are not known; the message names them.
    """
    check_known(asked, known, model)
    place = {name: index for index, name in enumerate(known)}
    return [place[name] for name in asked]


def check_known(asked: Collection[str], known: Collection[str], model: str) -> None:
    """Check that this version computes every feature that a model reads.

    Raises:
        PredictorError: If it does not; the message names those that are missing.
    """
    missing = sorted(set(asked) - set(known))
    if missing:
        raise PredictorError(
            f"{model} reads features that this version does not have: {', '.join(missing)}: register the kinds that "
            "they belong to, use the version that it was trained with, or train it again"
        )


def check_version(saved: Any, model: str) -> None:
    """Check the version of features that a model was saved with.

    Raises:
        PredictorError: If it is another one.
    """
    if saved != FEATURE_VERSION:
        raise PredictorError(
            f"{model} must read features of version {FEATURE_VERSION}, got version {saved!r:.40}: use the version of "
            "stepsight that it was trained with, or train it again"
        )
