"""Where ranks lie: which groups share a node.

Rank order is Megatron's default, tensor parallel fastest, then data, then pipeline::

    rank = tp_rank + tp * (dp_rank + dp * stage)

so tensor-parallel groups fill nodes first and pipeline neighbours are furthest apart.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4096)
def ranks_per_node(tp: int, dp: int, pp: int, devices_per_node: int, axis: str) -> int:
    """Ranks of one group that share a node, for the group of an axis that spans most nodes.

    Args:
        tp, dp, pp: Degrees.
        devices_per_node: Devices of one node; nodes are filled in rank order.
        axis: ``tp`` or ``dp``.

    Returns:
        ``ceil(size / nodes)`` of the worst group, so that ``Collective.num_nodes`` is what it spans.
    """
    if axis == "tp":
        size, stride = tp, 1
        first = np.arange(dp * pp) * tp
    else:
        assert axis == "dp", axis
        size, stride = dp, tp
        first = (np.arange(pp)[:, None] * tp * dp + np.arange(tp)).ravel()
    nodes = (first[:, None] + stride * np.arange(size)) // devices_per_node
    spanned = 1 + int((np.diff(nodes, axis=1) > 0).sum(axis=1).max(initial=0))
    return -(-size // spanned)


@lru_cache(maxsize=4096)
def neighbour_ranks_per_node(tp: int, dp: int, devices_per_node: int, stage: int) -> int:
    """2 if every pair of ranks that passes messages between ``stage`` and the next shares a node, else 1."""
    first = np.arange(tp * dp) + stage * tp * dp
    crosses = first // devices_per_node != (first + tp * dp) // devices_per_node
    return 1 if bool(crosses.any()) else 2
