"""Mixtures of experts: a router sends every token to a few of many MLPs.

The order of Megatron-Core's all-to-all dispatcher: route, permute by expert, all-to-all over the expert-parallel group
(GShard, Lepikhin et al. 2020, arXiv:2006.16668), sort by local expert, grouped matrix products, and all of it back.
Shared experts (DeepSeekMoE, Dai et al. 2024, arXiv:2401.06066) run beside the dispatch.

Experts are whole on a rank (``expert_tp`` 1) or shared by the tensor-parallel ranks, which then gather the tokens that
each received and reduce-scatter what they found.  Without sequence parallelism all tensor-parallel ranks hold the same
tokens: those that share experts all-reduce as after any row-parallel linear; those with whole experts take a part of
the tokens each and gather the results (DeepSpeed-TED, Singh et al. 2023, arXiv:2303.06318).

Tokens are those of the busiest expert-parallel rank, for which the others wait: ``imbalance`` of the mean, or
``capacity_factor`` of it if that is less.

DeepEP and HybridEP (github.com/deepseek-ai/DeepEP; Megatron-Core 0.14 to 0.18, ``moe/token_dispatcher.py``,
``MoEFlexTokenDispatcher``) send a token once to each rank that has one of its experts.  There it is copied and sorted
by expert; on the way back its copies are summed before they leave, and once more by the kernel that receives them.
Between nodes a token travels once to each node, and from there within the node, beside the rest.  Those of the own node
take as long: 16 to 64 H100 exchange 44 to 54 GB/s, counted with them, over links of 50 (DeepEP's README and
docs/README_Hybrid-EP.md, 2025-26).

The MLPs of a rank's experts: grouped matrix products, and what is between and after them.

GPT-OSS has biases in its experts and clamps their gates (its model card, arXiv:2508.10925).  Megatron-Core 0.15 to 0.18
does both by PyTorch's own kernels (``transformer/moe/experts.py``, ``TEGroupedMLP._apply_bias``; ``fusions/
fused_bias_geglu.py``, ``weighted_bias_quick_geglu_impl``): halves are clamped one by one and joined again; the second
bias times the router's probabilities, which are in fp32, is added expert by expert, so that all of it is in fp32.  The
first bias is part of the products.  Biases are not counted among the parameters.

Products in 8 bits need a multiple of 16 or 32 rows for each expert.  Unless the dispatcher or the router sees to it,
Megatron-Core 0.14 to 0.18 copies what the experts take to where there is room, and their results to where the padding
is left out (``experts.py``, ``quantization_padding``; Transformer Engine's ``Fp8Padding``).  In MXFP8, Transformer
Engine 2.8 to 2.11 casts experts' rows by a kernel for each expert (``csrc/extensions/cast.cpp``,
``multi_tensor_quantize_impl``).

Fused experts (cuDNN's kernels in CuTe DSL: NVIDIA's developer blog, "Boosting MoE Training Throughput with Advanced
Fusion Kernels", 15 June 2026) run all experts in one persistent kernel, which reads the numbers of rows on the device
and also activates and casts: 1.3 to 2 times as fast as a grouped product with its activation and casts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb

from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks import layer_parts
from stepsight.simulator.blocks.step import Block, Comm, Flow, Group, Join, RankShape, Saved, Step, in_module


def local_experts(shape: RankShape, rows: int) -> Block:
    """Grouped matrix products over this rank's experts, with their activation; ``rows`` of all of them."""
    model, ffn = shape.model, shape.model.expert_ffn // shape.expert_tp
    width, names = (2 * ffn, ("gate_up", "down")) if model.gated_mlp else (ffn, ("fc1", "fc2"))
    first = grouped_linear(shape, f"experts_{names[0]}", (rows, width, model.hidden), casts_gradient=not _fused(shape))
    last = grouped_linear(shape, f"experts_{names[1]}", (rows, model.hidden, ffn), casts_input=not _fused(shape))
    last = replace(last, saved=tuple([replace(tensor, made_by="moe_act") for tensor in last.saved]))
    between: Block = (layer_parts.activation(shape, rows, ffn),)
    after: Block = ()
    if _fused(shape):
        return first, replace(between[0], forward=(), backward=()), last
    if model.expert_bias:
        between, after = (_clamp(shape, rows * ffn), *between), (_bias(shape, rows * model.hidden),)
    inside = (first, *in_module(between, "moe_act"), last, *after)
    if not shape.quantizes or shape.model.capacity_factor or shape.dispatcher == "hybridep":
        return inside
    moved = (shape.op("copy", rows * model.hidden),)
    return Step("pad", moved, moved), *inside, Step("unpad", moved, moved)


