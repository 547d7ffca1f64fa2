"""Numbers from collectives on a fabric: the terms of their time, and features for the trees.

A collective is seen relative to the links that it crosses, so what is learned on one fabric serves others: links of
another rate, nodes of another size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.kinds.op import Collective

Array = NDArray[np.float64]

COLLECTIVE_TERMS = ("calls", "steps", "buffer_bytes", "wire_seconds", "messages")
OVERLAPPING = (3, 4)  # terms that overlap: the longer one counts
COLLECTIVE_FEATURES = ("kind", "log_bytes", "log_group_size", "log_ranks_per_node", "log_wire_seconds")
COLLECTIVE_AXES = 4  # of ``collective_position``


def ring_steps(collective: Collective) -> float:
    """Consecutive messages in a ring; 1 for a point-to-point message."""
    record = collective.record
    return 1.0 if record.route == "message" else record.passes * (collective.group_size - 1)


def wire_bytes(collective: Collective) -> float:
    """Bytes that each rank sends in a ring (Thakur et al. 2005, doi:10.1177/1094342005051521)."""
    if collective.record.route == "message":
        return float(collective.num_bytes)
    return ring_steps(collective) * collective.num_bytes / collective.group_size


def wire_seconds(collective: Collective, fabric: Fabric) -> float:
    """Seconds that the slowest link of a collective takes for the bytes that must cross it.

    A link's bandwidth is that of one device; what leaves a node leaves through those of all the group's ranks there.
    """
    if collective.num_nodes == 1:
        return wire_bytes(collective) / fabric.intra_node.bandwidth_bytes_per_s
    link = fabric.inter_node
    near = collective.ranks_per_node if collective.record.route == "ring" else 1
    return max(0.0, wire_bytes(collective) / near - link.burst_bytes) / link.bandwidth_bytes_per_s


def collective_terms(collective: Collective, fabric: Fabric) -> tuple[float, ...]:
    """Quantities whose weighted sum is a collective's time, in the order of ``COLLECTIVE_TERMS``.

    Of the link's seconds and of the messages of all ranks (work of a host that ranks share) the longer counts.
    """
    steps = ring_steps(collective)
    messages = steps * collective.group_size
    return (1.0, steps, float(collective.num_bytes), wire_seconds(collective, fabric), messages)


def collective_features(collectives: Sequence[Collective], fabrics: Sequence[Fabric]) -> Array:
    """Features for trees, shape ``(len(collectives), len(COLLECTIVE_FEATURES))``."""
    pairs = zip(collectives, fabrics, strict=True)
    return features_on_links(collectives, [wire_seconds(c, fabric) + 1e-9 for c, fabric in pairs])


def features_on_links(collectives: Sequence[Collective], seconds: Sequence[float]) -> Array:
    """Features from the seconds of each collective on its links."""
    return np.array(
        [
            (
                c.record.code,
                np.log1p(c.num_bytes),
                np.log(c.group_size),
                np.log(c.ranks_per_node),
                np.log(on_links),
            )
            for c, on_links in zip(collectives, seconds, strict=True)
        ],
        dtype=np.float64,
    ).reshape(len(collectives), len(COLLECTIVE_FEATURES))


def collective_position(collective: Collective, fabric: Fabric) -> Array:
    """Position of a collective among its kind: log of bytes, group size, ranks per node and seconds on the link."""
    return position_on_links(collective, max(wire_seconds(collective, fabric), 1e-9))


def position_on_links(collective: Collective, seconds: float) -> Array:
    """Position of a collective from its seconds on its links."""
    return np.log([max(collective.num_bytes, 1), collective.group_size, collective.ranks_per_node, seconds])
