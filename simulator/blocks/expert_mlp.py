"""The MLPs of a rank's experts: grouped matrix products, and what is between and after them.

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
"""

from __future__ import annotations

from dataclasses import replace

from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.layer_parts import accumulated, cast, cast_again
from stepsight.simulator.blocks.mlp import activation
from stepsight.simulator.blocks.recomputed import in_module
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Block, Saved, Step


def local_experts(shape: RankShape, rows: int) -> Block:
    """Grouped matrix products over this rank's experts, with their activation; ``rows`` of all of them."""
    model, ffn = shape.model, shape.model.expert_ffn // shape.expert_tp
    width, names = (2 * ffn, ("gate_up", "down")) if model.gated_mlp else (ffn, ("fc1", "fc2"))
    first = grouped_linear(shape, f"experts_{names[0]}", (rows, width, model.hidden), casts_gradient=not _fused(shape))
    last = grouped_linear(shape, f"experts_{names[1]}", (rows, model.hidden, ffn), casts_input=not _fused(shape))
    last = replace(last, saved=tuple([replace(tensor, made_by="moe_act") for tensor in last.saved]))
    between: Block = (activation(shape, rows, ffn),)
    after: Block = ()
    if _fused(shape):
        return first, replace(between[0], forward=(), backward=()), last
    if model.expert_bias:
        between, after = (_clamp(shape, rows * ffn), *between), (_bias(shape, rows * model.hidden),)
    inside = (first, *in_module(between, "moe_act"), last, *after)
    if not _pads(shape):
        return inside
    moved = (shape.op("copy", rows * model.hidden),)
    return Step("pad", moved, moved), *inside, Step("unpad", moved, moved)


def _pads(shape: RankShape) -> bool:
    """Whether rows are copied to where each expert has a multiple of some rows, and back."""
    return shape.quantizes and not shape.model.capacity_factor and shape.dispatcher != "hybridep"


def _fused(shape: RankShape) -> bool:
    """Whether biases, activation and its casts are part of the products."""
    return shape.model.fused_experts and shape.quantizes


def grouped_linear(
    shape: RankShape, name: str, sizes: tuple[int, int, int], *, casts_input: bool = True, casts_gradient: bool = True
) -> Step:
    """One linear for each local expert, all in one kernel.

    Args:
        shape: The rank.
        name: For people.
        sizes: Rows of all experts together, outputs and inputs of one.
        casts_input, casts_gradient: Whether kernels of their own cast the input in forward, and the gradient of the
            output in backward, where products have a narrower type.
    """
    (rows, n, k), bias = sizes, shape.model.has_bias
    groups = shape.model.experts // shape.ep.size
    return Step(
        name,
        (
            *(_cast_groups(shape, rows * k) if casts_input else ()),
            *cast_again(shape, groups * n * k),
            _product(shape, "grouped_linear", (groups, rows, n, k)),
        ),
        (
            *(_cast_groups(shape, rows * n) if casts_gradient else ()),
            *cast_again(shape, groups * n * k),
            _product(shape, "grouped_linear_dgrad", (groups, rows, n, k)),
        ),
        (
            *cast_again(shape, rows * k),
            _product(shape, "grouped_linear_wgrad", (groups, rows, n, k)),
            *(accumulated(shape, n * k) if groups == 1 else ()),
            *([shape.op("bias_grad", rows, n)] if bias else []),
        ),
        ((n,) * groups if bias else ()) + (n * k,) * groups,
        weight_grad_first=not bias and not shape.quantizes,
        expert=True,
        saved=(Saved(rows * k * shape.gemm_bytes),),
    )


def _product(shape: RankShape, kind: str, sizes: tuple[int, int, int, int]) -> Op:
    """A grouped product; that of one expert is an ordinary one."""
    return shape.gemm(kind, *sizes) if sizes[0] > 1 else shape.gemm(kind.removeprefix("grouped_"), *sizes[1:])


def _cast_groups(shape: RankShape, numel: int) -> tuple[Op, ...]:
    """Casts of the operand of a grouped product: one kernel for all experts, or one for each."""
    groups = shape.model.experts // shape.ep.size
    return cast(shape, -(-numel // groups)) * groups if shape.kernels.casts_by_group else cast(shape, numel)


def _clamp(shape: RankShape, numel: int) -> Step:
    """Both halves of what a gate takes, clamped by a kernel each and joined by one more.

    In backward the gradient's halves are joined, after one comparison and a selection of the half with one bound, and
    two comparisons, their conjunction and a selection of the other; a comparison writes one byte.

    Args:
        shape: The rank.
        numel: Elements of a half.
    """
    half, both = shape.op("copy", numel), shape.op("copy", 2 * numel)
    return Step("clamp", (half, half, both), (*(half,) * 6, both), saved=(Saved(2 * numel * shape.dtype_bytes),))


def _bias(shape: RankShape, numel: int) -> Step:
    """The second bias times the probabilities, in the main type, by kernels of each expert where only it has the bias.

    Forward writes the product, adds it to the output, joins the experts' rows and casts them back.  Backward casts the
    gradient up, and down for the output; it multiplies it by the probabilities and sums over rows for the bias,
    multiplies it by the bias and sums over columns for the probabilities, and joins the experts' rows.

    Args:
        shape: The rank.
        numel: Elements of the output.
    """
    groups = shape.model.experts // shape.ep.size
    narrow, wide = shape.op("copy", numel), shape.main_op("copy", numel)
    fill, add, copy, reduce = (shape.main_op(kind, -(-numel // groups)) for kind in ("fill", "add", "copy", "reduce"))
    return Step(
        "expert_bias",
        (*(fill, add) * groups, wide, narrow),
        (wide, narrow, *(copy, reduce, copy, reduce) * groups, narrow),
    )
