"""Physics of one kind: seconds are a weighted sum of physical quantities, with positive bounded constants.

``seconds = sum_j exp(log_constants[j]) * busy ** busy_exponents[j] * terms[:, j]``, fitted in log space with a
prior, so that a handful of points suffices and no constant leaves what physics allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.codec import IF_SET, Saved

Array = NDArray[np.float64]
Objective = Callable[[Array], tuple[float, Array, Array]]

CONVERGED = 1e-7  # stop after a step that lowers the loss by a smaller share
LEAST_DAMPING, MOST_DAMPING = 1e-6, 1e9


def minimise(objective: Objective, start: Array, low: Array, high: Array, *, longest: float, steps: int) -> Array:
    """The minimum within bounds of a loss, given as loss, gradient and Gauss-Newton Hessian of a point, ``(n,)``."""
    point, damping = np.clip(start, low, high), 1.0
    loss, gradient, hessian = objective(point)
    for _ in range(steps):
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
        candidate = np.clip(point + np.clip(step, -longest, longest), low, high)
        result = objective(candidate)
        if result[0] < loss:
            converged = loss - result[0] < CONVERGED * loss
            point, (loss, gradient, hessian) = candidate, result
            damping = max(damping / 3, LEAST_DAMPING)
            if converged:
                break
        else:
            damping *= 4
            if damping > MOST_DAMPING:
                break
    return point


def robust_loss(residuals: Callable[[Array], tuple[Array, Array]], prior: Array, stds: Array) -> Objective:
    """Huber's loss of residuals (with their derivatives, in deviations), and a normal prior, for ``minimise``."""

    def objective(point: Array) -> tuple[float, Array, Array]:
        residual, jacobian = residuals(point)
        size, off = np.abs(residual), (point - prior) / stds
        weight = np.minimum(1.0, HUBER / np.maximum(size, 1e-12))
        loss = float(np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER)).sum() + 0.5 * off @ off)
        gradient = jacobian.T @ (weight * residual) + off / stds
        return loss, gradient, (jacobian * weight[:, None]).T @ jacobian + np.diag(1.0 / stds**2)

    return objective


NOISE = 0.05  # deviation of log-seconds between repeated measurements
HUBER = 2.0  # residuals beyond this many deviations count linearly
CONSTANT_PRIOR_STD = 2.0  # log units
BUSY_PRIOR_STD = 0.5
LONGEST_STEP = 1.5  # log units
SHARPNESS = 6.0  # smooth maximum: the power of a norm
MOST_LOG = 100.0  # of any logarithm of a saved predictor: larger ones are typing mistakes
SLACK = 1e-6  # of a constant in log units, for rounding when saved
MAX_BUSY_EXPONENT = 1.2  # 1: the quantity is fully shared among the busy devices of a node


@dataclass(frozen=True)
class Bounds:
    """Prior, lowest and highest constant of each term, ``(terms,)``; of ``overlapping`` ones the longest counts."""

    prior: Array
    low: Array
    high: Array
    overlapping: tuple[int, ...] = ()


@dataclass(frozen=True)
class Physics(Saved):
    """Fitted constants of one kind, shapes ``(terms,)``; of ``overlapping`` terms only the longest counts."""

    log_constants: Array
    busy_exponents: Array
    overlapping: tuple[int, ...] = field(default=(), metadata=IF_SET)

    def seconds(self, terms: Array, busy: Array) -> Array:
        """Seconds of each row; ``terms`` is ``(rows, terms)``, ``busy`` is ``(rows,)``."""
        return np.asarray(self._parts(terms, busy).sum(axis=1) + 1e-12)

    def _parts(self, terms: Array, busy: Array) -> Array:
        weights = self.log_constants + np.log(busy)[:, None] * self.busy_exponents
        parts = np.asarray(terms * np.exp(weights))
        if self.overlapping:  # shares of a smooth maximum, which add up to it
            columns = list(self.overlapping)
            among = parts[:, columns]
            longest = among.max(axis=1, keepdims=True) + 1e-30
            powers = (among / longest) ** SHARPNESS
            total = powers.sum(axis=1, keepdims=True) + 1e-30
            parts[:, columns] = longest * total ** (1 / SHARPNESS - 1) * powers
        return parts

    def check(self, kind: str, bounds: Bounds) -> None:
        """Check values read from a file against the bounds of a fit."""
        num_terms = len(bounds.low)
        shapes = (self.log_constants.shape, self.busy_exponents.shape)
        if shapes != ((num_terms,), (num_terms,)):
            raise ValueError(f"{kind} must have {num_terms} constants and as many exponents, got {shapes}")
        if not (np.abs([*self.log_constants, *self.busy_exponents]) <= MOST_LOG).all():
            raise ValueError(
                f"constants and exponents of {kind} must lie within +-{MOST_LOG:g}, got {self.to_dict()!s:.80}"
            )
        low, high = np.log(bounds.low) - SLACK, np.log(bounds.high) + SLACK
        if not ((low <= self.log_constants) & (self.log_constants <= high)).all():
            raise ValueError(
                f"constants of {kind} must be what physics allows, got {self.log_constants.tolist()!s:.80}"
            )
        if not ((self.busy_exponents >= 0) & (self.busy_exponents <= MAX_BUSY_EXPONENT)).all():
            raise ValueError(
                f"exponents of {kind} must lie within 0 and {MAX_BUSY_EXPONENT}, "
                f"got {self.busy_exponents.tolist()!s:.80}"
            )
        if not set(self.overlapping) <= set(range(num_terms)):
            raise ValueError(f"overlapping terms of {kind} must be of 0 ... {num_terms - 1}, got {self.overlapping}")


def fit_physics(
    terms: Array,
    busy: Array,
    seconds: Array,
    bounds: Bounds,
    steps: int = 80,
    *,
    noise: float = NOISE,
    prior_std: float = CONSTANT_PRIOR_STD,
) -> Physics:
    """Robust maximum a posteriori by projected Levenberg-Marquardt: ``terms`` are physical quantities, ``(rows,
    terms)``, ``busy`` devices that compute at once and ``seconds`` measured, ``(rows,)``; ``noise`` and ``prior_std``
    in log units.
    """
    count = terms.shape[1]
    low = np.concatenate([np.log(bounds.low), np.zeros(count)])
    high = np.concatenate([np.log(bounds.high), np.full(count, MAX_BUSY_EXPONENT)])
    prior = np.concatenate([np.log(bounds.prior), np.zeros(count)])
    stds = np.concatenate([np.full(count, prior_std), np.full(count, BUSY_PRIOR_STD)])
    wanted, log_busy = np.log(seconds), np.log(busy)[:, None]

    def residuals(theta: Array) -> tuple[Array, Array]:
        parts = Physics(theta[:count], theta[count:], bounds.overlapping)._parts(terms, busy)
        total = parts.sum(axis=1) + 1e-12
        shares = parts / total[:, None]
        return (np.log(total) - wanted) / noise, np.concatenate([shares, shares * log_busy], axis=1) / noise

    # A measured latency may lie outside its bounds.
    theta = minimise(robust_loss(residuals, prior, stds), prior, low, high, longest=LONGEST_STEP, steps=steps)
    return Physics(theta[:count], theta[count:], bounds.overlapping)
