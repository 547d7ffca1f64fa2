"""Blocks of models as data: the computation and communication of one rank, forward and backward.

A model's family is a few functions from a rank's shape to lists of steps; ``examples/own_block.py`` adds one.
"""

from stepsight.simulator.blocks.attention import attention, core, self_heads
from stepsight.simulator.blocks.family import Family, find_family, logits_and_loss, positions, register_family, tokens
from stepsight.simulator.blocks.layer_parts import (
    activation,
    column_linear,
    enter,
    fork,
    leave,
    linear,
    mlp,
    norm,
    residual,
    row_linear,
)
from stepsight.simulator.blocks.moe import experts
from stepsight.simulator.blocks.step import Block, Comm, Item, Join, OverlappedOp, RankShape, Saved, Step

Beside = OverlappedOp  # its earlier name

__all__ = [
    "Beside",
    "Block",
    "Comm",
    "Family",
    "Item",
    "Join",
    "OverlappedOp",
    "RankShape",
    "Saved",
    "Step",
    "activation",
    "attention",
    "column_linear",
    "core",
    "enter",
    "experts",
    "find_family",
    "fork",
    "leave",
    "linear",
    "logits_and_loss",
    "mlp",
    "norm",
    "positions",
    "register_family",
    "residual",
    "row_linear",
    "self_heads",
    "tokens",
]
