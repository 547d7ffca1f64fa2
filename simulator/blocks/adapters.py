"""Low-rank adaptation (LoRA: Hu et al. 2021, arXiv:2106.09685) of a block: its own parameters are frozen.

Frozen linears have no product for their weights' gradient and keep no input for it.  A target computes, beside its own
product, ``[rows, inputs] x [inputs, rank]`` and ``[rows, rank] x [rank, outputs]`` in the activations' type, scales and
adds the result.  The gradient of a block's input is computed only where an adapter lies before it.

Kernels and tensor parallelism are those of NeMo and Megatron-Bridge (``peft/utils.py``, ``ParallelLinearAdapter``, 2024
to 2026): both products are cut over the ranks, so that each rank has ``1 / tp`` of an adapter.  A column-parallel
target gathers the narrow activation, a row-parallel one sums it; its wide output, cut by columns, is then gathered, or
exchanged for the rank's own rows with sequence parallelism (``a2a_experimental``, as in MLPerf's runs).
"""

from __future__ import annotations

from dataclasses import replace

from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.step import Block, Item, RankShape, Saved, Step

_ROWS = ("out", "cross_out", "down", "fc2")  # row-parallel linears


def adapted(shape: RankShape, block: Block, *, lowest: bool = False) -> Block:
    """A block with frozen parameters and an adapter beside each target.

    ``lowest``: whether nothing before the block is trained, so that no gradient goes beyond its first adapter.
    """
    found: list[Step] = []
    for step in block:
        product = next((item for item in step.forward if isinstance(item, Op) and item.kind == "linear"), None)
        widths = _widths(shape, step.name, product.dims[1]) if product else {}
        targets = [n for target, n in widths.items() if target in shape.model.lora_targets]
        found.append(replace(_frozen(step), backward=() if lowest else step.backward))
        if lowest:
            found[-1] = replace(found[-1], saved=())
        for number, n in enumerate(targets):
            rows, _, k = product.dims if product else (0, 0, 0)
            found.append(_adapter(shape, f"{step.name}.lora", (rows, n, k), ends=lowest, first=not number))
        lowest = lowest and not targets
    return tuple(found)


def _frozen(step: Step) -> Step:
    """A step whose parameters are not trained: a linear then keeps no input."""
    products = any(isinstance(item, Op) and item.record.weight_gradient for item in step.weight_grad)
    whole = not products or step.name in ("out", "cross_out")  # attention's output is kept for its own backward
    saved = step.saved if whole else step.saved[1:]
    return replace(step, weight_grad=(), parameters=(), frozen=step.parameters, saved=saved, weight_grad_first=False)


def _widths(shape: RankShape, name: str, n: int) -> dict[str, int]:
    """Outputs on this rank of the adapters that a linear of ``n`` outputs may have, by target."""
    model, heads = shape.model, shape.model.heads // shape.tp.size * shape.model.head_size
    keys = model.kv_heads // shape.tp.size * model.head_size
    return {
        "qkv": {"qkv": n, "q": heads, "k": keys, "v": keys},
        "gate_up": {"fc1": n, "gate": n // 2, "up": n // 2},
        "fc1": {"fc1": n},
        "cross_q": {"q": n},
        "cross_kv": {"k": n // 2, "v": n // 2},
        **{row: {"fc2" if row in ("down", "fc2") else "proj": n} for row in _ROWS},
    }.get(name, {})


def _adapter(shape: RankShape, name: str, sizes: tuple[int, int, int], *, ends: bool, first: bool) -> Step:
    """An adapter: its input's dropout, two products, the scale and the sum.

    ``sizes``: rows, outputs and inputs of the target on this rank; ``ends``: whether its input needs no gradient;
    ``first``: whether no other adapter has the same target.
    """
    (rows, n, k), rank, tp = sizes, shape.model.lora_rank, shape.tp.size
    by_rows, size = name.removesuffix(".lora") in _ROWS, shape.dtype_bytes
    inner, outer = (rank, n // tp) if by_rows else (rank // tp, n)
    own = shape.local(rows) if by_rows else rows  # rows of what the target returns
    drops = shape.model.lora_dropout > 0
    narrow: list[Item] = []
    total: list[Item] = []
    wide: list[Item] = []
    whole: list[Item] = []
    if tp > 1:
        narrow = [shape.tp_comm("all_reduce" if by_rows else "all_gather", rows * rank * size)]
        total = [shape.tp_comm("all_reduce", rows * rank * size)]
        if by_rows and shape.sequence_parallel:
            wide = [shape.tp_comm("all_to_all", rows * outer * size)]
        elif by_rows:
            wide = [shape.tp_comm("all_gather", rows * n * size)]
        elif not shape.sequence_parallel:  # else it is part of the sum after the target's own gradient
            whole = [shape.tp_comm("all_reduce", rows * k * size)]
    scale = shape.op("elementwise", rows * outer)
    back = [
        *(wide if shape.sequence_parallel else []),  # the gradient of gathered columns is there on every rank
        scale,
        shape.op("linear_dgrad", rows, outer, rank),
        *total,
    ]
    onward = [
        shape.op("linear_dgrad", rows, inner, k),
        *whole,
        *([shape.op("dropout_backward", rows * k)] if drops else []),
        shape.op("add", rows * k),
    ]
    taken = (Saved(rows * k), Saved(rows * k * size)) if drops else (Saved(rows * k * size),) if first else ()
    return Step(
        name,
        (
            *([shape.op("dropout", rows * k)] if drops else []),
            shape.op("linear", rows, inner, k),
            *narrow,
            shape.op("linear", rows, outer, rank),
            scale,
            *wide,
            shape.op("add", own * n),
        ),
        (*back, *(() if ends else onward)),
        (shape.op("linear_wgrad", rows, outer, rank), shape.op("linear_wgrad", rows, inner, k)),
        (outer * rank, inner * k),
        saved=(*taken, Saved(rows * rank * size)),
    )
