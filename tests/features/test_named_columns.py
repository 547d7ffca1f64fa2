import pytest

from stepsight.dataset.base.errors import PredictorError
from stepsight.features.named_columns import FEATURE_VERSION, check_known, check_version, columns_of


def test_columns_are_found_by_name() -> None:
    assert columns_of(["c", "a"], ["a", "b", "c"], "a model") == [2, 0]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(PredictorError, match=r"a model reads features that this version does not have: x, y: register"):
        columns_of(["y", "a", "x"], ["a"], "a model")
    check_known(["a"], ["a", "b"], "a model")


def test_another_version_is_refused() -> None:
    check_version(FEATURE_VERSION, "a model")
    with pytest.raises(PredictorError, match=f"of version {FEATURE_VERSION}, got version '2'"):
        check_version("2", "a model")
