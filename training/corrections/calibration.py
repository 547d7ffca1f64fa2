"""Corrections learned from whole iterations, within physical bounds.

Own runs give a bounded scale, shrunk hard towards none.  Tables of runs give factors of resources, which the simulator
turns into times, and a residual for jobs that are alike (see ``fit_calibration``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job.job import Job
from stepsight.training.corrections.constants import Constants
from stepsight.training.corrections.residual import Residual
from stepsight.training.intervals.conformal import MOST_LOG

Array = NDArray[np.float64]

MAX_LOG_SCALE = 0.3
PRIOR_RUNS = 4.0  # weight of the prior that no correction is needed, in runs
MIN_GAIN = 0.05  # the held-out error must fall by this share
MOST_WIDTH = 10.0


@dataclass(frozen=True)
class Calibration:
    """``calibrated = scale * exp(residual) * seconds``; the seconds are simulated with the constants.

    Attributes:
        scale: Multiplies every duration; 1: uncalibrated.
        constants: Multiply durations by what bounds them.
        residual: What is left of jobs that are alike; None: nothing is known.
        width: Of the interval, half of it, in deviations of the residual.
        left_log: What the runs that taught it are still off by: half of the narrowest interval, in log-seconds.
        judged_log: Likewise the runs that judged it.
    """

    scale: float = 1.0
    constants: Constants = field(default_factory=Constants)
    residual: Residual | None = None
    width: float = 0.0
    left_log: float = 0.0
    judged_log: float = 0.0

    @property
    def by_runs(self) -> bool:
        """Whether a table of runs changed the calibration."""
        return self.residual is not None or not self.constants.plain

    def factor(self, job: Job, software: str = "") -> float:
        """The factor of a job's simulated time."""
        if self.residual is None:
            return self.scale
        return self.scale * math.exp(self.residual.mean_and_std(job, software)[0])

    def half_width_log(self, job: Job, software: str, otherwise: float, *, judged: bool = False) -> float:
        """Half of a job's interval: from the residual if it knows similar jobs, else ``otherwise``; at least the errors
        on runs, except the judging ones if the job is itself ``judged``.
        """
        if self.residual is None:
            return otherwise
        known = self.residual.known(job, software)
        own = min(self.width * self.residual.mean_and_std(job, software)[1], otherwise)
        half = math.sqrt(known * own**2 + (1.0 - known) * otherwise**2)
        return max(half, self.left_log, 0.0 if judged else self.judged_log)

    def to_dict(self) -> dict[str, Any]:
        value: dict[str, Any] = {"scale": self.scale}
        if not self.constants.plain:
            value["constants"] = self.constants.to_dict()
        if self.residual is not None:
            value |= {"residual": self.residual.to_dict(), "width": self.width}
            value |= {"left_log": self.left_log, "judged_log": self.judged_log}
        return value

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Calibration:
        scale = float(value["scale"])
        if not (scale > 0 and abs(np.log(scale)) <= MAX_LOG_SCALE + 1e-9):
            raise ValueError(f"scale must lie within exp(+-{MAX_LOG_SCALE}), got {scale}")
        constants = Constants.from_dict(value["constants"]) if "constants" in value else Constants()
        if "residual" not in value:
            return cls(scale, constants)
        width = float(value["width"])
        left, judged = (float(value.get(name, 0.0)) for name in ("left_log", "judged_log"))
        if not (0 < width <= MOST_WIDTH and 0 <= left <= MOST_LOG and 0 <= judged <= MOST_LOG):
            raise ValueError(
                f"0 < width <= {MOST_WIDTH} and 0 <= left_log and judged_log <= {MOST_LOG:g} must hold, "
                f"got {width}, {left} and {judged}"
            )
        return cls(scale, constants, Residual.from_dict(value["residual"]), width, left, judged)


def fit_scale(predicted: Array, measured: Array) -> Calibration:
    """Fit on whole iterations, ``(runs,)``; return no correction unless it helps on each held-out run in turn."""
    off = np.log(measured / predicted)
    if len(off) < 3:
        return Calibration()
    held_back = np.array([off[i] - _shrunk(np.delete(off, i)) for i in range(len(off))])
    if np.abs(held_back).mean() > (1 - MIN_GAIN) * np.abs(off).mean():
        return Calibration()
    return Calibration(float(np.exp(_shrunk(off))))


def _shrunk(off: Array) -> float:
    value = float(np.median(off)) * len(off) / (len(off) + PRIOR_RUNS)
    return float(np.clip(value, -MAX_LOG_SCALE, MAX_LOG_SCALE))
