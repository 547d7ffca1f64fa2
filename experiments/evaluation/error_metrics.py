"""Quality of predictions: errors, ranks, and the regret of choosing by them.  Pure functions of seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.training.heldout import spearman

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of predicted against measured times, in percent unless stated otherwise; None if there are no runs.

    Attributes:
        used: Rows.
        mape, median, p90, max: Of the absolute error ``|predicted / measured - 1|``.
        bias: Mean signed error.
        spearman: Rank correlation of predicted and measured times, -1 ... 1.
    """

    used: int
    mape: float | None = None
    median: float | None = None
    p90: float | None = None
    max: float | None = None
    bias: float | None = None
    spearman: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """Errors of some rows, in any order."""
    if not len(measured):
        return Errors(0)
    one, two = np.asarray(predicted, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    signed = 100.0 * (one / two - 1.0)
    size = np.abs(signed)
    return Errors(
        len(size),
        float(size.mean()),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(size.max()),
        float(signed.mean()),
        spearman(one, two) if len(size) > 1 else None,
    )


def regret(groups: Sequence[Hashable], predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """How much slower the chosen runs are than the best ones: percent, mean over groups.

    In each group the run with the shortest predicted time is chosen (the mean of those predicted alike); a group in
    which all are predicted alike leaves no choice and does not count.  None if no group does.
    """
    by_group: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for group, seconds, truth in zip(groups, predicted, measured, strict=True):
        by_group[group].append((seconds, truth))
    costs = []
    for rows in by_group.values():
        said, truths = zip(*rows, strict=True)
        if max(said) > min(said):
            costs.append(chosen_time(said, truths) / min(truths) - 1.0)
    return 100.0 * sum(costs) / len(costs) if costs else None


def chosen_time(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Measured time of the run with the shortest predicted time; the mean of those predicted alike."""
    shortest = min(predicted)
    chosen = [truth for seconds, truth in zip(predicted, measured, strict=True) if seconds == shortest]
    return sum(chosen) / len(chosen)


def share(flags: Sequence[bool]) -> float | None:
    """Percent of true values; None if there are none."""
    return 100.0 * sum(flags) / len(flags) if flags else None


def best_scale(ideal: Sequence[float], measured: Sequence[float]) -> float:
    """The factor on ``ideal`` with the least mean of ``|factor * ideal / measured - 1|``: a weighted median."""
    weight = np.asarray(ideal, dtype=np.float64) / np.asarray(measured, dtype=np.float64)
    order = np.argsort(1.0 / weight)
    reached = np.cumsum(weight[order])
    return float((1.0 / weight)[order][np.searchsorted(reached, reached[-1] / 2.0)])
