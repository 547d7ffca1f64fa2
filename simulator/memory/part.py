"""The memory of blocks and of a part of the model: what is kept for backward, and what is needed for a moment.

What a step works on beside what it keeps follows from what its ops read and write: an op that reads the kept tensors
or the parameters adds the rest.  Steps add to this with ``temporary_bytes``.

Where backward is split, the parameters' half needs inputs of linears and gradients of their outputs; all else is free
after the input's half.  Per layer of GPT these are 32 s b h bytes of 34 (Qi et al. 2023, arXiv:2401.10241, table 1).
With sequence parallelism they are more than was kept: inputs wait as each rank's own part and are gathered again, but
gradients of row-parallel linears' outputs wait as they were used, gathered (as in the authors' own Megatron).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from stepsight.dataset.base.caching import cached, hashed_once
from stepsight.dataset.kinds.op import DTYPE_BYTES, Op
from stepsight.simulator.blocks.family import embedding_block, find_family, head_block, layer_block
from stepsight.simulator.blocks.step import Block, Comm, RankShape, Step
from stepsight.simulator.programs.sizes import Gathering, PartShape


@dataclass(frozen=True, slots=True)
class Gradients:
    """Bytes per element of gradients that are allocated during backward."""

    # numel, expert_numel: kept until the optimizer's step; 0 where there is a place for them from the beginning
    numel: float = 0.0
    expert_numel: float = 0.0
    fresh: float = 0.0  # of a gradient that is made before it is added to that of earlier micro-batches
    whole_blocks: bool = False  # whether fresh gradients of a block wait for each other, to be reduced together (FSDP)


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes of one block, or of one part of the model, and micro-batch on one rank."""

    # numel, expert_numel: elements of its parameters
    numel: int
    expert_numel: int
    # frozen, expert_frozen: of parameters that are not trained
    frozen: int
    expert_frozen: int
    kept: float  # from forward to backward
    narrow: int  # of parameters that FSDP gathers in 8 bits
    deferred: float  # from the input's gradient to the parameters', where backward is split
    output_gradients: float  # of all steps with parameters: what PyTorch's split adds to what is kept
    weight: float  # what the parameters' half works on beside what was deferred
    grown: float  # gradients that are there after the first backward and were not before
    forward: float  # peak of forward over what was there before it
    backward: float  # peak of backward over what is there after it, once all gradients are
    backward_first: float  # the same where they are not yet, over what was there before
    output: float  # what the last step keeps: of a head, the logits
    # of parameters that stay whole from the first forward on, also while other parts of the rank run
    gathered: float = 0.0


_PARAMETERS = ("parameters", "frozen")
# over blocks of a part
_SUMS = ("numel", "expert_numel", "frozen", "expert_frozen", "narrow", "deferred", "output_gradients")


