"""Terms, kinds and features of the regressors of a saved predictor, and whether this version has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.kinds import CollectiveKind, OpKind
from stepsight.features.named_columns import FEATURE_VERSION, check_version

KEY = "features"
Kinds = Mapping[str, OpKind] | Mapping[str, CollectiveKind]


def kind_of(label: str) -> str:
    """The kind in a regressor's label: ``linear`` of ``linear/fp8``."""
    return label.split("/")[0]


def described(labels: Iterable[str], terms: Sequence[str], kinds: Kinds) -> dict[str, Any]:
    """The saved description of a regressor's features.

    Args:
        labels: Of the measured kinds.
        terms: Names of the physical terms.
        kinds: Records by name.
    """
    measured = sorted(set(map(kind_of, labels)))
    codes = {name: kinds[name].code for name in measured}
    return {KEY: {"version": FEATURE_VERSION, "terms": list(terms), "codes": codes}}


def check_described(table: Mapping[str, Any], terms: Sequence[str], kinds: Kinds) -> None:
    """Check a saved regressor against this version; predictors without this description have version 1.

    Args:
        table: What was saved.
        terms: Names of the physical terms that this version computes.
        kinds: Records of the kinds that there are.

    Raises:
        PredictorError: If it reads other terms or features, or kinds that are not there or have other codes.
    """
    said = table.get(KEY, {})
    check_version(said.get("version", 1), "a regressor")
    if list(said.get("terms", terms)) != list(terms):
        raise PredictorError(
            f"a regressor must be fitted to the terms {', '.join(terms)}, got {', '.join(map(str, said['terms']))}: "
            "train the predictor again"
        )
    missing = sorted({kind_of(label) for label in table.get("physics", ())} - set(kinds))
    if missing:
        raise PredictorError(
            f"a predictor was trained on kinds that this version does not have: {', '.join(missing)}: register them "
            "(stepsight.dataset.kinds) or train the predictor again"
        )
    moved = [f"{name} {code} != {kinds[name].code}" for name, code in said.get("codes", {}).items()
             if name in kinds and code != kinds[name].code]  # fmt: skip
    if moved:
        raise PredictorError(
            f"codes of kinds must be those that the predictor was trained with, got {', '.join(moved)}: register the "
            "kinds with their former codes or train the predictor again"
        )
