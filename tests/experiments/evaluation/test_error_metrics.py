"""Errors, ranks, regret of choices, and baselines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from stepsight.dataset.job.job import ParallelSpec
from stepsight.experiments.evaluation.error_metrics import (
    Scored,
    best_scale,
    choice_groups,
    constant_mfu,
    errors,
    interval_score,
    mean_figures,
    regret,
    share,
)


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


def test_interval_score_is_width_and_what_is_missed() -> None:
    """Inside: 0.4 of the time wide.  Outside by a tenth of it: twenty times that more."""
    inside, outside = (
        cast("Scored", SimpleNamespace(low_s=low, high_s=low + 0.8, measured_s=2.0)) for low in (1.6, 2.2)
    )
    assert interval_score([inside]) == pytest.approx(0.4) and interval_score([]) is None
    assert interval_score([inside, outside]) == pytest.approx((0.4 + 0.4 + 20 * 0.1) / 2)


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


class Part:
    """Anything with some attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def rows(predicted: list[float], measured: list[float], ideal: list[float] | None = None) -> list[Scored]:
    """Runs of one group without a pipeline, alike but for their times."""
    row = Part(source="s", gpus=8, text=lambda name: "m")

    def job(micro_batch: int) -> Part:
        return Part(
            cluster=Part(hardware="h"),
            batch=Part(precision="bf16", global_batch=64, micro_batch=micro_batch),
            parallel=ParallelSpec(),
            num_micro_batches=1,
        )

    ideal = ideal or [1.0] * len(measured)
    return [
        cast(Scored, Part(row=row, job=job(number), choice="g", predicted_s=one, measured_s=two, ideal_s=three))
        for number, (one, two, three) in enumerate(zip(predicted, measured, ideal, strict=True))
    ]


def one_group(predicted: list[float], measured: list[float], ideal: list[float] | None = None) -> dict[str, Any]:
    (group,) = choice_groups(rows(predicted, measured, ideal))
    return group


def test_figures_of_a_group() -> None:
    """The second of three is chosen, at 1.2 of the best; chance costs (0 + 20 + 100) / 3; two of three pairs stand."""
    group = one_group([2.0, 1.0, 3.0], [1.0, 1.2, 2.0])
    assert (group["runs"], group["place"], group["best_s"], group["chosen_s"]) == (3, 2, 1.0, 1.2)
    assert (group["regret"], group["random_regret"], group["top_order"]) == pytest.approx((20.0, 40.0, 200 / 3))
    assert group["top_shared"] is None
    assert group["constant_mfu_regret"] == pytest.approx(40.0)  # it cannot tell them apart


def test_the_five_fastest() -> None:
    """Of seven runs, one of the five fastest is predicted to be sixth; all else is in order."""
    measured = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    group = one_group([1.0, 2.0, 3.0, 6.5, 5.0, 6.0, 7.0], measured)
    assert group["top_shared"] == 80.0 and group["top_order"] == 90.0


def test_runs_predicted_alike() -> None:
    """They leave no choice if all are; of some, one gets their mean, and half of their pairs stand."""
    assert choice_groups(rows([1.0, 1.0], [1.0, 2.0])) == []
    group = one_group([1.0, 1.0, 2.0], [1.0, 2.0, 9.0])
    assert (group["chosen_s"], group["regret"], group["place"]) == (1.5, pytest.approx(50.0), 2)
    assert group["top_order"] == pytest.approx(250 / 3)


def test_runs_of_one_strategy() -> None:
    """Nobody chooses between them."""
    one, two = rows([1.0, 2.0], [1.0, 2.0])
    two.__dict__["job"] = one.job
    assert choice_groups([one, two]) == []


def test_constant_mfu_does_not_depend_on_the_last_bits() -> None:
    """FLOP counted in another order are the same FLOP."""
    noisy = rows([1.0, 2.0], [1.0, 3.0], [0.3, 0.1 + 0.2])
    assert len(set(constant_mfu(noisy))) == 1


def test_means() -> None:
    """Over groups; a figure that no group has is none."""
    groups = [one_group([1.0, 2.0], [1.0, 2.0]), one_group([2.0, 1.0], [1.0, 2.0])]
    means = mean_figures(groups)
    assert (means["groups"], means["runs"], means["regret"]) == (2, 4, pytest.approx(50.0))
    assert means["top_shared"] is None
    assert mean_figures([])["regret"] is None
