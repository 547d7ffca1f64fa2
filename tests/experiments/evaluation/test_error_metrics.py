"""Figures by hand."""

import pytest

from stepsight.experiments.evaluation.error_metrics import best_scale, errors, regret, share


def test_errors() -> None:
    """Two rows 10 % and 30 % high, one 20 % low: mean 20, bias 20 / 3."""
    found = errors([1.1, 2.6, 3.2], [1.0, 2.0, 4.0])
    assert found.used == 3
    assert (found.mape, found.median, found.max) == pytest.approx((20.0, 20.0, 30.0))
    assert found.p90 == pytest.approx(28.0) and found.bias == pytest.approx(20.0 / 3)
    assert found.spearman == pytest.approx(1.0)


def test_nothing_and_one_row() -> None:
    """Of nothing nothing is said, of one row no rank."""
    assert errors([], []).to_dict() == {"used": 0} | dict.fromkeys(("mape", "median", "p90", "max", "bias", "spearman"))
    assert errors([2.0], [1.0]).spearman is None and errors([2.0], [1.0]).bias == 100.0


def test_regret() -> None:
    """In ``a`` the second best is chosen, at 1.2 of the best; in ``b`` the best; the mean is 10 %."""
    groups = ["a", "a", "a", "b", "b"]
    assert regret(groups, [3.0, 1.0, 2.0, 1.0, 2.0], [1.0, 1.2, 3.0, 5.0, 6.0]) == pytest.approx(10.0)


def test_regret_without_a_choice() -> None:
    """Rows alone or predicted alike leave no choice; among those predicted alike the mean is what one gets."""
    assert regret(["a", "b", "b"], [1.0, 2.0, 2.0], [1.0, 2.0, 3.0]) is None
    assert regret(["a"] * 3, [1.0, 1.0, 2.0], [1.0, 2.0, 9.0]) == pytest.approx(50.0)


def test_share() -> None:
    """Percent of the true ones."""
    assert share([True, True, False, True]) == 75.0 and share([]) is None


def test_the_best_scale_is_best() -> None:
    """No factor near by has a smaller mean error."""
    ideal, measured = [1.0, 2.0, 4.0, 1.0], [2.0, 6.0, 7.0, 2.5]
    best = best_scale(ideal, measured)

    def mape(scale: float) -> float:
        return errors([scale * x for x in ideal], measured).mape or 0.0

    assert all(mape(best) <= mape(best * factor) + 1e-9 for factor in (0.7, 0.9, 0.99, 1.01, 1.1, 1.5))
