"""A dense transformer layer, its embedding and its head, for GPT- and Llama-like models.

Tensor parallelism is Megatron's (Shoeybi et al. 2019, arXiv:1909.08053): column- then row-parallel linears
between two conjugate operators, ``enter`` and ``leave``.  Sequence parallelism is that of Korthikanti et al. 2022
(arXiv:2205.05198).
"""

from __future__ import annotations

from stepsight.dataset.op import Op
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Block, Item, Saved, Step


def column_linear(shape: RankShape, name: str, n: int, k: int) -> Step:
    """A column-parallel linear; it keeps its input as it was before an all-gather."""
    return _linear(shape, name, n, k, shape.local_rows, bias_first=True)


def row_linear(shape: RankShape, name: str, n: int, k: int) -> Step:
    """A row-parallel linear; with ranks that share its bias, the bias's gradient arrives last."""
    return _linear(shape, name, n, k, shape.rows, bias_first=shape.tp.size == 1)


def _linear(shape: RankShape, name: str, n: int, k: int, input_rows: int, *, bias_first: bool) -> Step:
    m, bias = shape.rows, shape.model.has_bias
    weights = (n, n * k) if bias_first else (n * k, n)
    weight_grad = (shape.gemm("linear_wgrad", m, n, k), *([shape.op("bias_grad", m, n)] if bias else []))
    return Step(
        name,
        (shape.gemm("linear", m, n, k),),
        (shape.gemm("linear_dgrad", m, n, k),),
        weight_grad,
        weights if bias else (n * k,),
        weight_grad_first=not bias,
        saved=(Saved(input_rows * k * shape.dtype_bytes),),
    )


def norm(shape: RankShape, name: str, *, fork: bool = True) -> Step:
    """A norm; where the residual forks before it, the backward adds the two gradients."""
    kind = "layer_norm" if shape.model.family == "gpt" else "rms_norm"
    rows, hidden = shape.local_rows, shape.model.hidden
    parameters = (hidden, hidden) if kind == "layer_norm" else (hidden,)
    return Step(
        name,
        (shape.op(kind, rows, hidden),),
        (shape.op(f"{kind}_backward", rows, hidden), *([shape.op("add", rows * hidden)] if fork else [])),
        parameters=parameters,
        replicated=True,
        saved=(Saved(rows * hidden * shape.dtype_bytes),),
    )


def residual(shape: RankShape) -> Step:
    """Where the residual comes back."""
    return Step("residual", forward=(shape.op("add", shape.local_rows * shape.model.hidden),))


def _full_bytes(shape: RankShape) -> int:
    return shape.rows * shape.model.hidden * shape.dtype_bytes


def enter(shape: RankShape) -> tuple[Step, ...]:
    """Before column-parallel linears: identity forward, all-reduce backward (all-gather, reduce-scatter with sp)."""
    if shape.tp.size == 1:
        return ()
    if shape.sequence_parallel:
        gather = shape.tp_comm("all_gather", _full_bytes(shape))
        return (Step("tp", (gather,), (shape.tp_comm("reduce_scatter", _full_bytes(shape)),)),)
    return (Step("tp", backward=(shape.tp_comm("all_reduce", _full_bytes(shape)),)),)


def leave(shape: RankShape) -> tuple[Step, ...]:
    """After row-parallel linears: all-reduce forward, identity backward (reduce-scatter, all-gather with sp)."""
    if shape.tp.size == 1:
        return ()
    if shape.sequence_parallel:
        scatter = shape.tp_comm("reduce_scatter", _full_bytes(shape))
        return (Step("tp", (scatter,), (shape.tp_comm("all_gather", _full_bytes(shape)),)),)
    return (Step("tp", (shape.tp_comm("all_reduce", _full_bytes(shape)),)),)


