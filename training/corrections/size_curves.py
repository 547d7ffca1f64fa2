"""Seconds of one layout over all sizes: a monotone curve.

Measured times scatter, and what is learned from them scatters with them.  A larger message never takes less time, so
the curve is the isotonic regression of what was learned, which also keeps the order of two networks: a curve that lies
above another one everywhere still does so afterwards.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Bytes of the curve's knots: half octaves, up to 16 GiB.
KNOTS = np.unique(np.round(2.0 ** np.arange(0, 34.01, 0.5)).astype(np.int64))
LOG_KNOTS = np.log(KNOTS.astype(np.float64))


def read_curve(log_seconds: Array, num_bytes: Array) -> Array:
    """Seconds at some sizes, ``(sizes,)``; beyond the last knot, time is proportional to bytes.

    Args:
        log_seconds: At ``KNOTS``.
        num_bytes: The sizes.
    """
    sizes = np.log(np.maximum(num_bytes, 1.0))
    return np.asarray(np.exp(np.interp(sizes, LOG_KNOTS, log_seconds) + np.maximum(sizes - LOG_KNOTS[-1], 0.0)))


def never_falling(values: Array) -> Array:
    """The nearest non-decreasing values (least squares), by pooling adjacent violators (Ayer et al. 1955)."""
    means: list[float] = []
    counts: list[int] = []
    for value in values.tolist():
        mean, count = value, 1
        while means and means[-1] > mean:
            before, own = means.pop(), counts.pop()
            mean, count = (mean * count + before * own) / (count + own), count + own
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)
