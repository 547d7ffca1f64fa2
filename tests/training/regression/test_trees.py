import lightgbm
import numpy as np
import pytest

from stepsight.dataset.errors import PredictorError
from stepsight.training.regression.trees import Trees, fit_trees

NAMES = ("a", "b", "c")


def _fitted() -> tuple[Trees, np.ndarray]:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(80, 3))
    return fit_trees(features, np.sign(features[:, 0]) * 0.2, NAMES, seed=0), features


def test_walking_the_text_equals_lightgbm() -> None:
    trees, features = _fitted()
    expected = lightgbm.Booster(model_str=trees.text).predict(features * 1.3)
    assert trees.predict(features * 1.3, NAMES) == pytest.approx(np.asarray(expected), abs=1e-12)


def test_fitting_is_deterministic() -> None:
    assert _fitted()[0].text == _fitted()[0].text


def test_a_constant_target_gives_a_model_without_splits() -> None:
    trees = fit_trees(np.random.default_rng(0).normal(size=(30, 2)), np.zeros(30), ("a", "b"), seed=0)
    assert np.abs(trees.predict(np.zeros((2, 2)), ("a", "b"))).max() < 1e-12


@pytest.mark.parametrize(
    ("old", "new"), [("leaf_value=", "x="), ("left_child=", "left_child=0 "), ("threshold=", "y=")]
)
def test_a_broken_text_is_refused(old: str, new: str) -> None:
    trees, _ = _fitted()
    assert old in trees.text
    with pytest.raises(PredictorError, match="LightGBM text"):
        Trees(trees.text.replace(old, new)).check(NAMES)