@cached(4096)
def layer_memory(shape: RankShape, kind: str, recompute: str, gradients: Gradients) -> BlockMemory:
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

    ``input_bytes``: what full recomputation starts from; ``beside_bytes``: gradient of the residual, which waits while
    a branch's backward runs; ``gradients``: bytes per element.
    """
    saved = _saved(block)
    work = [_working_bytes(step) for step in block]
    # bytes of an attention core's own tensors, which selective recomputation does not keep
    again = [step.saved if step.attention_core and recompute == "selective" else () for step in block]
    core = [float(sum(tensor.num_bytes for tensor in own if not tensor.outside)) for own in again]
    before, forward = 0.0, 0.0
    live = []  # memory of this block during each step of its backward
    for step, size, needs, inside in zip(block, saved, work, core, strict=True):
        forward = max(forward, before + size + needs)
        before += size - inside
        live.append(before + (sum(core) if step.attention_core else 0.0))
    kept = before
    if recompute == "full":
        # what linears return, in 16 bits or more
        outputs = [op for step in block if step.output_kept for op in step.products]
        kept = input_bytes + sum(float(op.dims[-3] * op.dims[-2] * max(DTYPE_BYTES[op.dtype], 2)) for op in outputs)
        forward = kept + max(work, default=0.0)
    grown, made, backward, first = 0.0, 0.0, 0.0, 0.0
    for step, there, needs in zip(reversed(block), reversed(live), reversed(work), strict=True):
        numel = sum(step.parameters)
        grown += numel * (gradients.expert_numel if step.expert else gradients.numel)
        made = numel * gradients.fresh + (made if gradients.whole_blocks else 0.0)
        here = there + needs + beside_bytes
        first = max(first, here + (made if gradients.whole_blocks else grown))
        backward = max(backward, here + made)
    others, experts = ([step for step in block if step.expert == expert] for expert in (False, True))
    sizes = [sum(sum(getattr(step, name)) for step in own) for name in _PARAMETERS for own in (others, experts)]
    return BlockMemory(
        **dict(zip(_SUMS[:4], sizes, strict=True)),
        kept=kept,
        narrow=sum(numel for step in block for numel in step.parameters + step.frozen if numel in step.narrow),
        deferred=sum(
            size + _output_gradients(step) for step, size in zip(block, saved, strict=True) if _products(step)
        ),
        output_gradients=sum(map(_output_gradients, block)),
        weight=max((_weight_bytes(step) + sum(step.parameters) * gradients.fresh for step in block), default=0.0),
        grown=grown,
        forward=forward,
        backward=backward,
        backward_first=first,
        output=saved[-1] if saved else 0.0,
    )


def _saved(block: Block) -> list[float]:
    """Bytes that each step keeps first."""
    names: set[str] = set()
    out = [0.0] * len(block)
    for at, tensor in [(at, tensor) for at, step in enumerate(block) for tensor in step.saved]:
        if not tensor.name or tensor.name not in names:
            out[at] += tensor.num_bytes
            names.add(tensor.name)
    return out


def _working_bytes(step: Step) -> float:
    """The largest temporary memory of a step, without kept tensors and parameters."""
    numel, kept = sum(step.parameters), step.saved_bytes
    most = 0.0
    for item in () if step.in_place else (*step.forward, *step.backward, *step.weight_grad):
        if isinstance(item, Comm):
            most = max(most, item.work.num_bytes * item.work.record.buffers)
        elif isinstance(item, Op):
            read = kept if item.record.reads_saved else 0.0
            most = max(most, item.num_bytes - numel * DTYPE_BYTES[item.dtype] - read)
    return most + step.temporary_bytes


def _products(step: Step) -> list[Op]:
    return [item for item in step.weight_grad if isinstance(item, Op) and item.record.weight_gradient]


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


@dataclass(frozen=True, slots=True)
class Gathered:
    """FSDP: parameters that are gathered for a while: bytes of an element of them and of its gradient, 0: none are; of
    an element of the gradients that are reduced; and when they are gathered, dropped and reduced.
    """

    element_bytes: int = 0
    reduce_bytes: int = 4
    how: Gathering = field(default=Gathering())


@hashed_once
@dataclass(frozen=True)
class PartExecution:
    """How a part is executed."""

    # recompute, every: as in ParallelSpec
    recompute: str
    every: int
    gradients: Gradients  # bytes per element
    gathered: Gathered  # of FSDP
    # per parameter of one layer: what Transformer Engine hands autograd in the place of gradients that it has added to
    # their buffer, one for every shape of weight
    placeholder_bytes: int = 0
    loss_bytes: int = 0  # per logit, that PyTorch's cross-entropy needs and one in place does not


@dataclass(slots=True)
class _Run:
    """Equal consecutive blocks, and bytes of gathered parameters and gradients while one of them runs."""

    block: BlockMemory
    times: int = 1
    root: bool = False  # wrapped with the model itself
    before: float = 0.0  # tensors that earlier blocks keep
    in_forward: float = 0.0  # gathered parameters
    in_backward: float = 0.0  # parameters of a layer and of the next one, and the head's gradients
    gradients: float = 0.0  # all gradients of a layer
    reduced: float = 0.0  # a layer's gradients during their reduction

    @property
    def numel(self) -> int:
        return self.block.numel + self.block.expert_numel

    @property
    def held(self) -> int:
        """Elements with those that are not trained; those that are gathered in 8 bits count half."""
        return self.numel + self.block.frozen + self.block.expert_frozen - self.block.narrow // 2


@cached(4096)
def part_memory(shape: RankShape, part: PartShape, execution: PartExecution) -> BlockMemory:
    runs = _runs(shape, part, execution)
    layers = [run for run in runs if not run.root]
    resident = max((float(run.block.numel * execution.placeholder_bytes) for run in layers), default=0.0)
    if shape.offload_share:  # what one layer sends is copied out or in while another computes
        resident += 2.0 * shape.offload_share * max((run.block.kept for run in layers), default=0.0)
    shared = shape.model.tied_embeddings and part.first and part.last
    forward, backward, stays, ahead = _gather(runs, execution.gathered, shared)
    kept = 0.0
    for run in runs:
        each = run.block.kept * (1.0 if run.root else 1.0 - shape.offload_share)
        run.before = kept + (run.times - 1) * each
        forward = max(forward, run.before + run.block.forward + run.in_forward)
        kept += run.times * each
    grown, under_way = 0.0, 0.0  # gradients that stay, and those that are being reduced
    first = backward + sum(run.times * run.block.grown for run in runs)
    for run in reversed(runs):
        if part.last and run is runs[-1] and not shape.model.fused_loss:
            more = run.block.output * (execution.loss_bytes / shape.main_bytes)  # copies of logits, in the main type
            run.block = replace(
                run.block, backward=run.block.backward + more, backward_first=run.block.backward_first + more
            )
        block, around, reduced = run.block, run.in_backward, run.reduced
        each = block.kept * (1.0 if run.root else 1.0 - shape.offload_share)
        backward = max(backward, run.before + around + run.gradients + reduced)
        for turn in {0, 1, run.times - 2, run.times - 1} & set(range(run.times)):  # in between all changes evenly
            there = run.before - turn * each + around + (reduced if turn else under_way)
            if layers and run is layers[0] and turn == run.times - 1:  # no layer is gathered ahead of the last one
                there -= ahead
            backward = max(backward, there + block.backward)
            first = max(first, there + block.backward_first + grown + turn * block.grown)
        under_way = max(under_way, reduced)
        grown += run.times * block.grown
    return BlockMemory(
        **{name: sum(run.times * getattr(run.block, name) for run in runs) for name in _SUMS},
        kept=kept,
        weight=max((run.block.weight for run in runs), default=0.0),
        grown=grown,
        forward=forward + resident,
        backward=backward + resident,
        backward_first=first + resident,
        output=runs[-1].block.output if part.last else 0.0,
        gathered=stays,
    )


def _runs(shape: RankShape, part: PartShape, execution: PartExecution) -> list[_Run]:
    shared = shape.model.tied_embeddings and part.first and part.last
    runs = [_Run(end_memory(shape, False, shared, execution.gradients), root=True)] if part.first else []
    number = 0
    for kind, count in part.layers:
        again = len(range(-(-number // execution.every) * execution.every, number + count, execution.every))
        if execution.recompute != "full":
            again = 0
        other = "selective" if execution.recompute == "selective" else "none"
        for how, times in ((other, count - again), ("full", again)):
            if times:
                runs.append(_Run(layer_memory(shape, kind, how, execution.gradients), times))
        number += count
    if part.last:
        runs.append(_Run(end_memory(shape, True, shared, execution.gradients), root=True))
    return runs


def _gather(runs: list[_Run], gathered: Gathered, shared: bool) -> tuple[float, float, float, float]:
    """Fill in what FSDP gathers and reduces during each run.

    Returns:
        Bytes when the first layer is gathered, with the buffer of the root's all-gather; when the root's own gradients
        are reduced at the end, its parameters being freed; that later passes find gathered, always the root; and of
        the layers gathered ahead in backward.
    """
    size, how = gathered.element_bytes, gathered.how
    if not size or not runs:  # a part may have no layers
        return 0.0, 0.0, 0.0, 0.0
    layers = [run for run in runs if not run.root]
    root = sum(run.held for run in runs if run.root)
    trained = sum(run.numel for run in runs if run.root)
    layer = max((run.held for run in layers), default=0)
    total = sum(run.times * run.held for run in runs)
    head = 0  # gradients that exist before those of the layers, unless they stay anyway
    if runs[-1].root and not how.reduce_once:  # a stage may have no layer
        head = trained if shared else runs[-1].numel
    prefetch = max(0, min(how.prefetch, sum(run.times for run in layers) - 1))  # there are no more layers to gather
    for run in runs:
        forward = root + (0 if run.root else run.held * (1 + prefetch))
        backward = root + (0 if run.root else layer * (1 + prefetch)) + head
        if run is runs[-1] and run.root:
            backward = root + layer * prefetch
        if not how.reshard:
            forward, backward = total, total + head
        run.in_forward, run.in_backward = float(forward * size), float(backward * size)
        if not how.reduce_once and not run.root:
            run.gradients, run.reduced = float(run.numel * size), float(run.numel * gathered.reduce_bytes)
    end = 0.0 if how.reduce_once else float(trained * size + trained * gathered.reduce_bytes)
    ahead = float(layer * prefetch * size) if how.reshard else 0.0
    return float(2 * (root + layer) * size), end, float((root if how.reshard else total) * size), ahead
