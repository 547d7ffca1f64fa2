"""Conformal prediction intervals from held-out runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

COVERAGE = 0.9
ROOFLINE_LOG = math.log(3.0)  # a roofline is within a factor of three of almost all measurements
UNSUPPORTED_LOG = math.log(2.0)  # added in full if all of an iteration lies outside the measured range
MOST_LOG = 100.0  # a wider interval is useless, and its end would overflow


@dataclass(frozen=True)
class Intervals:
    """Symmetric interval in log-seconds.

    Attributes:
        half_width_log: Half of its width.
        coverage: Part of held-back runs that it is meant to hold.
        num_runs: From how many held-back runs it comes; 0: not from measurement.
    """

    half_width_log: float = ROOFLINE_LOG
    coverage: float = COVERAGE
    num_runs: int = 0

    def half_width(self, unsupported_share: float = 0.0) -> float:
        """Half of the width in log-seconds; it grows with the share of the time outside the measured range."""
        return self.half_width_log + UNSUPPORTED_LOG * min(max(unsupported_share, 0.0), 1.0)

    def to_dict(self) -> dict[str, Any]:
        return {"half_width_log": self.half_width_log, "coverage": self.coverage, "num_runs": self.num_runs}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Intervals:
        half_width, coverage, runs = float(value["half_width_log"]), float(value["coverage"]), int(value["num_runs"])
        if not (0 <= half_width <= MOST_LOG and 0 < coverage < 1 and runs >= 0):
            raise ValueError(
                f"0 <= half_width_log <= {MOST_LOG}, 0 < coverage < 1 and num_runs >= 0 must hold, "
                f"got {half_width}, {coverage} and {runs}"
            )
        return cls(half_width, coverage, runs)


def conformal_quantile(scores: Sequence[float], coverage: float = COVERAGE, *, too_few: float | None = None) -> float:
    """Find the score that a new one exceeds with a probability of at most ``1 - coverage``.

    With the finite-sample correction of split-conformal prediction (Vovk et al. 2005; Lei et al. 2018).

    Args:
        scores: Scores of what was held out, in any order.
        coverage: Probability, 0 to 1.
        too_few: Returned if there are too few scores for the coverage; None: the largest score, stretched by the
            ratio of the rank that is needed to the number of scores, and ``ROOFLINE_LOG`` if there is no score.
    """
    rank, count = math.ceil((len(scores) + 1) * coverage), len(scores)
    if rank > count and too_few is not None:
        return too_few
    if not count:
        return ROOFLINE_LOG
    ordered = sorted(scores)
    return ordered[rank - 1] if rank <= count else ordered[-1] * rank / count


def fit_intervals(log_residuals: NDArray[np.float64], spread_log: float, coverage: float = COVERAGE) -> Intervals:
    """Fit a symmetric split-conformal interval.

    Args:
        log_residuals: ``log(measured / predicted)`` of runs that were held out, ``(runs,)``.
        spread_log: The spread of repeated measurements, in log-seconds: the least half width.
        coverage: Part of runs that the interval is meant to hold.
    """
    if not len(log_residuals):
        return Intervals()
    half_width = conformal_quantile(np.abs(log_residuals).tolist(), coverage)
    return Intervals(float(min(max(half_width, spread_log), MOST_LOG)), coverage, len(log_residuals))