def _fused(shape: RankShape) -> bool:
    """Whether biases, activation and its casts are part of the products."""
    return shape.model.fused_experts and shape.quantizes


def grouped_linear(
    shape: RankShape, name: str, sizes: tuple[int, int, int], *, casts_input: bool = True, casts_gradient: bool = True
) -> Step:
    """One linear for each local expert, all in one kernel.

    ``sizes``: rows of all experts together, outputs and inputs of one.  ``casts_input``, ``casts_gradient``: whether
    kernels of their own cast the input in forward, the gradient in backward, where products have a narrower type.
    """
    (rows, n, k), bias, groups = sizes, shape.model.has_bias, shape.model.experts // shape.ep.size
    input_casts = _cast_groups(shape, rows * k) if casts_input else ()
    gradient_casts = _cast_groups(shape, rows * n) if casts_gradient else ()
    weight_casts = layer_parts.cast_again(shape, groups * n * k)
    return Step(
        name,
        (*input_casts, *weight_casts, _product(shape, "grouped_linear", (groups, *sizes))),
        (*gradient_casts, *weight_casts, _product(shape, "grouped_linear_dgrad", (groups, *sizes))),
        (
            *layer_parts.cast_again(shape, rows * k),
            _product(shape, "grouped_linear_wgrad", (groups, *sizes)),
            *(layer_parts.accumulated(shape, n * k) if groups == 1 else ()),
            *([shape.op("bias_grad", rows, n)] if bias else []),
        ),
        ((n,) * groups if bias else ()) + (n * k,) * groups,
        narrow=(n * k,) if shape.kernels.fp8_weights and not shape.kernels.fp8_dynamic else (),
        weight_grad_first=not bias and not shape.quantizes,
        expert=True,
        saved=(Saved(rows * k * shape.gemm_bytes),),
    )


def _product(shape: RankShape, kind: str, sizes: tuple[int, int, int, int]) -> Op:
    """A grouped product; that of one expert, or of all by one persistent kernel, is an ordinary one."""
    grouped = sizes[0] > 1 and not _fused(shape)
    return shape.gemm(kind, *sizes) if grouped else shape.gemm(kind.removeprefix("grouped_"), *sizes[1:])


