"""Vision transformers (Dosovitskiy et al. 2020, arXiv:2010.11929): an encoder over patches of images.

A sequence is the patches of an image and a class token, whose last activation is classified.  Patches, positions and
the classifier are the same on all tensor-parallel ranks.
"""

from __future__ import annotations

from stepsight.simulator.blocks import vocabulary
from stepsight.simulator.blocks.attention import attention
from stepsight.simulator.blocks.layer_parts import linear, mlp, norm, residual
from stepsight.simulator.blocks.step import Block, RankShape, Step


def layer(shape: RankShape, kind: str = "layer") -> Block:
    """One encoder layer."""
    look = (norm(shape, "norm1"), *attention(shape, causal=False), residual(shape))
    return (*look, norm(shape, "norm2"), *mlp(shape), residual(shape))


def embedding(shape: RankShape, shared: bool = False) -> Block:
    """A linear on every patch, the class token, and positions."""
    model, whole = shape.model, shape.local_rows == shape.rows and shape.cp.size == 1
    rows = shape.local_rows - (shape.micro_batch if whole else 0)  # ranks with a part of an image: at most one fewer
    patches = linear(shape, "patches", model.hidden, model.patch_dim, rows, replicated=True)
    patches = Step(  # images need no gradient
        patches.name,
        patches.forward,
        weight_grad=patches.weight_grad,
        parameters=patches.parameters,
        replicated=True,
        saved=patches.saved,
    )
    token = Step(
        "class_token",
        (shape.op("copy", shape.local_rows * model.hidden),),
        weight_grad=(shape.op("reduce", shape.micro_batch * model.hidden),),
        parameters=(model.hidden,),
        replicated=True,
    )
    return (patches, token, vocabulary.positions(shape))


def head(shape: RankShape, shared: bool = False) -> Block:
    """Final norm of all rows, logits of one row per image, loss."""
    model, images = shape.model, shape.micro_batch
    pick = Step(
        "pick",
        (shape.op("copy", images * model.hidden),),
        (shape.op("fill", shape.local_rows * model.hidden), shape.op("copy", images * model.hidden)),
    )
    classes = linear(shape, "classes", model.vocab, model.hidden, images, replicated=True)
    return (norm(shape, "final_norm", fork=False), pick, classes, vocabulary.loss(shape, images, model.vocab))
