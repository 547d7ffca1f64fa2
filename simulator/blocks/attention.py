"""Attention, from the layer's input to the input of the residual addition: fused or not, shared or latent.

Context parallelism: each rank has a part of every sequence, and its attention needs all keys and values.

``ring`` (Liu et al. 2023, arXiv:2310.01889): keys and values go round while the attention to those at hand runs.  A
causal mask is balanced by giving every rank one part from the front and one from the back of the sequence, so that each
of the other ranks' keys costs half of a square.  Backward sends keys and values round again, and with them their
gradients, which are home after the last step; so does Transformer Engine.
``all_gather`` (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2): keys and values are fetched before the
attention, again before its backward, and their gradients are reduce-scattered.
``torch``: the ring of torch.distributed.tensor.experimental._attention (PyTorch 2.6, December 2024) in compiled graphs.
Keys and values have all heads of the queries and are gathered at once (the default rotation); what the steps find is
merged in fp32, gradients are summed and go round in fp32, and a graph waits for each message where it starts it.

Attention as separate kernels that keep the matrix of scores.

Korthikanti et al. 2022 (arXiv:2205.05198) count 5 a s^2 b bytes for it in 16 bits: 2 for the softmax's output, 1 for
the mask of a dropout and 2 for what the dropout leaves.  Without dropout 2 a s^2 b are kept, once, as the softmax's
output and as the second product's input.  The whole square is computed, masked or not.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3, arXiv:2412.19437).

Queries and keys with values come from two narrow latents, each with a norm; rotary positions have dimensions of their
own, for keys one for all heads.  While training, keys and values are made whole and an ordinary attention follows, with
wider keys than values.  Tensor parallelism is Megatron-Core's: every rank holds the projections down, which work on the
rows of the norm, and a share of the heads of the projections up; what crosses is the latents, not the activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.layer_parts import (
    column_linear,
    column_parallel,
    eager_rope,
    enter,
    fork,
    leave,
    linear,
    norm,
    row_linear,
    row_parallel,
)
from stepsight.simulator.blocks.step import Block, Comm, Flow, Item, Join, RankShape, Saved, Step, in_module

_GENERATIONS = {"flash-1": "flash1_", "flash-2": "flash2_"}  # plain ``attention`` means the last one
_KINDS = "attention", "attention_backward"


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of one micro-batch on one rank."""

    # heads, kv_heads: of this rank
    heads: int
    kv_heads: int
    head_dim: int  # values of a query and a key
    v_dim: int  # values of a value; another kernel does it where that is not head_dim
    # q_len, kv_len: tokens of a sequence on this rank, before any are fetched from others
    q_len: int
    kv_len: int
    causal: bool  # whether tokens look back alone
    # elements per token and sequence of the tensors that hold several of queries, keys and values side by side:
    # backward joins their gradients
    joined: int = 0

    def kernel(self, shape: RankShape, kind: str, q_len: int, kv_len: int, *, causal: bool) -> Op:
        """Fused ``attention`` or ``attention_backward`` of a number of queries and keys."""
        batch, flag, dtype = shape.micro_batch, int(causal), "fp8" if shape.kernels.fp8_attention else shape.dtype
        if self.v_dim == self.head_dim:
            kind = _GENERATIONS.get(shape.model.attention_kernels, "") + kind
            return Op(kind, (batch, self.heads, self.kv_heads, q_len, kv_len, self.head_dim, flag), dtype)
        return Op(f"mla_{kind}", (batch, self.heads, q_len, kv_len, self.head_dim, self.v_dim, flag), dtype)

    def q_numel(self, shape: RankShape) -> int:
        return shape.micro_batch * self.q_len * self.heads * self.head_dim

    def kv_numel(self, shape: RankShape) -> int:
        """Elements of the keys and values of this rank."""
        return shape.micro_batch * self.kv_len * self.kv_heads * (self.head_dim + self.v_dim)

    def out_numel(self, shape: RankShape) -> int:
        return shape.micro_batch * self.q_len * self.heads * self.v_dim

    def rows(self, shape: RankShape) -> int:
        """Rows of scores: one per query and head."""
        return shape.micro_batch * self.q_len * self.heads


Passes = tuple[tuple[Item, ...], tuple[Item, ...]]  # forward, backward


def ring(shape: RankShape, heads: Heads) -> Passes:
    """Attention in one step per rank of the group; the first step uses the rank's own part."""
    size, kv_numel = shape.cp.size, heads.kv_numel(shape)
    (own, other), (own_back, other_back) = (ring_kernels(shape, heads, kind) for kind in _KINDS)
    merge = (shape.op("add", heads.out_numel(shape)), shape.main_op("elementwise", heads.rows(shape)))
    message = ring_message(shape, kv_numel * shape.dtype_bytes, beside=True)
    both = ring_message(shape, 2 * kv_numel * shape.dtype_bytes, beside=True)
    forward: list[Item] = []
    backward: list[Item] = []
    for step in range(size):
        first, last = step == 0, step == size - 1
        forward += [] if last else [message]
        forward += [own if first else other, *(() if first else merge)]
        forward += [] if last else [Join("cp")]
        # Keys and values travel in all but the last step, their gradients in all but the first.
        backward += [message if first or last else both, own_back if last else other_back, Join("cp")]
        backward += [] if first else [shape.op("add", kv_numel)]
    return tuple(forward), tuple(backward)


