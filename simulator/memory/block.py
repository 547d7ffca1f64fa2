"""The memory that one block keeps for its backward, and its largest temporary memory in forward and backward.

What a step works on beside what it keeps follows from what its ops read and write: an op that reads the kept tensors
or the parameters adds the rest.  Steps add to this with ``temporary_bytes``.

Where backward is split, the parameters' half needs inputs of linears and gradients of their outputs; all else is free
after the input's half.  Per layer of GPT these are 32 s b h bytes of 34 (Qi et al. 2023, arXiv:2401.10241, table 1).
With sequence parallelism they are more than was kept: inputs wait as each rank's own part and are gathered again, but
gradients of row-parallel linears' outputs wait as they were used, gathered (as in the authors' own Megatron).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from stepsight.dataset.base.caching import cached
from stepsight.dataset.kinds.op import DTYPE_BYTES, Op
from stepsight.simulator.blocks.family import embedding_block, find_family, head_block, layer_block
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Block, Comm, Item, Step


@dataclass(frozen=True, slots=True)
class Gradients:
    """Bytes per element of gradients that are allocated during backward.

    Attributes:
        numel, expert_numel: Kept until the optimizer's step; 0 where there is a place for them from the beginning.
        fresh: Of a gradient that is made before it is added to that of earlier micro-batches.
        whole_blocks: Whether fresh gradients of a block wait for each other, to be reduced together (FSDP).
    """

    numel: float = 0.0
    expert_numel: float = 0.0
    fresh: float = 0.0
    whole_blocks: bool = False


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes of one block and micro-batch on one rank.

    Attributes:
        numel, expert_numel: Elements of its parameters.
        kept: From forward to backward.
        deferred: From the input's gradient to the parameters', where backward is split.
        output_gradients: Of all steps with parameters: what PyTorch's split adds to what is kept.
        weight: What the parameters' half works on beside what was deferred.
        grown: Gradients that are there after the first backward and were not before.
        forward: Peak of forward over what was there before it.
        backward: Peak of backward over what is there after it, once all gradients are.
        backward_first: The same where they are not yet, over what was there before.
        output: What the last step keeps: of a head, the logits.
    """

    numel: int
    expert_numel: int
    kept: float
    deferred: float
    output_gradients: float
    weight: float
    grown: float
    forward: float
    backward: float
    backward_first: float
    output: float


@cached(4096)
def layer_memory(shape: RankShape, kind: str, recompute: str, gradients: Gradients) -> BlockMemory:
    """Memory of a layer."""
    passes = find_family(shape.model.family).boundary_bytes(shape, 0)
    return block_memory(layer_block(shape, kind), recompute, passes, passes, gradients)


@cached(4096)
def end_memory(shape: RankShape, is_head: bool, shared: bool, gradients: Gradients) -> BlockMemory:
    """Memory of the embedding or the head; neither is recomputed or has a residual."""
    block = (head_block if is_head else embedding_block)(shape, shared)
    return block_memory(block, "none", 0, 0, gradients)


def block_memory(
    block: Block, recompute: str, input_bytes: float, beside_bytes: float, gradients: Gradients
) -> BlockMemory:
    """Memory of any block.

    Args:
        block: Its steps.
        recompute: ``none``, ``selective`` or ``full``.
        input_bytes: What full recomputation starts from.
        beside_bytes: Gradient of the residual, which waits while a branch's backward runs.
        gradients: Bytes per element.
    """
    saved = _saved(block)
    work = [_working_bytes(step) for step in block]
    core = [_inside(step) if recompute == "selective" and step.attention_core else 0.0 for step in block]
    before, forward = 0.0, 0.0
    live = []  # memory of this block during each step of its backward
    for step, size, needs, inside in zip(block, saved, work, core, strict=True):
        forward = max(forward, before + size + needs)
        before += size - inside
        live.append(before + (sum(core) if step.attention_core else 0.0))
    kept = before
    if recompute == "full":
        kept = input_bytes + sum(_output_bytes(step) for step in block if step.output_kept)
        forward = kept + max(work, default=0.0)
    grown, made, backward, first = 0.0, 0.0, 0.0, 0.0
    for step, there, needs in zip(reversed(block), reversed(live), reversed(work), strict=True):
        numel = sum(step.parameters)
        grown += numel * (gradients.expert_numel if step.expert else gradients.numel)
        made = numel * gradients.fresh + (made if gradients.whole_blocks else 0.0)
        here = there + needs + beside_bytes
        first = max(first, here + (made if gradients.whole_blocks else grown))
        backward = max(backward, here + made)
    return BlockMemory(
        numel=sum(sum(step.parameters) for step in block if not step.expert),
        expert_numel=sum(sum(step.parameters) for step in block if step.expert),
        kept=kept,
        deferred=sum(size + _output_gradients(step) for step, size in zip(block, saved, strict=True) if _waits(step)),
        output_gradients=sum(map(_output_gradients, block)),
        weight=max((_weight_bytes(step) + sum(step.parameters) * gradients.fresh for step in block), default=0.0),
        grown=grown,
        forward=forward,
        backward=backward,
        backward_first=first,
        output=saved[-1] if saved else 0.0,
    )


def _output_bytes(step: Step) -> float:
    """Bytes of what a linear returns, in 16 bits or more; the product for its weights says how large it is."""
    return sum(float(op.dims[-3] * op.dims[-2] * max(DTYPE_BYTES[op.dtype], 2)) for op in _products(step))


def _inside(step: Step) -> float:
    """Bytes of an attention core's own tensors that it keeps."""
    return float(sum(tensor.num_bytes for tensor in step.saved if not tensor.outside))


def _saved(block: Block) -> list[float]:
    """Bytes that each step keeps first."""
    names: set[str] = set()
    out = []
    for step in block:
        size = 0.0
        for tensor in step.saved:
            if not tensor.name or tensor.name not in names:
                size += tensor.num_bytes
                names.add(tensor.name)
        out.append(size)
    return out


def _working_bytes(step: Step) -> float:
    """The largest temporary memory of a step, without kept tensors and parameters."""
    numel, kept = sum(step.parameters), step.saved_bytes
    most = 0.0
    for item in _ops((*step.forward, *step.backward, *step.weight_grad)):
        if isinstance(item, Comm):
            most = max(most, item.work.num_bytes * item.work.record.buffers)
        else:
            read = kept if item.record.reads_saved else 0.0
            most = max(most, item.num_bytes - numel * DTYPE_BYTES[item.dtype] - read)
    return most + step.temporary_bytes


def _ops(items: Iterable[Item]) -> Iterable[Op | Comm]:
    return (item for item in items if isinstance(item, Op | Comm))


def _products(step: Step) -> list[Op]:
    return [item for item in step.weight_grad if isinstance(item, Op) and item.record.weight_gradient]


def _waits(step: Step) -> bool:
    return bool(_products(step))


def _output_gradients(step: Step) -> float:
    """Bytes of the gradient of a linear's output, or of a norm's, which has the size of its input."""
    products = _products(step)
    if not products:
        return float(step.saved_bytes if step.parameters else 0)
    return sum(float(op.dims[-3] * op.dims[-2] * DTYPE_BYTES[op.dtype]) for op in products)


def _weight_bytes(step: Step) -> float:
    """Bytes that the products for a linear's parameter gradients read in addition: a gathered input."""
    there, most = step.saved_bytes + _output_gradients(step), 0.0
    for op in _products(step):
        written = prod((*op.dims[:-3], *op.dims[-2:])) * DTYPE_BYTES[op.dtype]
        most = max(most, op.num_bytes - written - there)
    return most
