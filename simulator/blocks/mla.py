"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3, arXiv:2412.19437).

Queries and keys with values come from two narrow latents, each with a norm; rotary positions have dimensions of their
own, for keys one for all heads.  While training, keys and values are made whole and an ordinary attention follows, with
wider keys than values.  Tensor parallelism is Megatron-Core's: every rank holds the projections down, which work on the
rows of the norm, and a share of the heads of the projections up; what crosses is the latents, not the activation.
"""

from __future__ import annotations

from stepsight.simulator.blocks.attention import core
from stepsight.simulator.blocks.heads import Heads
from stepsight.simulator.blocks.layer_parts import column_linear, enter, fork, leave, linear, norm, row_linear
from stepsight.simulator.blocks.recomputed import in_module
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Block, Step


def latent_attention(shape: RankShape, *, causal: bool = True) -> Block:
    """Attention with compressed keys and values, and compressed queries where ``q_lora_rank`` > 0; no norm, no
    residual."""
    model = shape.model
    heads = latent_heads(shape, causal)
    kv_width = model.kv_lora_rank + model.rope_head_dim
    queries = heads.heads * heads.head_dim
    keys_values = heads.heads * (model.head_size + model.v_head_dim)
    kv_down = linear(
        shape, "kv_down", kv_width, model.hidden, shape.local_rows, bias=False, replicated=True, keeps="norm1"
    )
    kv_norm = norm(shape, "kv_norm", fork=False, width=model.kv_lora_rank)
    kv_up = column_linear(shape, "kv_up", keys_values, model.kv_lora_rank)
    if model.q_lora_rank:
        rank = model.q_lora_rank
        q_down = linear(
            shape, "q_down", rank, model.hidden, shape.local_rows, bias=False, replicated=True, keeps="norm1"
        )
        q_norm = norm(shape, "q_norm", fork=False, width=rank)
        latents: Block = (fork(shape), q_down, kv_down, q_norm, kv_norm, *enter(shape, rank + kv_width))
        up: Block = (column_linear(shape, "q_up", queries, rank), kv_up)
    else:  # whole queries, from the activation of all rows
        latents = (fork(shape), kv_down, kv_norm, *enter(shape, kv_width), *enter(shape))
        up = (column_linear(shape, "q", queries, model.hidden, keeps="norm1"), kv_up)
    out = row_linear(shape, "out", model.hidden, heads.heads * model.v_head_dim)
    up = in_module((*up, _rope(shape, heads)), "mla_up_proj")
    return (*latents, *up, *core(shape, heads, made_by="mla_up_proj"), out, *leave(shape))


def latent_heads(shape: RankShape, causal: bool) -> Heads:
    """Heads of latent attention: each has its own keys and values."""
    model, heads = shape.model, shape.model.heads // shape.tp.size
    size = model.head_size + model.rope_head_dim
    return Heads(heads, heads, size, model.v_head_dim, shape.seq_len, shape.seq_len, causal)


def _rope(shape: RankShape, heads: Heads) -> Step:
    """Rotary positions of each head's queries and of one shared key, which is then concatenated to each head's keys."""
    numel = shape.rows * (heads.heads + 1) * shape.model.rope_head_dim
    join = shape.op("copy", shape.rows * heads.heads * heads.head_dim)
    return Step("rope", (shape.op("rope", numel), join), (join, shape.op("rope_backward", numel)))