def ring_kernels(shape: RankShape, heads: Heads, kind: str) -> tuple[Op, Op]:
    """The kernels of the rank's queries with its own keys, and with those of another rank."""
    length, other = heads.q_len, heads.kv_len // 2 if heads.causal else heads.kv_len
    own = heads.kernel(shape, kind, length, heads.kv_len, causal=heads.causal)
    return own, heads.kernel(shape, kind, length, other, causal=False)


def ring_message(shape: RankShape, num_bytes: int, *, beside: bool) -> Comm:
    """A message to the next rank, over the slowest hop."""
    near = 2 if shape.cp.per_node == shape.cp.size else 1
    return Comm(Collective("send_recv", num_bytes, 2, near), "cp", beside=beside)


def torch_ring(shape: RankShape, heads: Heads) -> Passes:
    """The steps of a ring without messages beside them."""
    repeats, heads = heads.heads > heads.kv_heads, replace(heads, kv_heads=heads.heads)
    others, numel = shape.cp.size - 1, heads.kv_numel(shape)
    (own, other), (own_back, other_back) = (ring_kernels(shape, heads, kind) for kind in _KINDS)
    merge, gather = shape.main_op("add", heads.out_numel(shape)), gathers(shape, heads)[0]
    sums = shape.main_op("add", heads.q_numel(shape)), shape.main_op("add", numel)
    home = ring_message(shape, numel * shape.main_bytes, beside=False)
    repeat, back = ((shape.op("copy", numel),), (shape.op("reduce", numel),)) if repeats else ((), ())
    steps_back = own_back, *sums, home, *((other_back, *sums, home) * others)
    return (*repeat, gather, own, *((other, merge) * others)), (gather, *steps_back, *back)


def all_gather(shape: RankShape, heads: Heads) -> Passes:
    """Attention of the rank's queries to all keys and values."""
    gather, scatter = gathers(shape, heads)
    forward, backward = whole(shape, heads)
    return (gather, *forward), (gather, *backward, scatter)


def whole(shape: RankShape, heads: Heads) -> Passes:
    """One kernel for all queries of the rank."""
    sizes = heads.q_len, heads.kv_len * shape.cp.size
    forward, backward = (heads.kernel(shape, kind, *sizes, causal=heads.causal) for kind in _KINDS)
    return (forward,), (backward,)


def gathers(shape: RankShape, heads: Heads) -> tuple[Comm, Comm]:
    """Fetch all keys and values, and return their gradients."""
    num_bytes = heads.kv_numel(shape) * shape.cp.size * shape.dtype_bytes
    return (
        Comm(shape.cp.collective("all_gather", num_bytes), "cp"),
        Comm(shape.cp.collective("reduce_scatter", num_bytes), "cp"),
    )


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
        fetch, bring = ((comm,) for comm in gathers(shape, heads))
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
    dropout: Block = ()  # the mask takes one byte per score, and the output is the input of the second product
    if shape.model.dropout:
        kept = (Saved(numel), Saved(numel * size, "dropped scores"))
        ops = (shape.op("dropout", numel),), (shape.op("dropout_backward", numel),)
        dropout = (Step("dropout", *ops, saved=kept, attention_core=True),)
    # Heads are copied into one row per token, unless the product writes them there.
    join = (shape.op("copy", heads.out_numel(shape)),) if shape.kernels.joins_heads else ()
    context = Step(
        "context",
        (product(q_len, heads.v_dim, kv_len), *join),
        (product(q_len, kv_len, heads.v_dim), product(kv_len, heads.v_dim, q_len)),
        saved=(Saved(own_v * size, outside=True), Saved((v_numel - own_v) * size)),
        attention_core=True,
    )
    return (scores, softmax, *dropout, context)


def attention(shape: RankShape, *, causal: bool = True, rotary: bool = False) -> Block:
    """Self-attention with grouped queries; no norm and no residual."""
    heads = self_heads(shape, causal)
    rope: tuple[Step, ...] = ()
    if rotary:
        numel = shape.rows * (heads.heads + heads.kv_heads) * heads.head_dim
        rope = (Step("rope", (shape.op("rope", numel),), (shape.op("rope_backward", numel),)),)
        if shape.kernels.separate_kernels:
            rope = (Step("rope", eager_rope(shape, numel), eager_rope(shape, numel)),)
    norms: tuple[Step, ...] = ()
    if shape.model.qk_norm:  # each head is a row
        counts = {"q_norm": heads.heads, "k_norm": heads.kv_heads}
        norms = tuple([norm(shape, name, fork=False, rows=shape.rows * count, width=heads.head_dim)
                       for name, count in counts.items()])  # fmt: skip
    each = heads.heads * heads.head_dim, *(heads.kv_heads * size for size in (heads.head_dim, heads.v_dim))
    qkv = column_linear(shape, "qkv", sum(each), shape.model.hidden, apart=each)
    out = row_linear(shape, "out", shape.model.hidden, heads.heads * heads.v_dim)
    if shape.kernels.keeps_projections and shape.tp.size == 1:
        qkv, out = replace(qkv, output_kept=True), replace(out, output_kept=True)
    return (*column_parallel(shape, qkv), *norms, *rope, *core(shape, heads), *row_parallel(shape, out))


