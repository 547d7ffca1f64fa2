"""Decoder layers of GPT- and Llama-like models, their embedding and their head."""

from __future__ import annotations

from stepsight.dataset.job.specs import ModelSpec
from stepsight.simulator.blocks import vocabulary
from stepsight.simulator.blocks.attention import attention, latent_attention
from stepsight.simulator.blocks.layer_parts import mlp, norm, residual
from stepsight.simulator.blocks.moe import experts
from stepsight.simulator.blocks.step import Block, RankShape, in_module


def layer_kinds(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """Kind of each layer: all equal, or ``dense`` ones first and then an expert layer every ``moe_every`` layers."""
    if not model.experts:
        return (("layer", model.layers),)
    kinds = ["dense"] * model.dense_layers
    others = range(1, model.layers - model.dense_layers + 1)
    kinds += ["dense" if place % model.moe_every else "moe" for place in others]
    runs: list[tuple[str, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return tuple(runs)


def layer(shape: RankShape, kind: str = "layer") -> Block:
    """One decoder layer: ``layer`` and ``dense`` with an MLP, ``moe`` with experts."""
    latent = shape.model.attention == "mla"
    look = latent_attention(shape) if latent else attention(shape, rotary=shape.model.family == "llama")
    again = "moe" in shape.recompute_modules
    think = in_module(experts(shape), "moe", whole=again) if kind == "moe" else in_module(mlp(shape), "mlp")
    before: Block = (norm(shape, "norm1"),)
    if latent:  # otherwise Transformer Engine's linear has the norm in it
        before = in_module(before, "layernorm")
    return (*before, *look, residual(shape), *in_module((norm(shape, "norm2"),), "layernorm"), *think, residual(shape))


def embedding(shape: RankShape, shared: bool = False) -> Block:
    """Tokens, with learned positions for ``gpt``.

    ``shared``: its table is also the logits' on this rank, so two gradients are added.
    """
    learned = (vocabulary.positions(shape),) if shape.model.family == "gpt" else ()
    return (*vocabulary.tokens(shape, shared), *learned)


def head(shape: RankShape, shared: bool = False) -> Block:
    """Final norm, logits and cross-entropy.

    ``shared``: the table is the embedding's on this rank and is counted there.
    """
    return (norm(shape, "final_norm", fork=False), *vocabulary.logits_and_loss(shape, shared))
