"""What every correction of predictions is: a factor, the support that it was learned on, a prior, and a doubt.

Whole iterations (``calibration``), kernels in traces (``traced``), nearby signatures (``gaussian_process``) and sizes
of messages (``size_residuals``) all multiply a prediction by ``exp(log_factor)``.  Far from what taught them
nothing is left of the factor, and the doubt is the prior's.  The correction of a device with few measurements
(``posterior``) returns there to other devices' efficiency, so ``kernels.transferred`` keeps its support.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Asked = TypeVar("Asked", contravariant=True)

FADE = 0.7  # log units beyond what was measured after which a correction falls to 1/e


class Corrector(Protocol[Asked]):
    """Multiplies predictions by what was learned."""

    @property
    def prior_std_log(self) -> float:
        """How far from 1 factors are believed to be before anything was measured, in log units."""
        ...

    def log_factor(self, asked: Asked) -> Array:
        """Logarithm of each factor, ``(asked,)``."""
        ...

    def known(self, asked: Asked) -> Array:
        """Share of the prior's variance that the measurements explain of each, 0 to 1, ``(asked,)``."""
        ...


def doubt(corrector: Corrector[Asked], asked: Asked, noise: float = 0.0) -> Array:
    """Deviation that is left of each log-factor, with the noise of a repeated measurement, ``(asked,)``."""
    left = corrector.prior_std_log**2 * (1.0 - corrector.known(asked))
    return np.asarray(np.sqrt(left + noise**2))


def faded(excess: Array) -> Array:
    """Share of a correction that is left so many log units beyond what was measured, 0 to 1."""
    return np.asarray(np.exp(-excess / FADE))


class Support(NamedTuple):
    """Lowest and highest position that was measured, in log units, ``(axes,)`` each."""

    low: Array
    high: Array

    @classmethod
    def of(cls, positions: Array) -> Support:
        """The range of positions, ``(rows, axes)``."""
        return cls(positions.min(axis=0), positions.max(axis=0))

    def beyond(self, positions: Array) -> Array:
        """How far positions, ``(..., axes)``, lie outside the range on each axis; same shape."""
        return np.asarray(np.maximum(np.maximum(self.low - positions, positions - self.high), 0.0))

    def to_dict(self) -> dict[str, Any]:
        return {"low": self.low.tolist(), "high": self.high.tolist()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Support:
        return cls(np.array(value["low"], float), np.array(value["high"], float))
