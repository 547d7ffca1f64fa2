"""Parts that layers share: linears, norms, residuals, MLPs, and the borders of tensor-parallel regions.

Without fusion PyTorch runs kernels element by element in the activations' type, with the main type (fp32) in between
where the modules say so (``nn.RMSNorm`` before PyTorch 2.8; torchtitan's ``apply_rotary_emb``, 2024-25, in complex
fp32; ``F.silu(gate) * up``; ``cross_entropy`` of fp32 logits).  Where both types are one, nothing is cast.

Tensor parallelism is Megatron's (Shoeybi et al. 2019, arXiv:1909.08053): column- then row-parallel linears
between two conjugate operators, ``enter`` and ``leave``.  Sequence parallelism is that of Korthikanti et al. 2022
(arXiv:2205.05198).

In fp8 a linear casts its input in forward and the gradient of its output in backward, each in one pass that reads two
bytes and writes the value and its transpose (Transformer Engine); weights are cast once an iteration, with the
optimizer's step, and not here.  What it keeps is the cast input.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from stepsight.dataset.base.caching import cached
from stepsight.dataset.job.specs import SPLIT_TP
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.step import Block, Comm, Flow, Item, Join, LostTime, RankShape, Saved, Step

Ops = tuple[Op, ...]


def main_casts(shape: RankShape, numel: int) -> Ops:
    """Cast to the main type, or back."""
    return (shape.op("cast", numel),) if shape.casts else ()


def eager_rms_norm(shape: RankShape, rows: int, width: int) -> tuple[Ops, Ops]:
    """RMSNorm, forward and backward: cast to fp32, square, mean, multiply by the inverse root, cast back, multiply by
    the weight.
    """
    numel = rows * width
    cast = main_casts(shape, numel)
    each, add, reduce = (shape.main_op(kind, numel) for kind in ("elementwise", "add", "reduce"))
    forward = (*cast, each, reduce, each, *cast, shape.op("elementwise", numel))
    backward = (
        *(shape.op(kind, numel) for kind in ("elementwise", "add", "reduce")),
        *cast, each, add, reduce, each, add, *cast,
    )  # fmt: skip
    return forward, backward


def eager_rope(shape: RankShape, numel: int) -> Ops:
    """Rotary positions: a cast to fp32, a complex product and a cast back, in forward and in backward."""
    return *main_casts(shape, numel), shape.main_op("elementwise", numel), *main_casts(shape, numel)


def eager_gated(shape: RankShape, numel: int) -> tuple[Ops, Ops]:
    """The activation of the gate, and its product with the other branch; backward has two products and one more."""
    product = shape.op("add", numel)  # as much traffic as an addition
    return (shape.op("elementwise", numel), product), (product, product, product)


def metric_losses(shape: RankShape, rows: int, vocab: int) -> Ops:
    """Losses for metrics, each with its own cast of the logits, as autocast does it.

    Composer's ``Trainer._eval_train_metrics`` updates the metrics of the model after every micro-batch; those of
    llm-foundry's models are ``LanguageCrossEntropy`` and ``LanguagePerplexity``, each a ``CrossEntropyLoss`` (2023).
    """
    return (*main_casts(shape, rows * vocab), shape.main_op("cross_entropy", rows, vocab)) * shape.model.metric_losses


def token_metrics(shape: RankShape, rows: int, vocab: int) -> Ops:
    """Cross-entropy of every token: loss, the two largest logits and their index, difference to the maximum,
    exponentials, sum.

    InternEvo, ``internlm/model/metrics.py``, 2023-24 (``AccPerplex``), after every micro-batch on fp32 logits.
    """
    read, both = (shape.main_op(kind, rows * vocab) for kind in ("reduce", "elementwise"))
    return read, read, read, read, both, both, read


def column_linear(shape: RankShape, name: str, n: int, k: int, *, keeps: str = "", apart: tuple[int, ...] = ()) -> Step:
    """A column-parallel linear. It keeps its input from before an all-gather; in eager PyTorch, from after it."""
    return linear(shape, name, n, k, shape.rows, input_rows=shape.rows_before_columns, keeps=keeps, apart=apart)


def row_linear(shape: RankShape, name: str, n: int, k: int) -> Step:
    """A row-parallel linear; if ranks share its bias, the gradient of the bias is computed last.

    With such a bias it is a function of its own, which keeps its inputs when it has run.
    """
    step = linear(shape, name, n, k, shape.rows, bias_first=shape.tp.size == 1)
    kernels = shape.kernels
    whole = kernels.last_product_again or (shape.precision == "fp8" and not kernels.keeps_projections)
    return replace(step, ends_unneeded=not whole and not (shape.model.has_bias and shape.tp.size > 1))


def linear(
    shape: RankShape,
    name: str,
    n: int,
    k: int,
    rows: int,
    *,
    input_rows: int = 0,
    bias: bool | None = None,
    bias_first: bool = True,
    replicated: bool = False,
    keeps: str = "",
    apart: tuple[int, ...] = (),
) -> Step:
    """A linear from ``[rows, k]`` to ``[rows, n]``.

    Args:
        shape: The rank.
        name: For people.
        n, k, rows: Sizes on this rank.
        input_rows: Rows of the input that are kept, 0: all.
        bias: None: as the model has it.
        bias_first: Whether the bias's gradient arrives before the weight's.
        replicated: Whether tensor-parallel ranks hold the same weights.
        keeps: Name of the input, where other steps keep the same tensor.
        apart: Outputs of each of the linears that it is with ``separate_linears``.
    """
    kernels, bias = shape.kernels, shape.model.has_bias if bias is None else bias
    widths = apart if apart and kernels.separate_linears else (n,)
    weights = [((w, w * k) if bias_first else (w * k, w)) if bias else (w * k,) for w in reversed(widths)]
    # The sum of the gradients of the input; a compiler makes it part of what reads it.
    total = (shape.op("add" if kernels.separate_kernels else "reduce", rows * k),) * (len(widths) - 1)
    here = again = cast_again(shape, n * k)
    if kernels.fp8_weights and kernels.fp8_dynamic:  # cast first; the other layout is a copy (torchao's float8_ops.py)
        here, again = (), (shape.op("copy", n * k // 2),)
    weight_grad = (
        *cast_again(shape, rows * k),
        *(shape.gemm("linear_wgrad", rows, w, k) for w in widths),
        *accumulated(shape, n * k),
        *([shape.op("bias_grad", rows, n)] if bias else []),
    )
    return Step(
        name,
        (*cast(shape, rows * k), *here, *(shape.gemm("linear", rows, w, k) for w in widths)),
        (*cast(shape, rows * n), *again, *(shape.gemm("linear_dgrad", rows, w, k) for w in widths), *total),
        weight_grad,
        tuple(chain(*weights)),
        narrow=tuple([w * k for w in widths]) if kernels.fp8_weights else (),
        weight_grad_first=not bias and not shape.quantizes,  # the cast gradient serves both: input's comes first
        replicated=replicated,
        saved=(kept((input_rows or rows) * k * shape.gemm_bytes, keeps),),
    )


def accumulated(shape: RankShape, numel: int) -> tuple[Op, ...]:
    """Extra memory traffic of adding a product to a gradient buffer, compared with the product alone.

    In 16 bits it is 6 bytes of each element: by a kernel of its own, or in fp32 within the product (Megatron's fused
    accumulation).  Where products write the type of the buffer, they read it as well: one more read of each element.
    ``cast``: one kernel casts, another one adds.
    """
    if shape.kernels.accumulation == "cast":
        return *main_casts(shape, numel), shape.main_op("add", numel)
    kind = {"read": "reduce", "buffer": "add" if shape.casts else "reduce"}.get(shape.kernels.accumulation)
    return (shape.op(kind, numel),) if kind else ()


def kept(num_bytes: int, name: str) -> Saved:
    """The forms of an activation that several steps may keep (all rows or only the rank's rows, cast or not), each kept
    once.  A norm makes those whose name begins so.
    """
    made_by = "layernorm" if name.startswith("norm") else ""
    return Saved(num_bytes, name and f"{name} ({num_bytes} B)", made_by=made_by)


def cast(shape: RankShape, numel: int) -> tuple[Op, ...]:
    """Quantise an operand of a matrix product to 8 or 4 bits, and its transpose; no ops in other precisions.

    A scale for a whole tensor that follows from what it holds takes two passes over it, also in NVFP4 (Transformer
    Engine's recipes; NVIDIA 2025, arXiv:2509.25149, appendix C).
    """
    largest = (shape.op("reduce", numel),) if shape.kernels.finds_scales else ()
    return (*largest, shape.op("copy", numel)) if shape.quantizes else ()


def cast_again(shape: RankShape, numel: int) -> tuple[Op, ...]:
    """Quantise weights, and inputs in backward, if they are not kept in 8 bits (torchao's ``Float8Linear``,
    2024-25).
    """
    return cast(shape, numel) if shape.kernels.fp8_dynamic else ()


def norm(shape: RankShape, name: str, *, fork: bool = True, rows: int = 0, width: int = 0) -> Step:
    """A norm; if the residual forks before it, its backward adds the two gradients."""
    kind = "layer_norm" if shape.model.has_bias else "rms_norm"  # models without biases have RMSNorm
    rows, width = rows or shape.local_rows, width or shape.model.hidden
    forward: tuple[Op, ...] = (shape.op(kind, rows, width),)
    backward: tuple[Op, ...] = (shape.op(f"{kind}_backward", rows, width),)
    if shape.kernels.separate_kernels and kind == "rms_norm":
        forward, backward = eager_rms_norm(shape, rows, width)
    elif shape.kernels.norms_again:
        casts, full = main_casts(shape, rows * width), shape.main_op(kind, rows, width)
        forward = (*casts, full)  # reads 4 bytes and writes 2: nearly as much traffic
        again = (shape.op("add", rows * width), *casts, full)
        backward = (*again, shape.main_op(f"{kind}_backward", rows, width), *casts)
    return Step(
        name,
        forward,
        (*backward, *([shape.op("add", rows * width)] if fork else [])),
        parameters=(width, width) if kind == "layer_norm" else (width,),
        replicated=True,
        saved=(Saved(rows * width * shape.dtype_bytes),),
        flow=(Flow.KEEP,) * fork,
    )


def fork(shape: RankShape, name: str = "fork", *, flow: tuple[Flow, ...] = (Flow.KEEP,)) -> Step:
    """An activation with two consumers; the backward adds the two gradients."""
    return Step(name, backward=(shape.op("add", shape.local_rows * shape.model.hidden),), flow=flow)


def residual(shape: RankShape) -> Step:
    numel = shape.local_rows * shape.model.hidden
    forward = (shape.op("add", numel),)
    if not shape.model.dropout:
        return Step("residual", forward, flow=(Flow.JOIN_AT_LAST,))
    backward = (shape.op("dropout_backward", numel),)  # in forward it is fused with the addition (Megatron, 2021)
    return Step("residual", forward, backward, saved=(Saved(numel),), flow=(Flow.JOIN_AT_LAST,))


def enter(shape: RankShape, width: int = 0, *, operand: bool = False) -> tuple[Step, ...]:
    """Before column-parallel linears: identity forward, all-reduce backward (all-gather, reduce-scatter with sp).

    ``operand``: whether what is gathered is an operand of a product and nothing else (``RankShape.operand_bytes``).
    """
    if shape.tp.size == 1:
        return ()
    num_bytes = _full_bytes(shape, width)
    if shape.sequence_parallel:
        size = _operand_bytes(shape) if operand else num_bytes
        gather: tuple[Item, ...] = (shape.tp_comm("all_gather", size), *_rearranged(shape, size))
        return (Step("tp", gather, (*_rearranged(shape, num_bytes), shape.tp_comm("reduce_scatter", num_bytes))),)
    return (Step("tp", backward=(shape.tp_comm("all_reduce", num_bytes),)),)


def leave(shape: RankShape, *, operand: bool = False) -> tuple[Step, ...]:
    """After row-parallel linears: all-reduce forward, identity backward (reduce-scatter, all-gather with sp).

    ``operand``: as in ``enter``, of the gradient.
    """
    return tuple([Step(step.name, step.backward, step.forward) for step in enter(shape, operand=operand)])


def column_parallel(shape: RankShape, linear: Step) -> Block:
    """A column-parallel linear after the collective of ``enter``; the two overlap if ``overlap_tp`` says so.

    Backward then gathers the input again beside the gradient of the input, and sums that beside the weights'
    (Megatron-LM, ``LinearWithGradAccumulationAndAsyncCommunication``, 2022; Transformer Engine likewise).  Logits,
    which come once, are left in a row, so that FSDP can send parameters between their parts.
    """
    if shape.overlap_tp in ("", "torch") or shape.tp.size == 1:
        return (*enter(shape, operand=True), linear)
    num_bytes, forward = _full_bytes(shape), linear.forward
    arrive: tuple[Item, ...] = ()
    again: tuple[Item, ...] = ()
    if shape.sequence_parallel:
        arrive, forward = _split(shape, "all_gather", _operand_bytes(shape), forward)
        if shape.overlap_tp == "torch-async" and len(linear.products) > 1:
            # Its compiler splits a reduce-scatter of one product, but not of a sum of several (micro_pipeline_tp.py).
            return replace(enter(shape)[0], forward=arrive), replace(linear, forward=forward)
        if not shape.model.lora_rank:  # frozen weights have no gradient, which alone needs the input
            again = _beside(shape, "all_gather", _operand_bytes(shape))
    sums = _beside(shape, "reduce_scatter" if shape.sequence_parallel else "all_reduce", num_bytes)
    before = Step("tp", forward=arrive, backward=(Join("tp"), *_sum_of_parts(shape)))
    return before, replace(
        linear, forward=forward, backward=(*again, *linear.backward, Join("tp"), *sums), weight_grad_first=False
    )


def row_parallel(shape: RankShape, linear: Step) -> Block:
    """A row-parallel linear before the collective of ``leave``; the two overlap if ``overlap_tp`` splits it."""
    if shape.overlap_tp not in SPLIT_TP or shape.tp.size == 1 or not shape.sequence_parallel:
        return (linear, *leave(shape, operand=True))
    num_bytes = _full_bytes(shape)
    last, forward = _split(shape, "reduce_scatter", num_bytes, linear.forward)
    first, backward = _split(shape, "all_gather", _operand_bytes(shape), linear.backward)
    return replace(linear, forward=forward, backward=backward, weight_grad_first=False, ends_unneeded=False), Step(
        "tp", (*last, *_sum_of_parts(shape)), first
    )


def _rearranged(shape: RankShape, num_bytes: int) -> tuple[Op, ...]:
    """PyTorch's copy of what it gathers or scatters along the sequence, which is not the first dimension: PyTorch 2.3
    to 2.8, ``all_gather_tensor`` and ``reduce_scatter_tensor`` of torch/distributed/_functional_collectives.py.
    """
    return (shape.op("copy", num_bytes // shape.dtype_bytes),) if shape.overlap_tp.startswith("torch") else ()


def _beside(shape: RankShape, kind: str, num_bytes: int) -> tuple[Item, ...]:
    """A collective that overlaps with the steps after it, and the computation time lost to it."""
    comm = shape.tp_comm(kind, num_bytes, beside=True)
    return (comm, LostTime(comm.work, shape.compute_share, comm.stream)) if shape.compute_share else (comm,)


def _split(
    shape: RankShape, kind: str, num_bytes: int, products: tuple[Item, ...]
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """A collective split into one part per rank: the first part is exposed, the others overlap with the products."""
    if shape.overlap_tp not in SPLIT_TP:
        return (shape.tp_comm(kind, num_bytes),), products
    one = num_bytes // shape.tp.size
    rest: Comm = shape.tp_comm(kind, num_bytes - one, beside=True)
    return (shape.tp_comm(kind, one),), (rest, *products, Join("tp"))


def _sum_of_parts(shape: RankShape) -> tuple[Op, ...]:
    """The sum of the stacked parts of all ranks (``torch.sum``) after a reduce-scatter in parts: PyTorch 2.5 to 2.13,
    ``_fused_matmul_reduce_scatter_impl`` of torch/distributed/_symmetric_memory.
    """
    if shape.overlap_tp != "torch-async" or not shape.sequence_parallel:
        return ()
    return (shape.op("reduce", shape.rows * shape.model.hidden),)


def _full_bytes(shape: RankShape, width: int = 0) -> int:
    return shape.rows * (width or shape.model.hidden) * shape.dtype_bytes


def _operand_bytes(shape: RankShape) -> int:
    return shape.rows * shape.model.hidden * shape.operand_bytes


@cached(4096)
def arrivals(shape: RankShape) -> tuple[Block, Block]:
    """Gather the chunks of a part's activation, and of the gradient of its output, after they arrive from another
    stage.
    """
    gather = shape.tp_comm("all_gather", _full_bytes(shape, 0))
    return (Step("arrival", forward=(gather,)),), (Step("arrival", backward=(gather,)),)


def activation(shape: RankShape, rows: int, ffn: int) -> Step:
    """The activation between the two linears: ReLU or gated GELU for T5 (Raffel et al. 2019, arXiv:1910.10683), GELU or
    gated SiLU otherwise.
    """
    gated, numel = bool(shape.model.gated_mlp), rows * ffn
    kind = ("relu", "geglu")[gated] if shape.model.family == "t5" else ("gelu", "swiglu")[gated]
    width = 2 * ffn if gated else ffn
    forward: tuple[Op, ...] = (shape.op(kind, numel),)
    backward: tuple[Op, ...] = (shape.op(f"{kind}_backward", numel),)
    if shape.kernels.separate_kernels and gated:
        forward, backward = eager_gated(shape, numel)
    return Step(
        kind,
        forward,
        backward,
        saved=(Saved(rows * width * (1 if shape.kernels.fp8_activations else shape.dtype_bytes)),),
        temporary_bytes=numel * shape.dtype_bytes if gated else 0,  # the gate is computed again
    )


def mlp(shape: RankShape, ffn: int = 0, prefix: str = "", *, keeps: str = "") -> Block:
    """A tensor-parallel MLP without norm and residual; ``ffn``: on all ranks together, 0: the model's; ``prefix``: of
    the names of its linears; ``keeps``: name of its input, where other steps keep the same tensor.
    """
    model, own = shape.model, (ffn or shape.model.ffn) // shape.tp.size
    first, width = ("gate_up", 2 * own) if model.gated_mlp else ("fc1", own)
    fc1 = column_linear(shape, prefix + first, width, model.hidden, keeps=keeps, apart=(own,) * (width // own))
    return (
        *column_parallel(shape, fc1),
        activation(shape, shape.rows, own),
        *row_parallel(shape, row_linear(shape, prefix + ("down" if model.gated_mlp else "fc2"), model.hidden, own)),
    )
