"""How far the layers of a regressor reach."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from stepsight.training.corrections.corrector import FADE, Neighbours, Support
from stepsight.training.regression.regressor import Physics, Regressor, SignatureRows

LOW, HIGH = np.log([10.0, 1.0]), np.log([1000.0, 1.0])  # nothing varied along the second axis


@dataclass(frozen=True)
class Constant:
    """Trees that say one thing."""

    share: float = 1.0

    def predict(self, features: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        return np.full(len(features), 0.5)


def _regressor(*, many: bool) -> Regressor:
    near = {} if many else {"k": Neighbours(1.0, np.zeros((0, 3)), np.zeros(0))}
    physics = {"k": Physics(np.zeros(1), np.zeros(1))}
    return Regressor(physics, {"f": Constant()}, near, {"k": Support(LOW, HIGH)})  # type: ignore[dict-item]


def _said(regressor: Regressor, size: float, other: float = 1.0) -> float:
    """What the trees add to physics, which says one second."""
    rows = SignatureRows(
        ("k",), ("f",), np.ones((1, 1)), np.ones(1), (np.log([size, other]),), np.zeros((1, 1)), ("a",)
    )
    return float(regressor.log_without_neighbours(rows)[0])


@pytest.mark.parametrize("many", [True, False])
def test_trees_say_all_within_what_was_measured(many: bool) -> None:
    assert _said(_regressor(many=many), 100.0) == pytest.approx(0.5)
    assert _said(_regressor(many=many), 100.0, other=9.0) == pytest.approx(0.5)


@pytest.mark.parametrize("many", [True, False])
def test_what_is_smaller_than_all_is_left_to_physics(many: bool) -> None:
    assert _said(_regressor(many=many), 1.0) == pytest.approx(0.5 * 0.1 ** (1 / FADE))


def test_what_is_larger_than_all_of_a_large_table_runs_as_the_largest() -> None:
    assert _said(_regressor(many=True), 1e6) == pytest.approx(0.5)
    assert _said(_regressor(many=False), 1e6) < 0.01
