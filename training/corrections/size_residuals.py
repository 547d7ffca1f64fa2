"""What one cluster's collectives take beyond their fitted choices: a correction by size, and curves over sizes.

A cluster's peculiarities (the size at which its NCCL changes algorithm, how its adapters take medium messages) recur on
other numbers of ranks.  So the logarithm of measured over fitted seconds is averaged over neighbouring sizes of a kind
and shrunk where few were measured.  It fades to zero within four doublings of ranks, or of ranks per node, beyond the
measured ones.  A larger message never takes less time: a curve is the isotonic regression of what was learned, which
also keeps the order of two networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.kinds.op import Collective
from stepsight.training.corrections.corrector import Support

Array = NDArray[np.float64]

# Bytes of the curve's knots: half octaves, up to 16 GiB.
KNOTS = np.unique(np.round(2.0 ** np.arange(0, 34.01, 0.5)).astype(np.int64))
LOG_KNOTS = np.log(KNOTS.astype(np.float64))
OCTAVE = float(np.log(2.0))
WIDTH = OCTAVE  # log units over which sizes count as neighbours
SHRINK = 1.0  # rows that say that nothing is beyond the fitted choices
FADE = 4 * OCTAVE  # log units beyond the measured ranks at which nothing is left
MOST = 1.0  # log units of a correction


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


@dataclass(frozen=True)
class SizeResidual:
    """The correction of one kind on one cluster.

    Attributes:
        logs: At ``KNOTS``, log units.
        support: Logarithms of bytes, ranks and ranks per node that were measured.
    """

    logs: Array
    support: Support

    prior_std_log = 0.15  # by which NCCL's constants are wrong on a real network

    def log_factor(self, asked: Sequence[Collective]) -> Array:
        """Logarithm of the factor of each collective, ``(asked,)``."""
        sizes = np.log(np.maximum([work.num_bytes for work in asked], 1.0))
        return np.asarray(self.known(asked) * np.interp(sizes, LOG_KNOTS, self.logs))

    def known(self, asked: Sequence[Collective]) -> Array:
        """Share that is left of the correction, by ranks and ranks per node; partly filled nodes count as full."""
        layouts = np.array([(c.num_nodes * c.ranks_per_node, c.ranks_per_node) for c in asked], float).reshape(-1, 2)
        layout = Support(self.support.low[1:], self.support.high[1:])
        return np.asarray(np.clip(1 - layout.beyond(np.log(layouts)).sum(axis=1) / FADE, 0.0, 1.0))


def size_residual(num_bytes: Array, off: Array) -> Array:
    """Correction at ``KNOTS``, log units, ``(knots,)``.

    Args:
        num_bytes: Of the measured collectives of a kind.
        off: Logarithms of measured over fitted seconds.
    """
    sizes = np.log(np.maximum(num_bytes, 1.0))
    weights = np.exp(-0.5 * ((LOG_KNOTS[:, None] - sizes) / WIDTH) ** 2)
    return np.asarray(np.clip(weights @ off / (weights.sum(axis=1) + SHRINK), -MOST, MOST))
