"""Activations that are offloaded to the host's memory between forward and backward.

What a layer keeps leaves beside the next layer's forward and comes back beside the backward of the layer after it
(vDNN, Rhu et al. 2016, arXiv:1602.08124; so does Transformer Engine).  Layers in a row are alike, so each block carries
its own bytes from its first step to its last: as many transfers, one layer earlier.
"""

from __future__ import annotations

from stepsight.dataset.kinds.op import DTYPE_BYTES, Op
from stepsight.simulator.blocks.step import Beside, Block, Join, Step


def kept_bytes(block: Block) -> int:
    """Bytes that a block keeps for its backward; each named tensor counts once."""
    named = {tensor.name: tensor.num_bytes for step in block for tensor in step.saved if tensor.name}
    return sum(named.values()) + sum(t.num_bytes for step in block for t in step.saved if not t.name)


def offloaded(block: Block, dtype: str) -> Block:
    """A layer whose kept activations are copied to the host and back while it computes."""
    numel = -(-kept_bytes(block) // DTYPE_BYTES[dtype])
    if not numel:
        return block
    leave = Step("offload", (Beside(Op("to_host", (numel,), dtype)),), (Join("offload"),))
    arrive = Step("offload", (Join("offload"),), (Beside(Op("from_host", (numel,), dtype)),))
    return (leave, *block, arrive)
