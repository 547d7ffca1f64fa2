"""Seconds of loops that a compiler fused for a CPU: a weighted sum of operations, accesses and bytes.

The dims of ``fused_loops`` say how much of each a call does.  Bytes count by how long ago their buffer was touched, and
so by the cache that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.kinds.op import Op
from stepsight.training.regression.fitted_physics import Bounds, Physics, fit_physics

Array = NDArray[np.float64]

FUSED = "fused_loops"
# Seconds of one: near, middle and far byte, strided access, far strided access, cycle of gathers, of moves, of vector
# operations, of scalar operations and of slow functions, nest, and call.
USUAL_S = np.array([3e-12, 4e-12, 4e-11, 3e-11, 3e-10, 3.5e-10, 2.8e-10, 2.5e-10, 1.1e-10, 3.2e-10, 4e-8, 8e-7])
BOUNDS = Bounds(prior=USUAL_S, low=USUAL_S / 100, high=USUAL_S * 100)
NOISE = 0.15  # log-seconds that calls of equal dims differ by
PRIOR_STD = 1.0


def usual_loops() -> Physics:
    """Of a core with vectors of 64 bytes, a second cache of 1 MiB, and no other program beside it."""
    return Physics(np.log(USUAL_S), np.zeros(len(USUAL_S)))


def loop_terms(ops: Sequence[Op]) -> Array:
    """What is summed up, ``(n, terms)``."""
    dims = np.array([op.dims for op in ops], dtype=np.float64).reshape(len(ops), len(USUAL_S) - 1)
    return np.concatenate([dims, np.ones((len(ops), 1))], axis=1)


def loop_seconds(physics: Physics, ops: Sequence[Op]) -> Array:
    """Seconds of calls of fused loops, ``(n,)``."""
    terms = loop_terms(ops)
    return physics.seconds(terms, np.ones(len(terms)))


def fit_loops(terms: Array, seconds: Array) -> Physics:
    """Constants of a machine.

    Args:
        terms: Sums of ``loop_terms`` over the calls that were measured together, ``(rows, terms)``.
        seconds: Measured, ``(rows,)``.
    """
    return fit_physics(terms, np.ones(len(terms)), seconds, BOUNDS, noise=NOISE, prior_std=PRIOR_STD)
