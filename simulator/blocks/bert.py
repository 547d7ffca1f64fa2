"""BERT (Devlin et al. 2018, arXiv:1810.04805): an encoder with norms after the residuals; masked tokens are predicted.

The loss is of every token, as in Hugging Face's ``BertForMaskedLM``, or of the masked ones alone (``loss_share``):
they are copied together before it.  There is no pooler and no next-sentence loss.
"""

from __future__ import annotations

from dataclasses import replace

from stepsight.simulator.blocks import vocabulary
from stepsight.simulator.blocks.attention import attention
from stepsight.simulator.blocks.layer_parts import activation, fork, linear, mlp, norm, residual
from stepsight.simulator.blocks.step import Block, RankShape, Step

TOKEN_TYPES = 2


def layer(shape: RankShape, kind: str = "layer") -> Block:
    """One encoder layer."""
    look = (fork(shape), *attention(shape, causal=False), residual(shape), norm(shape, "norm1", fork=False))
    return (*look, fork(shape), *mlp(shape), residual(shape), norm(shape, "norm2", fork=False))


def embedding(shape: RankShape, shared: bool = False) -> Block:
    """Tokens, positions and token types, and their norm."""
    hidden, dims = shape.model.hidden, (shape.local_rows, shape.model.hidden, TOKEN_TYPES)
    types = Step(
        "token_types",
        (shape.op("embedding", *dims), shape.op("add", shape.local_rows * hidden)),
        weight_grad=(shape.op("embedding_backward", *dims),),
        parameters=(TOKEN_TYPES * hidden,),
        replicated=True,
    )
    words = vocabulary.tokens(shape, shared)
    return (*words, vocabulary.positions(shape), types, norm(shape, "embedding_norm", fork=False))


def head(shape: RankShape, shared: bool = False) -> Block:
    """A transform, its norm, and logits with a bias."""
    masked: Block = ()
    if shape.model.loss_share < 1.0:
        length = max(1, round(shape.seq_len * shape.cp.size * shape.model.loss_share))
        shape = replace(shape, model=replace(shape.model, unpadded_len=length))
        copied = (shape.op("copy", shape.local_rows * shape.model.hidden),)
        masked = (Step("masked_tokens", copied, copied),)
    hidden, rows = shape.model.hidden, shape.local_rows
    plain = replace(shape, model=replace(shape.model, gated_mlp=False))
    transform = linear(shape, "transform", hidden, hidden, rows, replicated=True)
    found = (transform, activation(plain, rows, hidden), norm(shape, "head_norm", fork=False))
    return (*masked, *found, *vocabulary.logits_and_loss(shape, shared, bias=True))
