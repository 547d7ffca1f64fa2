"""Blocks of models as data: the computation and communication of one rank, forward and backward.

A model's family is a few functions from a rank's shape to lists of steps; ``examples/own_block.py`` adds one.
"""

from typing import TYPE_CHECKING

from stepsight.simulator.blocks.attention import attention as attention
from stepsight.simulator.blocks.attention import core as core
from stepsight.simulator.blocks.attention import self_heads as self_heads
from stepsight.simulator.blocks.family import Family as Family
from stepsight.simulator.blocks.family import find_family as find_family
from stepsight.simulator.blocks.family import logits_and_loss as logits_and_loss
from stepsight.simulator.blocks.family import positions as positions
from stepsight.simulator.blocks.family import register_family as register_family
from stepsight.simulator.blocks.family import tokens as tokens
from stepsight.simulator.blocks.layer_parts import activation as activation
from stepsight.simulator.blocks.layer_parts import column_linear as column_linear
from stepsight.simulator.blocks.layer_parts import enter as enter
from stepsight.simulator.blocks.layer_parts import fork as fork
from stepsight.simulator.blocks.layer_parts import leave as leave
from stepsight.simulator.blocks.layer_parts import linear as linear
from stepsight.simulator.blocks.layer_parts import mlp as mlp
from stepsight.simulator.blocks.layer_parts import norm as norm
from stepsight.simulator.blocks.layer_parts import residual as residual
from stepsight.simulator.blocks.layer_parts import row_linear as row_linear
from stepsight.simulator.blocks.moe import experts as experts
from stepsight.simulator.blocks.step import Block as Block
from stepsight.simulator.blocks.step import Comm as Comm
from stepsight.simulator.blocks.step import Item as Item
from stepsight.simulator.blocks.step import Join as Join
from stepsight.simulator.blocks.step import OverlappedOp as OverlappedOp
from stepsight.simulator.blocks.step import RankShape as RankShape
from stepsight.simulator.blocks.step import Saved as Saved
from stepsight.simulator.blocks.step import Step as Step

Beside = OverlappedOp  # its earlier name

if not TYPE_CHECKING:  # type checkers take the imports above; ``help`` shows what is listed
    _modules = {"adapters", "dlrm", "family", "layer_parts", "moe", "step"}
    __all__ = sorted({name for name in globals() if name[0] != "_"} - {"TYPE_CHECKING", *_modules})