def _cast_groups(shape: RankShape, numel: int) -> tuple[Op, ...]:
    """Casts of the operand of a grouped product: one kernel for all experts, or one for each."""
    groups = shape.model.experts // shape.ep.size if shape.kernels.casts_by_group else 1
    return layer_parts.cast(shape, -(-numel // groups)) * groups


def _clamp(shape: RankShape, numel: int) -> Step:
    """Both halves of what a gate takes, of ``numel`` elements each, clamped by a kernel each and joined by one more.

    In backward the gradient's halves are joined, after one comparison and a selection of the half with one bound, and
    two comparisons, their conjunction and a selection of the other; a comparison writes one byte.
    """
    half, both = shape.op("copy", numel), shape.op("copy", 2 * numel)
    return Step("clamp", (half, half, both), (*(half,) * 6, both), saved=(Saved(2 * numel * shape.dtype_bytes),))


def _bias(shape: RankShape, numel: int) -> Step:
    """The second bias times the probabilities, in the main type, by kernels of each expert where only it has the bias.

    Forward writes the product, adds it to the output, joins the experts' rows and casts them back.  Backward casts the
    gradient up, and down for the output; it multiplies it by the probabilities and sums over rows for the bias,
    multiplies it by the bias and sums over columns for the probabilities, and joins the experts' rows.
    """
    groups = shape.model.experts // shape.ep.size
    narrow, wide = shape.op("copy", numel), shape.main_op("copy", numel)
    fill, add, copy, reduce = (shape.main_op(kind, -(-numel // groups)) for kind in ("fill", "add", "copy", "reduce"))
    return Step(
        "expert_bias",
        (*(fill, add) * groups, wide, narrow),
        (wide, narrow, *(copy, reduce, copy, reduce) * groups, narrow),
    )


# Part of an all-to-all that runs beside another micro-batch.  So overlap saves 3.8 of 8.8 s of Qwen3 30B's on 16 H100
# with experts over both nodes by HybridEP, as both also lose to each other; of 8.3 s it saved 3.7 (Megatron-Bridge 0.6,
# skills/nemo-mbridge-perf-expert-parallel-overlap, July 2026; in May, 9.9 s with NCCL's all-to-alls).
HIDDEN = 0.6
# Time of HybridEP's kernels within NVLink relative to NCCL's all-to-all of as many bytes.  On GB200 they move 751 GB/s
# among 8 ranks and 624 among 32 (DeepEP's docs/README_Hybrid-EP.md, 2025-26: mean of dispatch in 16 bits and combine,
# 32 processors); by NCCL's table of B200, and what follows from it for 32 ranks, it is 634 and 472.
HYBRID_EP = 0.8


@dataclass(frozen=True, slots=True)
class Tokens:
    """Numbers of rows at each step of a mixture, on one rank: tokens that it routes; copies of them that go to experts;
    copies that come from the expert-parallel group, or tokens, if each comes once; copies that its experts compute.
    """

    routed: int
    sent: int
    received: int
    computed: int


def token_counts(shape: RankShape) -> Tokens:
    """Numbers of tokens that are sent to each expert."""
    model, tp = shape.model, shape.tp.size
    routed = shape.local_rows
    if tp > 1 and shape.expert_tp == 1 and not shape.sequence_parallel:
        routed = shape.rows // tp
    copies = routed * model.experts_per_token
    most = model.capacity_factor or float("inf")
    busiest = min(model.imbalance if shape.ep.size > 1 else 1.0, most)
    received = round(copies * busiest)
    gathered = shape.expert_tp > 1 and shape.sequence_parallel
    computed = received * tp if gathered else received
    if shape.ep.size > 1 and shape.dispatcher != "alltoall":
        received = round(routed * places_of_token(shape, shape.ep.size) * busiest)
    return Tokens(routed, round(copies * min(1.0, most)), received, computed)


def places_of_token(shape: RankShape, places: int) -> float:
    """Expected number of the ``places`` that hold some of a token's experts, if all choices of experts are alike.

    A place is left out if all chosen experts are among the others': hypergeometric, without replacement.
    """
    model, elsewhere = shape.model, shape.model.experts - shape.model.experts // places
    k = model.experts_per_token
    return places * (1.0 - comb(elsewhere, k) / comb(model.experts, k))


def experts(shape: RankShape) -> Block:
    """The mixture that replaces an MLP, without norm and residual."""
    model, count = shape.model, token_counts(shape)
    split = shape.tp.size > 1 and not shape.sequence_parallel and shape.expert_tp == 1
    reduce = shape.expert_tp > 1 and not shape.sequence_parallel
    whole_bytes = shape.rows * model.hidden * shape.dtype_bytes
    shared: Block = ()
    if model.shared_experts:
        inside = layer_parts.mlp(shape, model.shared_experts * model.expert_ffn, "shared_", keeps="norm2")
        joins = shape.ep.size > 1 and shape.dispatcher != "alltoall"  # from tokens, and back to copies
        first_of = layer_parts.fork(shape, "shared", flow=(*[Flow.JOIN] * joins, Flow.SWAP))
        shared = (first_of, *in_module(inside, "shared_experts"), Step("shared", flow=(Flow.SWAP,)))
    if shape.ep.size > 1 and shape.dispatcher != "alltoall":
        out: Block = _once_to_each_rank(shape, count, shared)
        first: Block = (_router(shape, count),)
    else:
        moves = _moves(shape, count, "permute"), _moves(shape, count, "unpermute")
        # The copies of each token are summed, weighted by their probabilities, and kept for the router's gradient.
        copies = (Saved(count.sent * model.hidden * shape.dtype_bytes),)
        back = Step("unpermute", moves[1], _moves(shape, count, "unpermute_backward"), saved=copies)
        out = (*_away_and_back(shape, count, shared), back)
        first = (_router(shape, count), Step("permute", *moves, saved=(Saved(4 * count.sent),), flow=(Flow.JOIN,)))
    if split:
        own = Step("tp", backward=(shape.tp_comm("all_gather", whole_bytes),))
        gather = Step("tp", (shape.tp_comm("all_gather", whole_bytes),))
        block: Block = (own, *first, *out, gather)
    elif reduce:
        block = (first[0], *layer_parts.enter(shape), *first[1:], *out, *layer_parts.leave(shape))
    else:
        block = (*first, *out)
    if shared:
        total = shape.op("add", shape.local_rows * model.hidden)
        block = (*block, Step("shared_add", (total,), flow=(Flow.JOIN_AT_LAST,)))
    return block


def _router(shape: RankShape, count: Tokens) -> Step:
    """Router: scores in the activations' type; probabilities, choice and balancing loss in the main type."""
    hidden, numel = shape.model.hidden, count.routed * shape.model.experts
    sizes = (count.routed, shape.model.experts, hidden)
    return Step(
        "router",
        (
            shape.op("linear", *sizes),
            shape.main_op("softmax", *sizes[:2]),
            shape.main_op("reduce", numel),
            shape.main_op("elementwise", numel),
        ),
        (
            shape.main_op("elementwise", numel),
            shape.main_op("softmax_backward", *sizes[:2]),
            shape.op("linear_dgrad", *sizes),
            shape.op("add", count.routed * hidden),  # weights for the outputs of the experts
        ),
        (shape.op("linear_wgrad", *sizes),),
        (shape.model.experts * hidden,),
        replicated=True,
        saved=(layer_parts.kept(count.routed * hidden * shape.dtype_bytes, "norm2"), Saved(numel * shape.main_bytes)),
        flow=(Flow.KEEP,) * (2 if shape.model.shared_experts else 1),
    )


def _moves(shape: RankShape, count: Tokens, kind: str) -> tuple[Op, ...]:
    """A permutation of copies; where experts take a fixed number of them, it is a plain gather."""
    if shape.model.capacity_factor:
        return (shape.op("copy", count.sent * shape.model.hidden),)
    return (shape.op(kind, count.sent, count.routed, shape.model.hidden),)


def _travels(shape: RankShape, group: Group, num_bytes: int) -> tuple[Comm, ...]:
    """An all-to-all: it is waited for, but for the part that runs beside another micro-batch's computation.

    A passage stands for both micro-batches: beside its computation runs what the other one sends, which is as much.
    """
    beside = round(num_bytes * HIDDEN) if shape.overlap_ep else 0
    parts = (num_bytes - beside, False), (beside, True)
    return tuple([Comm(group.collective("all_to_all", n), "ep", beside=hidden) for n, hidden in parts if n])


def _once_to_each_rank(shape: RankShape, count: Tokens, shared: Block) -> Block:
    """Send each token once to each rank or node, sort it by expert there, and back; see the module."""
    model, group, places = shape.model, shape.ep, shape.ep.size
    nodes = shape.ep.size // shape.ep.per_node
    if nodes > 1:  # what crosses nodes is slower than what is passed on within them, and runs beside it
        group, places = Group(nodes, 1), nodes
    share = places_of_token(shape, places) / places_of_token(shape, shape.ep.size)
    share *= nodes / (nodes - 1) if nodes > 1 else 1.0  # the own node's tokens take their turn
    share *= HYBRID_EP if shape.dispatcher == "hybridep" and nodes == 1 else 1.0
    here = _travels(shape, group, round(count.received * share) * model.hidden * shape.dtype_bytes)
    sizes = count.computed, count.received, model.hidden
    sort, join = (shape.op("permute", *sizes),), (shape.op("unpermute", *sizes),)
    return (
        *shared,
        Step("dispatch", here, here, flow=() if shared else (Flow.JOIN,)),
        Step("permute", sort, join, saved=(Saved(4 * count.computed),)),
        *local_experts(shape, count.computed),
        Step("unpermute", join, sort),
        Step("combine", here, here),
    )


def _away_and_back(shape: RankShape, count: Tokens, shared: Block) -> Block:
    """Send copies to their experts and back; shared experts compute during the exchange."""
    model, size = shape.model, shape.dtype_bytes
    before: Block = shared
    after: Block = ()
    if shape.ep.size > 1:
        num_bytes = count.received * model.hidden * size
        beside = Comm(shape.ep.collective("all_to_all", num_bytes), "ep", beside=True)
        here = _travels(shape, shape.ep, num_bytes)
        after = (Step("combine", here, here),)
        if shared:  # in backward the same in reverse
            arrive = Step("dispatch", (Join("ep"),), (beside,), flow=(Flow.DROP,))
            before = (Step("dispatch", (beside,), (Join("ep"),)), *shared, arrive)
        else:
            before = (Step("dispatch", here, here),)
    if count.computed > count.received:
        num_bytes = count.computed * model.hidden * size
        gather, scatter = shape.tp_comm("all_gather", num_bytes), shape.tp_comm("reduce_scatter", num_bytes)
        before = (*before, Step("tp", (gather,), (scatter,)))
        after = (Step("tp", (scatter,), (gather,)), *after)
    if shape.ep.size > 1 and model.experts > shape.ep.size:
        sort = shape.op("copy", count.computed * model.hidden)  # from sorted by sender to sorted by expert
        before = (*before, Step("sort", (sort,), (sort,)))
        after = (Step("sort", (sort,), (sort,)), *after)
    return (*before, *local_experts(shape, count.computed), *after)
