"""Overlap of spans with a set of intervals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def covered(start: Floats, end: Floats, begin: Floats, until: Floats) -> Floats:
    """Seconds of each span that intervals cover; overlapping intervals count once.

    Args:
        start: Of the intervals, ``(n,)``, in any order.
        end: Likewise.
        begin: Of the spans, ``(k,)``.
        until: Likewise.

    Returns:
        ``(k,)``.
    """
    if not len(start):
        return np.zeros(len(begin))
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(np.concatenate([[-np.inf], end[order]]))
    first, last = np.maximum(start[order], reached[:-1]), reached[1:]
    length = np.concatenate([[0.0], np.cumsum(np.maximum(last - first, 0.0))])
    moments, spent = np.ravel(np.column_stack([first, last])), np.repeat(length, 2)[1:-1]
    return np.asarray(np.interp(until, moments, spent) - np.interp(begin, moments, spent))
