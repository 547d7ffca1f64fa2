"""The memory of a part of the model: its blocks in turn, with FSDP's gathered parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stepsight.dataset.base.caching import cached, hashed_once
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.memory.block import BlockMemory, Gradients, end_memory, layer_memory
from stepsight.simulator.programs.replicas import Gathering
from stepsight.simulator.programs.sizes import PartShape


@dataclass(frozen=True, slots=True)
class Gathered:
    """FSDP: parameters that are gathered for a while.

    Attributes:
        element_bytes: Of a gathered parameter and its gradient; 0: none are gathered.
        reduce_bytes: Of an element of the gradients that are reduced.
        how: When they are gathered, dropped and reduced.
    """

    element_bytes: int = 0
    reduce_bytes: int = 4
    how: Gathering = field(default=Gathering())

    @property
    def all_stay(self) -> bool:
        """Whether layers stay gathered after their forward."""
        return bool(self.element_bytes) and not self.how.reshard


@hashed_once
@dataclass(frozen=True)
class Keeping:
    """How a part is executed.

    Attributes:
        recompute, every: As in ``ParallelSpec``.
        gradients: Bytes per element.
        gathered: Of FSDP.
        placeholder_bytes: Per parameter of one layer: what Transformer Engine hands autograd in the place of gradients
            that it has added to their buffer, one for every shape of weight.
        loss_bytes: Per logit, that PyTorch's cross-entropy needs and one in place does not.
    """

    recompute: str
    every: int
    gradients: Gradients
    gathered: Gathered
    placeholder_bytes: int = 0
    loss_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PartMemory(BlockMemory):
    """Bytes of one part and micro-batch on one rank; attributes as in ``BlockMemory``.

    Attributes:
        gathered: Of parameters that stay whole from the first forward on, also while other parts of the rank run.
    """

    gathered: float


@dataclass(slots=True)
class _Run:
    """Equal consecutive blocks."""

    block: BlockMemory
    times: int = 1
    root: bool = False  # wrapped with the model itself
    before: float = 0.0  # tensors that earlier blocks keep

    @property
    def numel(self) -> int:
        return self.block.numel + self.block.expert_numel


@cached(4096)
def part_memory(shape: RankShape, part: PartShape, keeping: Keeping) -> PartMemory:
    """Memory of one part of the model."""
    runs = _runs(shape, part, keeping)
    layers = [run for run in runs if not run.root]
    resident = max((float(run.block.numel * keeping.placeholder_bytes) for run in layers), default=0.0)
    if shape.offload_activations:  # one layer is copied out or in while another computes
        resident += 2.0 * max((run.block.kept for run in layers), default=0.0)
    shared = shape.model.tied_embeddings and part.first and part.last
    gathered = _Around(runs, keeping.gathered, shared)
    kept, forward = 0.0, gathered.begin
    for run in runs:
        each = 0.0 if shape.offload_activations and not run.root else run.block.kept
        run.before = kept + (run.times - 1) * each
        forward = max(forward, run.before + run.block.forward + gathered.forward(run))
        kept += run.times * each
    grown, under_way = 0.0, 0.0  # gradients that stay, and those that are being reduced
    backward = gathered.end
    first = backward + sum(run.times * run.block.grown for run in runs)
    for run in reversed(runs):
        if part.last and run is runs[-1] and not shape.model.fused_loss:
            run.block = _with_copies(run.block, keeping.loss_bytes / shape.main_bytes)
        block, around, reduced = run.block, gathered.backward(run), gathered.reduced(run)
        each = 0.0 if shape.offload_activations and not run.root else block.kept
        backward = max(backward, run.before + around + gathered.gradients(run) + reduced)
        for turn in {0, 1, run.times - 2, run.times - 1} & set(range(run.times)):  # in between all changes evenly
            there = run.before - turn * each + around + (reduced if turn else under_way)
            if gathered.is_last(run, turn):
                there -= gathered.ahead
            backward = max(backward, there + block.backward)
            first = max(first, there + block.backward_first + grown + turn * block.grown)
        under_way = max(under_way, reduced)
        grown += run.times * block.grown
    return PartMemory(
        numel=sum(run.times * run.block.numel for run in runs),
        expert_numel=sum(run.times * run.block.expert_numel for run in runs),
        kept=kept,
        deferred=sum(run.times * run.block.deferred for run in runs),
        output_gradients=sum(run.times * run.block.output_gradients for run in runs),
        weight=max((run.block.weight for run in runs), default=0.0),
        grown=grown,
        forward=forward + resident,
        backward=backward + resident,
        backward_first=first + resident,
        output=runs[-1].block.output if part.last else 0.0,
        gathered=gathered.stays,
    )


def _runs(shape: RankShape, part: PartShape, keeping: Keeping) -> list[_Run]:
    shared = shape.model.tied_embeddings and part.first and part.last
    runs = [_Run(end_memory(shape, False, shared, keeping.gradients), root=True)] if part.first else []
    number = 0
    for kind, count in part.layers:
        again = len(range(-(-number // keeping.every) * keeping.every, number + count, keeping.every))
        if keeping.recompute != "full":
            again = 0
        other = "selective" if keeping.recompute == "selective" else "none"
        for how, times in ((other, count - again), ("full", again)):
            if times:
                runs.append(_Run(layer_memory(shape, kind, how, keeping.gradients), times))
        number += count
    if part.last:
        runs.append(_Run(end_memory(shape, True, shared, keeping.gradients), root=True))
    return runs


def _with_copies(head: BlockMemory, of_output: float) -> BlockMemory:
    """A head's memory with copies of some part of its output, in the main type."""
    more = head.output * of_output
    return replace(head, backward=head.backward + more, backward_first=head.backward_first + more)


