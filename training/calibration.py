"""Correction of whole iterations, within physics: a bounded scale, shrunk hard towards none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MAX_LOG_SCALE = 0.3
PRIOR_RUNS = 4.0  # so many runs' worth of belief that no correction is needed
MIN_GAIN = 0.05  # the held-back error must fall by this part


@dataclass(frozen=True)
class Calibration:
    """``calibrated = scale * seconds``.

    Attributes:
        scale: Multiplies every duration; 1: uncalibrated.
    """

    scale: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Calibration:
        scale = float(value["scale"])
        if not (scale > 0 and abs(np.log(scale)) <= MAX_LOG_SCALE + 1e-9):
            raise ValueError(f"scale must lie within exp(+-{MAX_LOG_SCALE}), got {scale}")
        return cls(scale)


def fit_calibration(predicted: Array, measured: Array) -> Calibration:
    """Fit on whole iterations, ``(runs,)``; returns no correction unless it helps each run held back in turn."""
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
