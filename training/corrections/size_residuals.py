"""What one cluster's collectives take beyond their fitted choices: a correction by size, which fades away.

A cluster's peculiarities (the size at which its NCCL changes algorithm, how its adapters take medium messages) recur on
other numbers of ranks.  So the logarithm of measured over fitted seconds is averaged over neighbouring sizes of a kind
and shrunk where few were measured.  It fades to zero within four doublings of ranks, or of ranks per node, beyond the
measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.kinds.op import Collective

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


OCTAVE = float(np.log(2.0))
WIDTH = OCTAVE  # log units over which sizes count as neighbours
SHRINK = 1.0  # rows that say that nothing is beyond the fitted choices
FADE = 4 * OCTAVE  # log units beyond the measured ranks at which nothing is left
MOST = 1.0  # log units of a correction


def size_residual(num_bytes: Array, off: Array) -> Array:
    """Correction at the knots of ``size_curves``, log units, ``(knots,)``.

    Args:
        num_bytes: Of the measured collectives of a kind.
        off: Logarithms of measured over fitted seconds.
    """
    sizes = np.log(np.maximum(num_bytes, 1.0))
    weights = np.exp(-0.5 * ((LOG_KNOTS[:, None] - sizes) / WIDTH) ** 2)
    return np.asarray(np.clip(weights @ off / (weights.sum(axis=1) + SHRINK), -MOST, MOST))


def share_left(collectives: Sequence[Collective], support: tuple[Array, Array]) -> Array:
    """Share of the correction that remains for each collective, 0 to 1, by the measured ranks and ranks per node.

    Args:
        collectives: Asked about; partly filled nodes count as full ones.
        support: Smallest and largest logarithm of bytes, ranks and ranks per node.
    """
    layouts = np.array([(c.num_nodes * c.ranks_per_node, c.ranks_per_node) for c in collectives], float).reshape(-1, 2)
    places = np.log(layouts)
    low, high = support[0][1:], support[1][1:]
    beyond = np.maximum(np.maximum(low - places, places - high), 0.0).sum(axis=1)
    return np.asarray(np.clip(1 - beyond / FADE, 0.0, 1.0))
