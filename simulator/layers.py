"""Blocks of a transformer as lists of steps: what one rank computes and says, forward and backward.

A block is data: a tuple of ``Step``; its backward pass is the steps' ``backward`` and ``weight_grad`` in reverse
order.  Tensor parallelism is Megatron's (Shoeybi et al. 2019, arXiv:1909.08053): column- then row-parallel linears
between two conjugate operators, ``_enter`` and ``_leave``.  Sequence parallelism is that of Korthikanti et al. 2022
(arXiv:2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stepsight.dataset.job import ModelSpec
from stepsight.dataset.op import DTYPE_BYTES, Collective, Op

Work = Op | Collective


@dataclass(frozen=True, slots=True)
class Step:
    """One module call.

    Attributes:
        name: For people (``qkv``).
        forward: Work in order; a collective here blocks the stream of the computation.
        backward: Work that gives the gradient of the input, in order.
        weight_grad: Work that gives the gradients of the parameters; nothing else waits for it.
        parameters: Elements of each parameter tensor on one rank, in the order in which gradients arrive.
        weight_grad_first: Whether autograd computes the weights' gradients before the input's (linears without bias).
        replicated: Whether tensor-parallel ranks hold the same parameters; with sequence parallelism each has a part of
            their gradient.
        saved_bytes: Activations that the forward keeps for the backward; each tensor is counted by one step.
        attention_core: Whether selective recomputation repeats this step.
    """

    name: str
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    weight_grad: tuple[Work, ...] = ()
    parameters: tuple[int, ...] = ()
    weight_grad_first: bool = False
    replicated: bool = False
    saved_bytes: int = 0
    attention_core: bool = False

    @property
    def full_backward(self) -> tuple[Work, ...]:
        """Both parts of the backward in the order of autograd."""
        if self.weight_grad_first:
            return self.weight_grad + self.backward
        return self.backward + self.weight_grad


Block = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class RankShape:
    """What one rank of a tensor-parallel group sees of a micro-batch.

    Attributes:
        model: The whole model.
        micro_batch: Sequences.
        dtype: Of activations and compute.
        tp: Tensor-parallel degree.
        tp_per_node: Its ranks that share a node.
        sequence_parallel: Whether norms and residuals hold ``1 / tp`` of the rows.
    """

    model: ModelSpec
    micro_batch: int
    dtype: str
    tp: int = 1
    tp_per_node: int = 1
    sequence_parallel: bool = False

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.model.seq_len

    @property
    def local_rows(self) -> int:
        """Tokens that norms and residuals hold."""
        return self.rows // self.tp if self.sequence_parallel else self.rows

    @property
    def boundary_bytes(self) -> int:
        """Bytes of the activation that passes from one pipeline stage to the next."""
        return self.local_rows * self.model.hidden * DTYPE_BYTES[self.dtype]

    def op(self, kind: str, *dims: int) -> Op:
        return Op(kind, dims, self.dtype)

    def collective(self, kind: str, num_bytes: int) -> Collective:
        return Collective(kind, num_bytes, self.tp, self.tp_per_node)


def _column_linear(shape: RankShape, name: str, n: int, k: int) -> Step:
    """A column-parallel linear; it keeps its input as it was before an all-gather."""
    return _linear(shape, name, n, k, shape.local_rows, bias_first=True)


def _row_linear(shape: RankShape, name: str, n: int, k: int) -> Step:
    """A row-parallel linear; with ranks that share its bias, the bias's gradient arrives last."""
    return _linear(shape, name, n, k, shape.rows, bias_first=shape.tp == 1)


def _linear(shape: RankShape, name: str, n: int, k: int, input_rows: int, *, bias_first: bool) -> Step:
    m, bias = shape.rows, shape.model.has_bias
    weights = (n, n * k) if bias_first else (n * k, n)
    weight_grad = (shape.op("linear_wgrad", m, n, k), *([shape.op("bias_grad", m, n)] if bias else []))
    return Step(
        name,
        (shape.op("linear", m, n, k),),
        (shape.op("linear_dgrad", m, n, k),),
        weight_grad,
        weights if bias else (n * k,),
        weight_grad_first=not bias,
        saved_bytes=input_rows * k * DTYPE_BYTES[shape.dtype],
    )


def _norm(shape: RankShape, name: str, *, fork: bool = True) -> Step:
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
        saved_bytes=rows * hidden * DTYPE_BYTES[shape.dtype],
    )


def _join(shape: RankShape) -> Step:
    """Where the residual comes back."""
    return Step("residual", forward=(shape.op("add", shape.local_rows * shape.model.hidden),))


def _full_bytes(shape: RankShape) -> int:
    return shape.rows * shape.model.hidden * DTYPE_BYTES[shape.dtype]


