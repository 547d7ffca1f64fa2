"""Sets of intervals of time, and how much of other spans they cover."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Intervals = NDArray[np.float64]  # (k, 2): disjoint and in order


def merge(intervals: Any) -> Intervals:
    """Disjoint intervals in order, shape ``(k, 2)``, that cover the same as ``(n, 2)`` in any order."""
    found = np.asarray(intervals, dtype=np.float64).reshape(-1, 2)
    found = found[found[:, 1] > found[:, 0]]
    found = found[np.argsort(found[:, 0], kind="stable")]
    reached = np.maximum.accumulate(found[:, 1])
    first = np.flatnonzero(np.append(True, found[1:, 0] > reached[:-1])[: len(found)])
    last = np.append(first[1:], len(found))[: len(first)] - 1
    return np.stack([found[first, 0], reached[last]], axis=1)


def overlap(intervals: Intervals, start: Floats, end: Floats) -> Floats:
    """How much of each stretch ``start … end`` the disjoint intervals cover; same shape."""
    if not len(intervals):
        return np.zeros(len(start))
    marks = intervals.ravel()
    spent = np.concatenate([[0.0], np.cumsum(intervals[:, 1] - intervals[:, 0])])
    total = np.repeat(spent, 2)[1:-1]
    return np.asarray(np.interp(end, marks, total) - np.interp(start, marks, total))


def covered(start: Floats, end: Floats, begin: Floats, until: Floats) -> Floats:
    """Seconds of each span ``begin … until``, ``(k,)``, that intervals in any order, ``(n,)``, cover once."""
    return overlap(merge(np.stack([start, end], axis=1)), begin, until)