def _attention(shape: RankShape) -> Block:
    model, tp = shape.model, shape.tp.size
    heads, kv_heads, head_dim = model.heads // tp, model.kv_heads // tp, model.head_size
    dims = (shape.micro_batch, heads, kv_heads, model.seq_len, model.seq_len, head_dim, 1)
    fused = shape.rows * (heads + 2 * kv_heads) * head_dim
    core = Step(  # its backward joins the gradients of queries, keys and values
        "attention",
        (shape.op("attention", *dims),),
        (shape.op("attention_backward", *dims), shape.op("copy", fused)),
        saved=(Saved(fused * shape.dtype_bytes + shape.rows * heads * 4),),
        attention_core=True,
    )
    rotary: tuple[Step, ...] = ()
    if model.family == "llama":
        numel = shape.rows * (heads + kv_heads) * head_dim
        rotary = (Step("rope", (shape.op("rope", numel),), (shape.op("rope_backward", numel),)),)
    qkv = column_linear(shape, "qkv", (heads + 2 * kv_heads) * head_dim, model.hidden)
    out = row_linear(shape, "out", model.hidden, heads * head_dim)
    return (norm(shape, "norm1"), *enter(shape), qkv, *rotary, core, out, *leave(shape), residual(shape))


def _mlp(shape: RankShape) -> Block:
    model, ffn = shape.model, shape.model.ffn // shape.tp.size
    numel = shape.rows * ffn
    kind, first, width = ("swiglu", "gate_up", 2 * ffn) if model.gated_mlp else ("gelu", "fc1", ffn)
    return (
        norm(shape, "norm2"),
        *enter(shape),
        column_linear(shape, first, width, model.hidden),
        Step(
            kind,
            (shape.op(kind, numel),),
            (shape.op(f"{kind}_backward", numel),),
            saved=(Saved(shape.rows * width * shape.dtype_bytes),),
        ),
        row_linear(shape, "down" if model.gated_mlp else "fc2", model.hidden, ffn),
        *leave(shape),
        residual(shape),
    )


def layer(shape: RankShape, kind: str = "layer") -> Block:
    """One transformer layer."""
    return _attention(shape) + _mlp(shape)


def embedding(shape: RankShape, shared: bool = False) -> Block:
    """Vocabulary-parallel embedding, with learned positions for ``gpt``.

    ``shared``: its table is also the logits' on this rank, so two gradients are added.
    """
    model, vocab = shape.model, shape.model.vocab // shape.vocab_tp
    dims = (shape.rows, model.hidden, vocab)
    join = (shape.op("add", vocab * model.hidden),) if shared else ()
    table = Step(
        "embedding",
        (shape.op("embedding", *dims),),
        weight_grad=(shape.op("embedding_backward", *dims), *join),
        parameters=(vocab * model.hidden,),
    )
    positions: tuple[Step, ...] = ()
    if model.family == "gpt":
        numel = shape.local_rows * model.hidden
        positions = (
            Step(
                "positions",
                (shape.op("add", numel),),
                weight_grad=(shape.op("reduce", numel),),
                parameters=(model.seq_len * model.hidden,),
                replicated=True,
            ),
        )
    return (table, *leave(shape), *positions)


def head(shape: RankShape, shared: bool = False) -> Block:
    """Final norm, vocabulary-parallel logits and cross-entropy (in fp32 when training in less).

    ``shared``: the table is the embedding's on this rank and is counted there.
    """
    model, vocab = shape.model, shape.model.vocab // shape.vocab_tp
    rows = shape.rows
    logits = Step(
        "logits",
        (shape.op("linear", rows, vocab, model.hidden),),
        (shape.op("linear_dgrad", rows, vocab, model.hidden),),
        (shape.op("linear_wgrad", rows, vocab, model.hidden),),
        () if shared else (vocab * model.hidden,),
        weight_grad_first=True,
        saved=(Saved(shape.local_rows * model.hidden * shape.dtype_bytes),),
    )
    statistics: tuple[Item, ...] = ()
    if shape.tp.size > 1:  # largest logit; sum of exponentials and logit of the target
        reduce, scale = shape.tp_comm("all_reduce", rows * 4), Op("elementwise", (rows,), "fp32")
        statistics = (Op("copy", (rows,), "fp32"), reduce, scale, reduce, reduce, scale)
    loss = Step(
        "loss",
        (Op("cross_entropy", (rows, vocab), "fp32"), *statistics),
        (Op("cross_entropy_backward", (rows, vocab), "fp32"),),
        saved=(Saved(rows * vocab * 4),),
    )
    return (norm(shape, "final_norm", fork=False), *enter(shape), logits, loss)
