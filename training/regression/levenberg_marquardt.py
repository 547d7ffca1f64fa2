"""Minimise a sum of squares within bounds, by projected Levenberg-Marquardt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Objective = Callable[[Array], tuple[float, Array, Array]]

CONVERGED = 1e-7  # stop after a step that lowers the loss by a smaller share
LEAST_DAMPING, MOST_DAMPING = 1e-6, 1e9


def minimise(objective: Objective, start: Array, low: Array, high: Array, *, longest: float, steps: int) -> Array:
    """Find the minimum of a loss, from a start.

    Args:
        objective: Returns the loss of a point, its gradient, and a Gauss-Newton Hessian.
        start: Where to begin, shape ``(n,)``; beyond the bounds, at the bound.
        low, high: Bounds of each number, same shape.
        longest: Most by which a step changes a number.
        steps: Most steps.

    Returns:
        The point, shape ``(n,)``.
    """
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
