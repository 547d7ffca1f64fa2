"""How far to trust a prediction: conformal intervals from runs that were held back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

COVERAGE = 0.9
ROOFLINE_LOG = math.log(3.0)  # facts alone are within a factor of three, rarely worse
UNSUPPORTED_LOG = math.log(2.0)  # added in full when nothing of an iteration lies within what was measured
MOST_LOG = 100.0  # a wider interval says nothing, and its end is no number


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
        """Half of the width in log-seconds, wider by the share of the time that lies outside of what was measured."""
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


def conformal(log_residuals: NDArray[np.float64], spread_log: float, coverage: float = COVERAGE) -> Intervals:
    """Split-conformal interval with the finite-sample correction (Vovk et al. 2005; Lei et al. 2018).

    Args:
        log_residuals: ``log(measured / predicted)`` of runs that were held back, ``(runs,)``.
        spread_log: The measurement's own spread, below which no interval can be honest.
        coverage: Aim.
    """
    count = len(log_residuals)
    if not count:
        return Intervals()
    sizes = np.sort(np.abs(log_residuals))
    rank = math.ceil((count + 1) * coverage)
    # With too few runs for the aim, the largest residual stretched by what is missing.
    half_width = sizes[rank - 1] if rank <= count else sizes[-1] * rank / count
    return Intervals(float(min(max(half_width, spread_log), MOST_LOG)), coverage, count)
