"""The posterior of a Gaussian process: estimates of values from noisy values at other points.

The process has mean zero, so far from every observation its mean is zero and its variance is the prior's
(Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.25 and 2.26).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """A process given its observations.

    Attributes:
        covariance: Of the observations, their noise included, ``(n, n)``.
        values: The observations, ``(n,)``.
    """

    covariance: Array
    values: Array

    @cached_property
    def weights(self) -> Array:
        """The contribution of each observation to the mean elsewhere, per unit of covariance with it, ``(n,)``."""
        return np.asarray(np.linalg.solve(self.covariance, self.values), dtype=np.float64)

    @cached_property
    def inverse(self) -> Array:
        """Inverse of the covariance, ``(n, n)``."""
        return np.asarray(np.linalg.inv(self.covariance), dtype=np.float64)

    def mean(self, shared: Array) -> Array:
        """Expected values at points whose covariance with the observations is ``shared``, ``(..., n)``; shape
        ``(...)``.
        """
        return np.asarray(shared @ self.weights)

    def explained(self, shared: Array) -> float:
        """Share of one point's variance that the observations explain; ``shared`` is ``(n,)``."""
        return float(shared @ self.inverse @ shared)

    def cost(self) -> float:
        """Minus twice the log-likelihood of the observations, up to a constant."""
        _, log_determinant = np.linalg.slogdet(self.covariance)
        return float(self.values @ self.weights + log_determinant)

    def left_out(self, groups: Sequence[Hashable]) -> tuple[Array, Array]:
        """Predict every observation from those of other groups.

        Args:
            groups: The group of each observation.

        Returns:
            Observed minus predicted values, and the deviation expected of them, ``(n,)`` each.
        """
        weights = self.inverse @ self.values
        off, stds = np.zeros(len(self.values)), np.zeros(len(self.values))
        for group in set(groups):
            index = np.array([i for i, other in enumerate(groups) if other == group])
            block = np.linalg.inv(self.inverse[np.ix_(index, index)])
            off[index] = block @ weights[index]
            stds[index] = np.sqrt(np.diag(block))
        return off, stds
