"""Attention, from the layer's input to the input of the residual addition."""

from __future__ import annotations

from dataclasses import replace

from stepsight.simulator.blocks import eager
from stepsight.simulator.blocks.context_parallel import all_gather, ring
from stepsight.simulator.blocks.heads import Heads
from stepsight.simulator.blocks.layer_parts import column_linear, entered, left, norm, row_linear
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Block, Item, Saved, Step
from stepsight.simulator.blocks.unfused import unfused_core


def attention(shape: RankShape, *, causal: bool = True, rotary: bool = False) -> Block:
    """Self-attention with grouped queries; no norm and no residual."""
    heads = self_heads(shape, causal)
    width = heads.joined
    rope: tuple[Step, ...] = ()
    if rotary:
        numel = shape.rows * (heads.heads + heads.kv_heads) * heads.head_dim
        rope = (Step("rope", (shape.op("rope", numel),), (shape.op("rope_backward", numel),)),)
        if shape.kernels.separate_kernels:
            rope = (Step("rope", eager.rope(shape, numel), eager.rope(shape, numel)),)
    norms: tuple[Step, ...] = ()
    if shape.model.qk_norm:  # each head is a row
        counts = {"q_norm": heads.heads, "k_norm": heads.kv_heads}
        norms = tuple([norm(shape, name, fork=False, rows=shape.rows * count, width=heads.head_dim)
                       for name, count in counts.items()])  # fmt: skip
    qkv = column_linear(shape, "qkv", width, shape.model.hidden)
    out = row_linear(shape, "out", shape.model.hidden, heads.heads * heads.v_dim)
    if shape.kernels.keeps_projections and shape.tp.size == 1:  # then a product is the last op of its step
        qkv, out = replace(qkv, output_kept=True), replace(out, output_kept=True)
    return (*entered(shape, qkv), *norms, *rope, *core(shape, heads), *left(shape, out))


def self_heads(shape: RankShape, causal: bool) -> Heads:
    """Queries, keys and values of the same tokens, from one linear."""
    model, tp = shape.model, shape.tp.size
    heads, kv_heads, size = model.heads // tp, model.kv_heads // tp, model.head_size
    joined = (heads + 2 * kv_heads) * size
    return Heads(heads, kv_heads, size, size, shape.seq_len, shape.seq_len, causal, joined)


def core(shape: RankShape, heads: Heads, *, made_by: str = "") -> Block:
    """From queries, keys and values to the output of each head; selective recomputation repeats this part.

    ``made_by``: the module that makes queries, keys and values.
    """
    joined: tuple[Item, ...] = ()
    if heads.joined:
        joined = (shape.op("copy", shape.micro_batch * heads.q_len * heads.joined),)
    if not shape.model.fused_attention:
        return unfused_core(shape, heads, joined)
    temporary = 0
    if shape.cp.size == 1:
        sizes, causal = (heads.q_len, heads.kv_len), heads.causal
        forward: tuple[Item, ...] = (heads.kernel(shape, "attention", *sizes, causal=causal),)
        backward: tuple[Item, ...] = (heads.kernel(shape, "attention_backward", *sizes, causal=causal),)
    elif shape.context_parallel == "ring":
        forward, backward = ring(shape, heads)
        temporary = 2 * heads.kv_numel(shape) * shape.dtype_bytes  # what arrives meanwhile, with gradients
    else:
        forward, backward = all_gather(shape, heads)
    arrived = Saved((heads.q_numel(shape) + heads.kv_numel(shape)) * shape.dtype_bytes, outside=True, made_by=made_by)
    return (
        Step(
            "attention",
            forward,
            backward + joined,
            saved=(arrived, Saved(heads.rows(shape) * shape.main_bytes)),  # with the log-sum-exp of every row
            temporary_bytes=temporary,
            attention_core=True,
        ),
    )
