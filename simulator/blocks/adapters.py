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
from stepsight.simulator.blocks.step import Block, Flow, Item, RankShape, Saved, Step

_ROWS = ("out", "cross_out", "down", "fc2")  # row-parallel linears


def adapted(shape: RankShape, block: Block, *, lowest: bool = False) -> Block:
    """A block with frozen parameters and an adapter beside each target; of a model without adapters the block itself.

    ``lowest``: whether nothing before the block is trained, so that no gradient goes beyond its first adapter.
    """
    found: list[Step] = []
    for step in block if shape.model.lora_rank else ():
        products = [op.dims for op in step.products if op.kind == "linear"]
        n, (rows, _, k) = sum(dims[1] for dims in products), products[0] if products else (0, 0, 0)
        targets = [own for name, own in _widths(shape, step.name, n).items() if name in shape.model.lora_targets]
        own = replace(_frozen(step), flow=(*step.flow, *[Flow.KEEP] * len(targets)))
        found.append(replace(own, backward=(), saved=()) if lowest else own)
        alone = not found[-1].saved  # whether the target keeps no input
        for number, width in enumerate(targets):
            name, sizes = f"{step.name}.lora", (rows, width, k)
            found.append(_adapter(shape, name, sizes, ends=lowest, keeps=alone and not number))
        lowest = lowest and not targets
    return tuple(found) if shape.model.lora_rank else block


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


def _adapter(shape: RankShape, name: str, sizes: tuple[int, int, int], *, ends: bool, keeps: bool) -> Step:
    """An adapter: its input's dropout, two products, the scale and the sum.

    ``sizes``: rows, outputs and inputs of the target on this rank; ``ends``: whether its input needs no gradient;
    ``keeps``: whether nothing else keeps its input.
    """
    (rows, n, k), rank, tp = sizes, shape.model.lora_rank, shape.tp.size
    by_rows, together, size = name.removesuffix(".lora") in _ROWS, shape.sequence_parallel, shape.dtype_bytes
    inner, outer = (rank, n // tp) if by_rows else (rank // tp, n)

    def sent(kind: str, numel: int) -> tuple[Item, ...]:
        return (shape.tp_comm(kind, numel * size),) if tp > 1 else ()

    wide = sent("all_to_all", rows * outer) if together else sent("all_gather", rows * n)
    wide, back = (wide, wide if together else ()) if by_rows else ((), ())  # each rank has the whole gradient, or asks
    # Of the target's own gradient, with which this one is summed where that comes later.
    whole = () if by_rows or together else sent("all_reduce", rows * k)
    masked = (shape.op("dropout", rows * k),), (shape.op("dropout_backward", rows * k),)
    drop, undrop = masked if shape.model.lora_dropout else ((), ())
    scale = shape.op("elementwise", rows * outer)
    narrow = sent("all_reduce" if by_rows else "all_gather", rows * rank)
    thin, wider = shape.op("linear", rows, inner, k), shape.op("linear", rows, outer, rank)
    total = shape.local(rows) if by_rows else rows
    forward = (*drop, thin, *narrow, wider, scale, *wide, shape.op("add", total * n))
    backward = (*back, scale, shape.op("linear_dgrad", *wider.dims), *sent("all_reduce", rows * rank))
    onward = (shape.op("linear_dgrad", *thin.dims), *whole, *undrop, shape.op("add", rows * k))
    mask, taken = [Saved(rows * k)] * bool(drop), [Saved(rows * k * size)] * (bool(drop) or keeps)
    return Step(
        name,
        forward,
        backward if ends else backward + onward,
        (shape.op("linear_wgrad", *wider.dims), shape.op("linear_wgrad", *thin.dims)),
        (outer * rank, inner * k),
        saved=(*mask, *taken, Saved(rows * rank * size)),
        flow=(Flow.SWAP, Flow.JOIN_AT_LAST),
    )
