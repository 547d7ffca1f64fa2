"""Doubt about single ops and collectives, from errors of runs that were held back, and its sum over an iteration.

Errors of a kind in a phase (in a phase alone, of a kind alone where few runs have it) give a symmetric interval in
log-seconds.  Errors of one run's nodes agree in part: ``shared`` is the part of their variance that a run has in
common.  So the variance of an iteration is ``(1 - shared) sum (s_i d_i)^2 + shared (sum s_i d_i)^2``, with the share
``s_i`` of each signature in its time, and the deviation ``d_i`` of its logarithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.codec import Saved
from stepsight.training.corrections.intervals import COVERAGE, MOST_LOG, ROOFLINE_LOG, UNSUPPORTED_LOG

Array = NDArray[np.float64]

FEWEST_RUNS = 4  # fewest runs with a kind for an interval of its own
NORMAL_WIDTH = 1.645  # deviations that contain 90 % of a normal distribution
MEAN_TO_HALF = NORMAL_WIDTH / (2 / np.pi) ** 0.5  # half of that interval over the mean absolute error
SHARED = 0.3  # where no runs tell: a rule of thumb


@dataclass(frozen=True)
class HeldBackErrors:
    """``log(measured / predicted)`` of the nodes of one run that taught nothing, ``(n,)``."""

    kinds: tuple[str, ...]
    phases: tuple[str, ...]
    logs: Array
    weights: Array  # share of each node in the run's time


@dataclass(frozen=True)
class NodeDoubts(Saved):
    """Half of the 90 % interval of single ops and collectives in log-seconds.

    ``halves``: by ``kind/phase``, ``kind``, and for all others ``""``.
    """

    halves: Mapping[str, float]
    shared: float = SHARED

    def __post_init__(self) -> None:
        wrong = [half for half in self.halves.values() if not 0 <= half <= MOST_LOG]
        if wrong or not 0 <= self.shared <= 1:
            raise ValueError(f"doubts must lie from 0 to {MOST_LOG:g}, and what is shared from 0 to 1, got {wrong[:3]}")

    def half(self, kind: str, phase: str = "") -> float:
        """Of a kind in a phase; a factor of three where nothing is known."""
        names = (f"{kind}/{phase}", kind, "")
        return next((self.halves[name] for name in names if name in self.halves), ROOFLINE_LOG)

    def of_sum(self, shares: Array, halves: Array) -> float:
        """Of a sum of nodes, from the share of each in it."""
        each = shares * halves
        return float(np.sqrt((1 - self.shared) * (each**2).sum() + self.shared * each.sum() ** 2))


def outside_half(half: float) -> float:
    """Half of an interval of a node outside the measured range."""
    return min(half + UNSUPPORTED_LOG, MOST_LOG)


def fit_doubts(runs: Sequence[HeldBackErrors]) -> NodeDoubts:
    """Fit the intervals; every run counts alike."""
    groups: dict[str, list[tuple[Array, Array]]] = {}
    for run in runs:
        count = max(len(run.logs), 1)
        names = np.array([("", kind, f"{kind}/{phase}") for kind, phase in zip(run.kinds, run.phases, strict=True)])
        for name in set(names.ravel().tolist()):
            own = np.abs(run.logs[(names == name).any(axis=1)])
            groups.setdefault(name, []).append((own, np.full(len(own), 1 / (count if name == "" else len(own)))))
    halves = {name: _quantile(parts) for name, parts in sorted(groups.items()) if len(parts) >= FEWEST_RUNS or not name}
    return NodeDoubts(halves, _shared(runs))


def _quantile(parts: Sequence[tuple[Array, Array]]) -> float:
    """The error that ``COVERAGE`` of the nodes do not exceed."""
    errors, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(errors)
    place = int(np.searchsorted(np.cumsum(weights[order]) / weights.sum(), COVERAGE))
    return min(float(errors[order][min(place, len(order) - 1)]), MOST_LOG)


def _shared(runs: Sequence[HeldBackErrors]) -> float:
    """Part of the variance of errors, weighted by time, that the nodes of a run have in common."""
    means = [float(run.weights @ run.logs) for run in runs if run.weights.any()]
    squares = [float(run.weights @ run.logs**2) for run in runs if run.weights.any()]
    if len(means) < FEWEST_RUNS:
        return SHARED
    return float(np.clip(np.mean(np.square(means)) / max(float(np.mean(squares)), 1e-12), 0.0, 1.0))
