"""Corrections from nearby measurements: full at a measured signature, smaller with distance.

A Gaussian process on the log-residuals that physics and trees leave, one per kind.  Far from every measurement
its mean is zero, so it can correct but never extrapolate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.training.corrections.gaussian_process import GaussianProcess

Array = NDArray[np.float64]

NOISE = 0.03  # log-seconds; two library versions, and repeats on one machine, agree within about 3 %
MAX_POINTS = 600
LENGTHS = (0.02, 0.25, 0.5, 1.0, 2.0)  # log units; the first one only reproduces measured signatures


@dataclass(frozen=True)
class Neighbours:
    """Positions that were measured, ``(points, axes)``, and their weights, ``(points,)``."""

    positions: Array
    weights: Array
    length: float

    def residual(self, positions: Array) -> Array:
        """Log-residual at each position, shape ``(rows,)``."""
        if not len(self.weights):
            return np.zeros(len(positions))
        return np.asarray(_similarity(positions, self.positions, self.length) @ self.weights)

    def to_dict(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "positions": np.round(self.positions, 6).tolist(),
            "weights": np.round(self.weights, 6).tolist(),
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Neighbours:
        weights = np.array(value["weights"], float)
        if weights.ndim != 1:
            raise ValueError(f"weights of neighbours must be one list of numbers, got shape {weights.shape}")
        return cls(np.array(value["positions"], float).reshape(len(weights), -1), weights, float(value["length"]))


def _similarity(left: Array, right: Array, length: float) -> Array:
    squares = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-0.5 * squares / length**2))


def fit_neighbours(positions: Array, residuals: Array, length: float) -> Neighbours:
    """Gaussian-process weights for log-residuals, ``(points,)``, at positions, ``(points, axes)``."""
    if len(positions) > MAX_POINTS:  # the cost is cubic; large tables are covered by the trees
        chosen = np.random.default_rng(0).choice(len(positions), MAX_POINTS, replace=False)
        positions, residuals = positions[chosen], residuals[chosen]
    signal = max(float(np.mean(residuals**2)), NOISE**2)
    covariance = _similarity(positions, positions, length) + (NOISE**2 / signal) * np.eye(len(positions))
    return Neighbours(positions, GaussianProcess(covariance, residuals).weights, length)
