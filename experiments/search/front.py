"""Pareto fronts: plans that no other plan dominates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def pareto_front(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Find the rows that no other row dominates in time and cost.

    The time is that of training, the cost what it costs; where a price is not known, the number of devices.

    Args:
        rows: With the keys of ``Goal.objectives``.

    Returns:
        Rows of the front, the shortest time first; of equal ones the first.
    """
    if not rows:
        return []
    second = cost_axis(rows)
    points = np.array([(row["training_time_s"], row[second]) for row in rows], dtype=np.float64)
    front, least = [], np.inf
    for at in np.lexsort((points[:, 1], points[:, 0])).tolist():
        if points[at, 1] < least:
            front.append(rows[at])
            least = points[at, 1]
    return front


def cost_axis(rows: Sequence[dict[str, Any]]) -> str:
    """The second axis of the front: ``cost``, or ``devices`` if a price is not known."""
    return "cost" if all(row["cost"] is not None for row in rows) else "devices"