def _enter(shape: RankShape) -> tuple[Step, ...]:
    """Before column-parallel linears: identity forward, all-reduce backward (all-gather, reduce-scatter with sp)."""
    if shape.tp == 1:
        return ()
    if shape.sequence_parallel:
        gather = shape.collective("all_gather", _full_bytes(shape))
        return (Step("tp", (gather,), (shape.collective("reduce_scatter", _full_bytes(shape)),)),)
    return (Step("tp", backward=(shape.collective("all_reduce", _full_bytes(shape)),)),)


def _leave(shape: RankShape) -> tuple[Step, ...]:
    """After row-parallel linears: all-reduce forward, identity backward (reduce-scatter, all-gather with sp)."""
    if shape.tp == 1:
        return ()
    if shape.sequence_parallel:
        scatter = shape.collective("reduce_scatter", _full_bytes(shape))
        return (Step("tp", (scatter,), (shape.collective("all_gather", _full_bytes(shape)),)),)
    return (Step("tp", (shape.collective("all_reduce", _full_bytes(shape)),)),)


def _attention(shape: RankShape) -> Block:
    model, tp = shape.model, shape.tp
    heads, kv_heads, head_dim = model.heads // tp, model.kv_heads // tp, model.head_size
    dims = (shape.micro_batch, heads, kv_heads, model.seq_len, model.seq_len, head_dim, 1)
    fused = shape.rows * (heads + 2 * kv_heads) * head_dim
    core = Step(  # its backward joins the gradients of queries, keys and values
        "attention",
        (shape.op("attention", *dims),),
        (shape.op("attention_backward", *dims), shape.op("copy", fused)),
        saved_bytes=fused * DTYPE_BYTES[shape.dtype] + shape.rows * heads * 4,
        attention_core=True,
    )
    rotary: tuple[Step, ...] = ()
    if model.family == "llama":
        numel = shape.rows * (heads + kv_heads) * head_dim
        rotary = (Step("rope", (shape.op("rope", numel),), (shape.op("rope_backward", numel),)),)
    qkv = _column_linear(shape, "qkv", (heads + 2 * kv_heads) * head_dim, model.hidden)
    out = _row_linear(shape, "out", model.hidden, heads * head_dim)
    return (_norm(shape, "norm1"), *_enter(shape), qkv, *rotary, core, out, *_leave(shape), _join(shape))


def _mlp(shape: RankShape) -> Block:
    model, ffn = shape.model, shape.model.ffn // shape.tp
    numel = shape.rows * ffn
    kind, first, width = ("swiglu", "gate_up", 2 * ffn) if model.gated_mlp else ("gelu", "fc1", ffn)
    return (
        _norm(shape, "norm2"),
        *_enter(shape),
        _column_linear(shape, first, width, model.hidden),
        Step(
            kind,
            (shape.op(kind, numel),),
            (shape.op(f"{kind}_backward", numel),),
            saved_bytes=shape.rows * width * DTYPE_BYTES[shape.dtype],
        ),
        _row_linear(shape, "down" if model.gated_mlp else "fc2", model.hidden, ffn),
        *_leave(shape),
        _join(shape),
    )


@lru_cache(maxsize=4096)
def layer_block(shape: RankShape) -> Block:
    """One transformer layer."""
    return _attention(shape) + _mlp(shape)


@lru_cache(maxsize=4096)
def embedding_block(shape: RankShape, shared: bool = False) -> Block:
    """Vocabulary-parallel embedding, with learned positions for ``gpt``.

    ``shared``: its table is also the logits' on this rank, so two gradients are added.
    """
    model, vocab = shape.model, shape.model.vocab // shape.tp
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
    return (table, *_leave(shape), *positions)


@lru_cache(maxsize=4096)
def head_block(shape: RankShape, shared: bool = False) -> Block:
    """Final norm, vocabulary-parallel logits and cross-entropy (in fp32 when training in less).

    ``shared``: the table is the embedding's on this rank and is counted there.
    """
    model, vocab = shape.model, shape.model.vocab // shape.tp
    rows, dtype = shape.rows, shape.dtype
    logits = Step(
        "logits",
        (Op("linear", (rows, vocab, model.hidden), dtype),),
        (Op("linear_dgrad", (rows, vocab, model.hidden), dtype),),
        (Op("linear_wgrad", (rows, vocab, model.hidden), dtype),),
        () if shared else (vocab * model.hidden,),
        weight_grad_first=True,
        saved_bytes=shape.local_rows * model.hidden * DTYPE_BYTES[dtype],
    )
    statistics: tuple[Work, ...] = ()
    if shape.tp > 1:  # largest logit; sum of exponentials and logit of the target
        reduce, scale = shape.collective("all_reduce", rows * 4), Op("elementwise", (rows,), "fp32")
        statistics = (Op("copy", (rows,), "fp32"), reduce, scale, reduce, reduce, scale)
    loss = Step(
        "loss",
        (Op("cross_entropy", (rows, vocab), "fp32"), *statistics),
        (Op("cross_entropy_backward", (rows, vocab), "fp32"),),
        saved_bytes=rows * vocab * 4,
    )
    return (_norm(shape, "final_norm", fork=False), *_enter(shape), logits, loss)
