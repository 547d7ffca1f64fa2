"""Attention as separate kernels that keep the matrix of scores.

Korthikanti et al. 2022 (arXiv:2205.05198) count 5 a s^2 b bytes for it in 16 bits: 2 for the softmax's output, 1 for
the mask of a dropout and 2 for what the dropout leaves.  Without dropout 2 a s^2 b are kept, once, as the softmax's
output and as the second product's input.  The whole square is computed, masked or not.
"""

from __future__ import annotations

from stepsight.simulator.blocks.context_parallel import gathers
from stepsight.simulator.blocks.heads import Heads
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Block, Item, Saved, Step


def unfused_core(shape: RankShape, heads: Heads, joined: tuple[Item, ...]) -> Block:
    """Scores, softmax and weighted values; with ``joined`` the backward ends with one joined gradient.

    With context parallelism the keys and values of all ranks are fetched first (``all_gather``).
    """
    batch, q_len, kv_len = shape.micro_batch * heads.heads, heads.q_len, heads.kv_len * shape.cp.size
    numel = batch * q_len * kv_len
    kv_numel, size = heads.kv_numel(shape) * shape.cp.size, shape.dtype_bytes

    def product(m: int, n: int, k: int) -> Item:
        return shape.core_product(batch, m, n, k)

    fetch: tuple[Item, ...] = ()
    bring: tuple[Item, ...] = ()
    if shape.cp.size > 1:
        gather, scatter = gathers(shape, heads)
        fetch, bring = (gather,), (scatter,)
    if heads.kv_heads < heads.heads:  # grouped queries: keys and values are repeated for each head
        repeated = kv_numel * heads.heads // heads.kv_heads
        fetch, bring = (*fetch, shape.op("copy", repeated)), (shape.op("reduce", repeated), *bring)
        kv_numel = repeated
    k_share = heads.head_dim / (heads.head_dim + heads.v_dim)
    own_k, k_numel = int(heads.kv_numel(shape) * k_share), int(kv_numel * k_share)
    own_v, v_numel = heads.kv_numel(shape) - own_k, kv_numel - k_numel
    scores = Step(
        "scores",
        (*fetch, product(q_len, kv_len, heads.head_dim)),
        (product(q_len, heads.head_dim, kv_len), product(kv_len, heads.head_dim, q_len), *bring, *joined),
        saved=(Saved((heads.q_numel(shape) + own_k) * size, outside=True), Saved((k_numel - own_k) * size)),
        attention_core=True,
    )
    softmax = Step(
        "softmax",
        (shape.op("softmax", batch * q_len, kv_len),),
        (shape.op("softmax_backward", batch * q_len, kv_len),),
        saved=(Saved(numel * size, "scores"),),
        attention_core=True,
    )
    context = Step(
        "context",
        (product(q_len, heads.v_dim, kv_len), *_side_by_side(shape, heads)),
        (product(q_len, kv_len, heads.v_dim), product(kv_len, heads.v_dim, q_len)),
        saved=(Saved(own_v * size, outside=True), Saved((v_numel - own_v) * size)),
        attention_core=True,
    )
    return (scores, softmax, *_dropout(shape, numel), context)


def _side_by_side(shape: RankShape, heads: Heads) -> tuple[Item, ...]:
    """Copy the output of the heads into one row per token, unless the product writes it there."""
    return (shape.op("copy", heads.out_numel(shape)),) if shape.kernels.joins_heads else ()


def _dropout(shape: RankShape, numel: int) -> Block:
    """Dropout of the scores: the mask takes one byte per score, and the output is the input of the second product."""
    if not shape.model.dropout:
        return ()
    forward, backward = (shape.op("dropout", numel),), (shape.op("dropout_backward", numel),)
    kept = (Saved(numel), Saved(numel * shape.dtype_bytes, "dropped scores"))
    return (Step("dropout", forward, backward, saved=kept, attention_core=True),)