def self_heads(shape: RankShape, causal: bool) -> Heads:
    """Queries, keys and values of the same tokens, from one linear."""
    model, tp = shape.model, shape.tp.size
    heads, kv_heads, size = model.heads // tp, model.kv_heads // tp, model.head_size
    joined = 0 if shape.kernels.separate_linears else (heads + 2 * kv_heads) * size
    return Heads(heads, kv_heads, size, size, shape.seq_len, shape.seq_len, causal, joined)


def core(shape: RankShape, heads: Heads, *, made_by: str = "") -> Block:
    """From queries, keys and values to the output of each head; selective recomputation repeats this part.

    ``made_by``: the module that makes queries, keys and values.
    """
    joined = (shape.op("copy", shape.micro_batch * heads.q_len * heads.joined),) if heads.joined else ()
    if not shape.model.fused_attention:
        return unfused_core(shape, heads, joined)
    temporary = 0
    if shape.cp.size == 1:
        forward, backward = whole(shape, heads)
    elif shape.context_parallel == "ring":
        forward, backward = ring(shape, heads)
        temporary = 2 * heads.kv_numel(shape) * shape.dtype_bytes  # what arrives meanwhile, with gradients
    else:
        forward, backward = (torch_ring if shape.context_parallel == "torch" else all_gather)(shape, heads)
        temporary = 2 * heads.kv_numel(shape) * shape.cp.size * shape.dtype_bytes  # what is gathered, with gradients
    numel, size = heads.q_numel(shape) + heads.kv_numel(shape), shape.dtype_bytes
    if shape.kernels.fp8_attention:
        forward = (shape.op("copy", numel), *forward)
        backward, size = (shape.op("copy", heads.out_numel(shape)), *backward), 1
    arrived = Saved(numel * size, outside=True, made_by=made_by)
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


def latent_attention(shape: RankShape, *, causal: bool = True) -> Block:
    """Attention with compressed keys and values, and compressed queries where ``q_lora_rank`` > 0; no norm, no
    residual."""
    model = shape.model
    own, size = model.heads // shape.tp.size, model.head_size + model.rope_head_dim  # each has its own keys and values
    heads = Heads(own, own, size, model.v_head_dim, shape.seq_len, shape.seq_len, causal)
    kv_width = model.kv_lora_rank + model.rope_head_dim
    queries = heads.heads * heads.head_dim
    keys_values = heads.heads * (model.head_size + model.v_head_dim)

    def down(name: str, width: int) -> Step:
        return linear(shape, name, width, model.hidden, shape.local_rows, bias=False, replicated=True, keeps="norm1")

    kv_down = down("kv_down", kv_width)
    kv_norm = norm(shape, "kv_norm", fork=False, width=model.kv_lora_rank)
    kv_up = replace(column_linear(shape, "kv_up", keys_values, model.kv_lora_rank), flow=(Flow.SWAP,))
    if model.q_lora_rank:
        rank = model.q_lora_rank
        q_norm = norm(shape, "q_norm", fork=False, width=rank)
        both = [replace(step, flow=(Flow.JOIN,)) for step in enter(shape, rank + kv_width)]
        down_again, *norms = (replace(step, flow=(Flow.SWAP,)) for step in (kv_down, q_norm, kv_norm))
        latents: Block = (fork(shape), down("q_down", rank), down_again, *norms, *both)
        own_flow = Flow.KEEP if both else Flow.SWAP
        up: Block = (replace(column_linear(shape, "q_up", queries, rank), flow=(own_flow,)), kv_up)
    else:  # whole queries, from the activation of all rows
        whole_rows = [replace(step, flow=(Flow.SWAP,)) for step in enter(shape)]
        latents = (fork(shape), kv_down, kv_norm, *enter(shape, kv_width), *whole_rows)
        q = column_linear(shape, "q", queries, model.hidden, keeps="norm1")
        up = (q if whole_rows else replace(q, flow=(Flow.SWAP,)), kv_up)
    out = row_linear(shape, "out", model.hidden, heads.heads * model.v_head_dim)
    # Rotary positions of each head's queries and of one shared key, which is then concatenated to each head's keys.
    numel, join = shape.rows * (own + 1) * model.rope_head_dim, shape.op("copy", shape.rows * own * size)
    rope = Step("rope", (shape.op("rope", numel), join), (join, shape.op("rope_backward", numel)), flow=(Flow.JOIN,))
    up = in_module((*up, rope), "mla_up_proj")
    return (*latents, *up, *core(shape, heads, made_by="mla_up_proj"), out, *leave(shape))
