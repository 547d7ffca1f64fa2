"""Residual of whole iterations: a Gaussian process over similar jobs, which is zero far from all of them.

Its mean is the correction of a new job, its deviation says how much is known of it: next to nothing is added far away
from all rows it was fitted on, and the deviation is then that of any job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job.job import Job
from stepsight.training.corrections.gaussian_process import GaussianProcess
from stepsight.training.corrections.similarity import UNLIKE, Likeness, covariance
from stepsight.training.intervals.conformal import MOST_LOG

Array = NDArray[np.float64]

MAX_LOG = 0.3  # limit of every correction
SPREADS = (0.03, 0.06, 0.1, 0.15)  # deviation of corrections between jobs, in log units: typical errors of simulators
NOISES = (0.01, 0.02)  # published runs of the same job differ by up to 4.7 %
USUAL = (0.1, 0.01)
LEAST = 1e-3  # of spread and noise: with smaller ones the matrix has no inverse


@dataclass(frozen=True)
class Residual:
    """``log(measured / predicted)`` of some jobs.

    Attributes:
        rows: The jobs, as far as it matters.
        logs: What is left of each, ``(rows,)``.
        spread, noise: Deviation of corrections from job to job, and of the same run repeated, in log units.
    """

    rows: tuple[Likeness, ...]
    logs: tuple[float, ...]
    spread: float
    noise: float

    @cached_property
    def _process(self) -> GaussianProcess:
        own = self.spread**2 * covariance(self.rows, self.rows)
        return GaussianProcess(own + self.noise**2 * np.eye(len(self.rows)), np.array(self.logs))

    @property
    def software(self) -> tuple[str, ...]:
        """The framework that ran the jobs, in the words of the source."""
        place = list(UNLIKE).index("software")
        return tuple(dict.fromkeys(row.labels[place] for row in self.rows))

    def mean_and_std(self, job: Job, software: str = "") -> tuple[float, float]:
        """Correction of a job, within ``MAX_LOG``, and its deviation with the noise of a repeated run; in log units."""
        shared = self._shared(job, software)
        mean = float(np.clip(self._process.mean(shared), -MAX_LOG, MAX_LOG))
        variance = self.spread**2 * (1.0 - self.known(job, software))
        return mean, math.sqrt(variance + self.noise**2)

    def known(self, job: Job, software: str = "") -> float:
        """Share of the variance between jobs that the rows explain for this one: 1 for a job of the rows, 0 far from
        all.
        """
        shared = self._shared(job, software)
        return min(1.0, self._process.explained(shared) / self.spread**2)

    def _shared(self, job: Job, software: str) -> Array:
        """Covariance of a job with every row, ``(rows,)``."""
        return np.asarray(self.spread**2 * covariance([Likeness.of(job, software)], self.rows)[0])

    def to_dict(self) -> dict[str, Any]:
        rows = [{**row.to_dict(), "log": log} for row, log in zip(self.rows, self.logs, strict=True)]
        return {"spread": self.spread, "noise": self.noise, "rows": rows}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Residual:
        spread, noise = float(value["spread"]), float(value["noise"])
        logs = tuple(float(row["log"]) for row in value["rows"])
        if not (LEAST <= spread <= 1 and LEAST <= noise <= 1 and logs):
            raise ValueError(
                f"a residual needs rows, spread and noise from {LEAST} to 1, got {len(logs)}, {spread}, {noise}"
            )
        if not (np.abs(logs) <= MOST_LOG).all():
            raise ValueError(f"logs of a residual must lie within +-{MOST_LOG:g}, got {logs!s:.80}")
        return cls(tuple(Likeness.from_dict(row) for row in value["rows"]), logs, spread, noise)


def most_likely(logs: Array, shared: Array, more: Array) -> tuple[float, float]:
    """The most likely spread and noise of residuals, among ``SPREADS`` and ``NOISES``.

    Args:
        logs: ``log(measured / predicted)``, ``(rows,)``.
        shared: ``covariance`` of the rows, ``(rows, rows)``.
        more: Covariance from elsewhere, same shape.
    """
    if len(logs) < 3:
        return USUAL
    found = {}
    for spread in SPREADS:
        for noise in NOISES:
            total = spread**2 * shared + noise**2 * np.eye(len(logs)) + more
            found[spread, noise] = GaussianProcess(total, logs).cost()
    return min(found, key=lambda key: found[key])
