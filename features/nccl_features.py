"""Numbers from collectives with NCCL: the terms of their time on the fabric's links, for physics and for trees.

Rings pass through all ranks: every rank sends to the next one in its node, and those at its ends through their own
network adapters, all of a node's at once.  All-to-all and messages go straight to their target.  Sums over many nodes
also go up and down trees, whose depth is logarithmic (NVIDIA, "Massively scale your deep learning training with
NCCL 2.4", 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.features.collective_features import features_on_links, position_on_links, ring_steps, wire_bytes

Array = NDArray[np.float64]

NCCL_TERMS = ("calls", "steps", "buffer_bytes", "seconds_between_nodes", "seconds_within_node")
OVERLAPPING = (3, 4)  # terms that overlap: the longer one counts


def seconds_between(collective: Collective, fabric: Fabric) -> float:
    """Seconds that a node's adapters take for the bytes that leave it; 0 within a node."""
    if collective.num_nodes == 1:
        return 0.0
    size, near = collective.group_size, collective.ranks_per_node
    bandwidth = fabric.inter_node.bandwidth_bytes_per_s
    route = collective.record.route
    if route == "message":
        return collective.num_bytes / bandwidth
    if route == "direct":
        return collective.num_bytes * (size - near) / size / bandwidth
    return wire_bytes(collective) / (near * bandwidth)


def seconds_within(collective: Collective, fabric: Fabric) -> float:
    """Seconds that a rank's link within the node takes for the bytes to its neighbours; 0 without neighbours."""
    size, near = collective.group_size, collective.ranks_per_node
    if near == 1:
        return 0.0
    bandwidth = fabric.intra_node.bandwidth_bytes_per_s
    if collective.record.route == "direct":
        return collective.num_bytes * (near - 1) / size / bandwidth
    return wire_bytes(collective) / bandwidth


def nccl_terms(collective: Collective, fabric: Fabric) -> tuple[float, ...]:
    """Quantities whose weighted sum is a collective's time, in the order of ``NCCL_TERMS``."""
    return (
        1.0,
        ring_steps(collective),
        float(collective.num_bytes),
        seconds_between(collective, fabric),
        seconds_within(collective, fabric),
    )


def tree_terms(collective: Collective, fabric: Fabric) -> tuple[float, ...]:
    """Terms of an all-reduce by a tree over nodes: chains within nodes, and few steps between them."""
    calls, _, *rest = nccl_terms(collective, fabric)
    steps = 2.0 * (collective.ranks_per_node - 1 + ceil(log2(max(collective.num_nodes, 2))))
    return (calls, steps, *rest)


def nccl_features(collectives: Sequence[Collective], fabrics: Sequence[Fabric]) -> Array:
    """Features for trees, shape ``(len(collectives), len(COLLECTIVE_FEATURES))``, in the order of those names."""
    return features_on_links(collectives, [_longest(c, fabric) for c, fabric in zip(collectives, fabrics, strict=True)])


def nccl_position(collective: Collective, fabric: Fabric) -> Array:
    """Position of a collective among its kind: log of bytes, group size, ranks per node and seconds on the links."""
    return position_on_links(collective, _longest(collective, fabric))


def _longest(collective: Collective, fabric: Fabric) -> float:
    return max(seconds_between(collective, fabric), seconds_within(collective, fabric), 1e-9)
