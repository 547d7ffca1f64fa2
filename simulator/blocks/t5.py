"""T5 (Raffel et al. 2019, arXiv:1910.10683): an encoder, and a decoder that also attends to the encoder's output.

RMSNorm before each part of a layer, no biases, ReLU or (version 1.1) gated GELU.  The first pipeline part looks up the
tokens of both; what the decoder needs of them travels along with the encoder's activation, as the encoder's output then
travels along with the decoder's: every boundary passes both.  Relative positions are a learned bias of the scores, one
table for the encoder and one for the decoder, that every layer reads and whose gradient every layer adds to.
"""

from __future__ import annotations

from dataclasses import replace

from stepsight.dataset.job.specs import ModelSpec
from stepsight.simulator.blocks import vocabulary
from stepsight.simulator.blocks.attention import Heads, attention, core
from stepsight.simulator.blocks.layer_parts import column_linear, enter, leave, mlp, norm, residual, row_linear
from stepsight.simulator.blocks.step import Block, Item, RankShape, Saved, Step

BUCKETS = 32  # buckets of relative positions


def encoder_shape(shape: RankShape) -> RankShape:
    """The rank's shape with the encoder's tokens."""
    return replace(shape, model=replace(shape.model, seq_len=shape.model.encoder_seq_len))


def layer_kinds(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """The last layers do not add their gradients to another one; the encoder's last layer includes its final norm."""
    encoder = (("encoder", model.encoder_layers - 1), ("last_encoder", 1))
    kinds = (*encoder, ("decoder", model.layers - 1), ("last_decoder", 1))
    return tuple((kind, count) for kind, count in kinds if count)


def boundary_bytes(shape: RankShape, layers_before: int) -> int:
    """The activations of encoder and decoder at the end of a part."""
    rows = shape.local_rows + encoder_shape(shape).local_rows
    return rows * shape.model.hidden * shape.dtype_bytes


def layer(shape: RankShape, kind: str) -> Block:
    """One layer of the encoder or of the decoder."""
    adds = kind in ("encoder", "decoder")
    if kind in ("decoder", "last_decoder"):
        look = (norm(shape, "norm1"), *_biased(shape, adds, causal=True), residual(shape), *_cross(shape, adds))
        return (*look, norm(shape, "norm3"), *mlp(shape), residual(shape))
    shape = encoder_shape(shape)
    look = (norm(shape, "norm1"), *_biased(shape, adds, causal=False), residual(shape))
    end: Block = ()
    if kind == "last_encoder":
        found = Saved(shape.rows_before_columns * shape.model.hidden * shape.gemm_bytes)
        last = norm(shape, "encoder_norm", fork=False)
        end = (replace(last, saved=(*last.saved, found)),)
    return (*look, norm(shape, "norm2"), *mlp(shape), residual(shape), *end)


def _biased(shape: RankShape, adds: bool, *, causal: bool) -> Block:
    """Self-attention with relative positions: unfused kernels add the bias to the scores.

    ``adds``: the bias's gradient is added to that of later layers.
    """
    numel = _scores(shape)
    total: tuple[Item, ...] = (shape.op("add", numel),) if adds else ()
    block = list(attention(shape, causal=causal))
    for index, step in enumerate(block):
        if step.name == "attention":
            block[index] = replace(step, backward=(*step.backward, *total))
        elif step.name == "scores":
            add, reduce = (shape.op(word, shape.micro_batch * numel) for word in ("add", "reduce"))
            block[index] = replace(step, forward=(*step.forward, add), backward=(reduce, *step.backward, *total))
    return tuple(block)


def _scores(shape: RankShape) -> int:
    """Scores of one sequence on one rank."""
    return shape.model.heads // shape.tp.size * shape.seq_len * shape.model.seq_len


def _cross(shape: RankShape, adds: bool) -> Block:
    """Attention of the decoder's tokens to the encoder's output.

    All of the decoder's layers keep the same encoder's output, which is counted with the encoder's last layer.
    """
    model, far = shape.model, encoder_shape(shape)
    heads, kv_heads, size = model.heads // shape.tp.size, model.kv_heads // shape.tp.size, model.head_size
    sizes = Heads(heads, kv_heads, size, size, shape.seq_len, far.seq_len, causal=False)
    sums: Block = ()  # gradients of the encoder's output are summed
    if adds:
        sums = (Step("fork", backward=(shape.op("add", far.local_rows * model.hidden),)),)
    return (
        norm(shape, "norm2"),
        *enter(shape),
        column_linear(shape, "cross_q", heads * size, model.hidden),
        *sums,
        *enter(far),
        replace(column_linear(far, "cross_kv", 2 * kv_heads * size, model.hidden), saved=()),
        *core(shape, sizes),
        row_linear(shape, "cross_out", model.hidden, heads * size),
        *leave(shape),
        residual(shape),
    )


def embedding(shape: RankShape, shared: bool = False) -> Block:
    """Embed the tokens of the encoder and of the decoder with the same table, and read the tables of relative
    positions.
    """
    far = encoder_shape(shape)
    tables = (_relative(far, "encoder_positions"), _relative(shape, "decoder_positions"))
    return (*vocabulary.tokens(far, shared), *vocabulary.tokens(shape, again=True), *tables)


def _relative(shape: RankShape, name: str) -> Step:
    heads = shape.model.heads // shape.tp.size
    dims = (_scores(shape) // heads, heads, BUCKETS)
    return Step(
        name,
        (shape.op("embedding", *dims),),
        weight_grad=(shape.op("embedding_backward", *dims),),
        parameters=(BUCKETS * heads,),
    )


def head(shape: RankShape, shared: bool = False) -> Block:
    """Final norm, logits and loss of the decoder."""
    return (norm(shape, "final_norm", fork=False), *vocabulary.logits_and_loss(shape, shared))
