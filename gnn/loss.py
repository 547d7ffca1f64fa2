"""Losses of the context model: nodes of traces, and whole iterations."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

NODE_DELTA = 0.15  # log units; beyond, an outlier counts linearly
ITERATION_DELTA = 0.1


def node_loss(correction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Weighted Huber loss of log-corrections; all ``(nodes,)``; ``weight`` may have any sum."""
    each = functional.huber_loss(correction, target, reduction="none", delta=NODE_DELTA) / NODE_DELTA
    return (weight * each).sum() / weight.sum()


def iteration_loss(seconds: Tensor, measured: Tensor) -> Tensor:
    """Huber loss of log iteration times, ``(runs,)``."""
    each = functional.huber_loss(seconds.log(), measured.log(), reduction="none", delta=ITERATION_DELTA)
    return each.mean() / ITERATION_DELTA
