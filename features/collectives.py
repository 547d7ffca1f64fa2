"""Numbers from collectives: steps and bytes that take time, and features for the trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.op import COLLECTIVE_KINDS, Collective

Array = NDArray[np.float64]

COLLECTIVE_IDS = {kind: index for index, kind in enumerate(COLLECTIVE_KINDS)}
COLLECTIVE_TERMS = ("calls", "steps", "wire_bytes", "buffer_bytes")
COLLECTIVE_FEATURES = ("kind", "log_bytes", "log_group_size", "log_ranks_per_node", "log_wire_bytes")


def ring_steps(collective: Collective) -> float:
    """Messages that follow one another in a ring; one for a send."""
    if collective.kind == "send_recv":
        return 1.0
    return (2.0 if collective.kind == "all_reduce" else 1.0) * (collective.group_size - 1)


def wire_bytes(collective: Collective) -> float:
    """Bytes that each rank sends in a ring (Thakur et al. 2005, doi:10.1177/1094342005051521)."""
    if collective.kind == "send_recv":
        return float(collective.num_bytes)
    return ring_steps(collective) * collective.num_bytes / collective.group_size


def collective_terms(collective: Collective) -> tuple[float, ...]:
    """Quantities whose weighted sum is a collective's time, in the order of ``COLLECTIVE_TERMS``."""
    return (1.0, ring_steps(collective), wire_bytes(collective), float(collective.num_bytes))


def collective_features(collectives: Sequence[Collective]) -> Array:
    """Features for trees, shape ``(len(collectives), len(COLLECTIVE_FEATURES))``."""
    return np.array(
        [
            (
                COLLECTIVE_IDS[c.kind],
                np.log1p(c.num_bytes),
                np.log(c.group_size),
                np.log(c.ranks_per_node),
                np.log1p(wire_bytes(c)),
            )
            for c in collectives
        ],
        dtype=np.float64,
    ).reshape(len(collectives), len(COLLECTIVE_FEATURES))


def collective_position(collective: Collective) -> Array:
    """Where a collective lies among its kind: log of bytes, group size and ranks per node."""
    return np.log([max(collective.num_bytes, 1), collective.group_size, collective.ranks_per_node])
