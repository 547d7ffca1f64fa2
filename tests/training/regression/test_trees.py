import re

import lightgbm
import numpy as np
import pytest

from stepsight.dataset.base.errors import PredictorError
from stepsight.training.regression.trees import Trees, descend, descend_together, fit_trees

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


def test_columns_are_read_by_name() -> None:
    """Whatever order they have, and whatever others there are."""
    trees, features = _fitted()
    moved = np.column_stack([features[:, 2], features[:, 0], np.ones(80), features[:, 1]])
    assert trees.predict(moved, ("c", "a", "new", "b")).tolist() == trees.predict(features, NAMES).tolist()


def test_features_that_no_split_reads_may_be_missing() -> None:
    features = np.random.default_rng(0).normal(size=(80, 1)) * np.array([1.0, 0.0])
    trees = fit_trees(features, np.sign(features[:, 0]) * 0.2, ("a", "b"), seed=0)
    trees.check(("a",))
    assert trees.predict(features[:, :1], ("a",)).tolist() == trees.predict(features, ("a", "b")).tolist()
    with pytest.raises(PredictorError, match="does not have: a: register"):
        trees.check(("b",))


def test_a_split_on_a_feature_without_a_name_is_refused() -> None:
    trees, _ = _fitted()
    assert "feature_names=a b c\n" in trees.text
    with pytest.raises(PredictorError, match="got 0 names and a split on feature"):
        Trees(trees.text.replace("feature_names=a b c\n", "")).check(NAMES)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("right_child", 10**18),
        ("left_child", 1_000_000),
        ("split_feature", -1),
        ("split_feature", 3),
        ("leaf_value", 1e9),
    ],
)
def test_numbers_that_lead_nowhere_are_refused(key: str, value: float) -> None:
    """Children and features that are not there, and leaves that no correction has."""
    trees, _ = _fitted()
    broken = re.sub(rf"\n{key}=\S+", f"\n{key}={value}", trees.text, count=1)
    with pytest.raises(PredictorError):
        Trees(broken).check(NAMES)


def test_rows_one_by_one_reach_the_leaves_that_all_together_reach() -> None:
    """The loop that is compiled, and the walk before numba is there: the same bits."""
    trees, features = _fitted()
    forest, roots, _ = trees._packed
    alone, together = np.empty((2, len(features), len(roots)))
    descend.function(forest, roots, features, alone)
    descend_together(forest, roots, features, together)
    assert np.array_equal(alone, together)
