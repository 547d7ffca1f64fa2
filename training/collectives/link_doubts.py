"""Detect measured collectives that contradict the stated links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.features.nccl_choices import CHOICE_TERMS
from stepsight.training.collectives.between_nodes import UNFITTED, BetweenNodes

Array = NDArray[np.float64]

SLOWER, FASTER = 3.0, 1 / 1.5  # share of the stated bandwidth below which the statement is doubted
LATER = 5.0  # the same for latencies
MOST = 0.7  # share of its time from which a collective counts as bound by one resource
FEWEST, ENOUGH = 3, 200  # fewest rows for a doubt, and rows that are examined
ALIKE = 0.05  # log units of error that are ignored
SCALES = 10.0 ** np.linspace(-1, 3, 81)  # slower bandwidths that are tried
LATENCIES = [CHOICE_TERMS.index("quick_steps"), CHOICE_TERMS.index("bulk_steps")]
TRANSFERS = [CHOICE_TERMS.index("adapters"), CHOICE_TERMS.index("links_within_node")]


def link_doubts(
    collectives: Sequence[Collective], fabric: Fabric, seconds: Array, model: BetweenNodes = UNFITTED
) -> tuple[str, ...]:
    """Suggest the links between nodes that explain the measurements; empty if they may be as stated.

    Args:
        collectives: Measured; those within a node are left out.
        fabric: As stated.
        seconds: Measured, ``(collectives,)``.
        model: What the stated links imply.
    """
    across = [index for index, collective in enumerate(collectives) if collective.num_nodes > 1]
    across = across[:: max(1, len(across) // ENOUGH)]
    works, measured = [collectives[index] for index in across], np.asarray(seconds)[across]
    parts = model.parts(works, fabric)
    predicted, link = parts.sum(axis=1), fabric.inter_node
    long, short = (parts[:, some].sum(axis=1) > MOST * predicted for some in (TRANSFERS, LATENCIES))
    found = []
    if long.sum() >= FEWEST:
        stated = link.bandwidth_bytes_per_s / 1e9
        those = [work for work, is_long in zip(works, long, strict=True) if is_long]
        scale = _slower(those, fabric, measured[long], model)
        if scale > SLOWER:
            found.append(
                f"the links between nodes behave {scale:.0f} times slower than stated (about {stated / scale:.2g} of "
                f"{stated:g} GB/s per device): does NCCL use the sockets transport (NCCL_DEBUG=INFO prints "
                "NET/Socket), is GPUDirect RDMA off, or is the bandwidth that of a node? State what the links reach"
            )
        elif scale < FASTER:
            found.append(
                f"the links between nodes are {1 / scale:.1f} times faster than stated ({stated:g} GB/s per device): "
                "is the bandwidth that of fewer adapters than a node has?"
            )
    later = float(np.median(measured[short] / predicted[short])) if short.sum() >= FEWEST else 1.0
    if later > LATER:
        found.append(
            f"short messages between nodes take {later:.0f} times longer than the stated latency implies "
            f"({1e6 * link.latency_s:g} us): does NCCL use the sockets transport?"
        )
    return tuple(found)


def _slower(works: Sequence[Collective], fabric: Fabric, measured: Array, model: BetweenNodes) -> float:
    """How many times slower than stated the bandwidth between nodes is: the smallest change that explains the times."""
    link = fabric.inter_node
    off = []
    scales: list[float] = sorted(SCALES.tolist(), key=lambda scale: abs(np.log(scale)))
    for scale in scales:
        there = replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / scale,
            adapter_bytes_per_s=link.adapter_bytes_per_s / scale,
        )
        predicted = model.seconds(works, replace(fabric, inter_node=there))
        off.append(float(np.median(np.abs(np.log(predicted / measured)))))
    return next(scale for scale, error in zip(scales, off, strict=True) if error <= min(off) + ALIKE)