class _Around:
    """Gathered parameters and gradients during a block."""

    def __init__(self, runs: list[_Run], gathered: Gathered, shared: bool) -> None:
        self.gathered = gathered
        self.how = how = gathered.how
        self.total = sum(run.times * run.numel for run in runs)
        self.root = sum(run.numel for run in runs if run.root)
        self.layer = max((run.numel for run in runs if not run.root), default=0)
        self.head = 0  # gradients that exist before those of the layers, unless they stay anyway
        if runs and runs[-1].root and not how.reduce_once:
            self.head = self.root if shared else runs[-1].numel
        self.last = runs[-1] if runs else None
        self.first_layers = next((run for run in runs if not run.root), None)
        layers = sum(run.times for run in runs if not run.root)
        self.prefetch = max(0, min(how.prefetch, layers - 1))  # there are no more layers to gather
        self.ahead = 0.0 if gathered.all_stay else float(self.layer * self.prefetch * gathered.element_bytes)

    @property
    def begin(self) -> float:
        """The buffer of the root's all-gather still exists when the first layer is gathered."""
        return float(2 * (self.root + self.layer) * self.gathered.element_bytes)

    @property
    def stays(self) -> float:
        """Bytes that later passes find gathered: always the root."""
        return float((self.total if self.gathered.all_stay else self.root) * self.gathered.element_bytes)

    def forward(self, run: _Run) -> float:
        size = self.gathered.element_bytes
        if self.gathered.all_stay:
            return float(self.total * size)
        here = run.numel * (1 + self.prefetch) if not run.root else 0
        return float((self.root + here) * size)

    def backward(self, run: _Run) -> float:
        """A layer's parameters and the next one's, and the head's gradients."""
        size = self.gathered.element_bytes
        if self.gathered.all_stay:
            return float((self.total + self.head) * size)
        if run is self.last and run.root:
            return float((self.root + self.layer * self.prefetch) * size)
        here = 0 if run.root else self.layer * (1 + self.prefetch)
        return float((self.root + here + self.head) * size)

    def gradients(self, run: _Run) -> float:
        """All gradients of a layer."""
        return 0.0 if self.how.reduce_once or run.root else float(run.numel * self.gathered.element_bytes)

    def reduced(self, run: _Run) -> float:
        """A layer's gradients during their reduction."""
        if not self.gathered.element_bytes or self.how.reduce_once or run.root:
            return 0.0
        return float(run.numel * self.gathered.reduce_bytes)

    def is_last(self, run: _Run, turn: int) -> bool:
        """Whether this layer is the last one in backward: no layer is then gathered ahead."""
        return run is self.first_layers and turn == run.times - 1

    @property
    def end(self) -> float:
        """The reduction of the root's own gradients, at the end; its parameters are freed by then."""
        size = self.gathered.element_bytes
        if not size or self.how.reduce_once:
            return 0.0
        return float(self.root * size + self.root * self.gathered.reduce_bytes)
