"""Programs of one pipeline stage: forward, backward and optimizer of one rank, with its data-parallel traffic.

Streams: ``compute``; ``tp`` (blocking collectives of a tensor-parallel group); ``dp`` (data-parallel
collectives, overlapped where the framework overlaps them).

Conventions.  fp32 training is PyTorch's eager behaviour: gradients are accumulated by one ``add`` per parameter and
reduced in fp32; DDP scales each gradient into its bucket (``copy``).  bf16 and fp16 are Megatron's mixed precision:
gradients are accumulated (inside the weight-gradient GEMM) and reduced in fp32, AdamW runs on fp32 master weights, and
all-gathers carry parameters in the training dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stepsight.dataset.op import DTYPE_BYTES, Collective, Op
from stepsight.dataset.program import Dependency, Program, ProgramBuilder
from stepsight.simulator.layers import Block, RankShape, Step, Work, embedding_block, head_block, layer_block

GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class DataParallel:
    """How replicas of a rank agree.

    Attributes:
        size: Replicas.
        per_node: How many of them share a node.
        zero_stage: 0 to 3.
        bucket_bytes: A gradient bucket is sent when it holds at least this much.
        overlaps: Whether FSDP's collectives run beside the computation (not on CPU).
        compute_share: Part of an overlapped collective's time taken from the compute stream.
    """

    size: int = 1
    per_node: int = 1
    zero_stage: int = 0
    bucket_bytes: int = 25 * 2**20
    overlaps: bool = True
    compute_share: float = 0.0

    @property
    def fully_sharded(self) -> bool:
        return self.zero_stage == 3 and self.size > 1

    def collective(self, kind: str, num_bytes: int) -> Collective:
        return Collective(kind, num_bytes, self.size, self.per_node)


@dataclass(frozen=True, slots=True)
class StageShape:
    """What distinguishes a pipeline stage from others."""

    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Unit:
    """A block of a stage and the parameters that are sharded and gathered together with it.

    FSDP wraps every layer and, as the root, what is left: embedding, final norm and logits.
    """

    name: str
    block: Block
    root: bool


@lru_cache(maxsize=4096)
def stage_units(shape: RankShape, stage: StageShape) -> tuple[Unit, ...]:
    """Blocks of a stage in forward order."""
    shared = shape.model.tied_embeddings and stage.first and stage.last
    units = [Unit(f"layer{i}", layer_block(shape), False) for i in range(stage.layers)]
    if stage.first:
        units.insert(0, Unit("embedding", embedding_block(shape, shared), True))
    if stage.last:
        units.append(Unit("head", head_block(shape, shared), True))
    return tuple(units)


def unit_parameters(units: tuple[Unit, ...]) -> tuple[int, ...]:
    """Elements of every parameter tensor of some units."""
    return tuple(numel for unit in units for step in unit.block for numel in step.parameters)


class _Emitter:
    """Adds work to a program as a framework's host thread issues it."""

    def __init__(self, label: str, dp: DataParallel) -> None:
        self.builder = ProgramBuilder(label)
        self.dp = dp
        self._last: int | None = None  # newest node of the computation (compute or blocking)
        self._awaited: list[int] = []  # nodes that the next compute node waits for
        self._taken: dict[int, tuple[Collective, str]] = {}  # sent, and no computation issued since

    def emit(self, work: Work, name: str) -> None:
        """An op, or a collective of the tensor-parallel group that blocks."""
        if isinstance(work, Op):
            for collective, of in self._taken.values():
                self._compute(collective, f"{of} (cores)", self.dp.compute_share)
            self._taken.clear()
            self._compute(work, name)
        else:
            self.block(work, "tp", name)

    def block(self, work: Collective, stream: str, name: str) -> None:
        """A collective that starts when the computation reaches it and that the computation waits for."""
        self._last = self.builder.add(work, stream, name, after=self._reached(), why=Dependency.SYNCHRONISATION)
        self._awaited = [self._last]

    def send(self, work: Collective, name: str) -> int:
        """A data-parallel collective beside the computation; what follows loses ``compute_share`` of its time."""
        index = self.builder.add(work, "dp", name, after=self._reached(), why=Dependency.SYNCHRONISATION)
        if self.dp.compute_share > 0:
            self._taken[index] = (work, name)
        return index

    def _reached(self) -> list[int]:
        return sorted({*self._awaited, *([] if self._last is None else [self._last])})

    def _compute(self, work: Work, name: str, share: float = 1.0) -> None:
        self._last = self.builder.add(
            work, "compute", name, after=self._awaited, why=Dependency.SYNCHRONISATION, share=share
        )
        self._awaited = []

    def wait(self, index: int) -> None:
        """The next op or blocking collective waits for a node; if nothing runs beside it, nothing is lost."""
        self._awaited.append(index)
        self._taken.pop(index, None)

    def forward(self, unit: Unit) -> None:
        for step in unit.block:
            for work in step.forward:
                self.emit(work, f"{unit.name}.{step.name}")


class _Gathers:
    """FSDP's all-gathers of parameters, one unit ahead of the computation where they overlap."""

    def __init__(self, emitter: _Emitter, units: list[tuple[str, int]], param_bytes: int, dtype: str) -> None:
        self._emitter = emitter
        self._todo = units[::-1]
        self._param_bytes = param_bytes
        self._dtype = dtype
        self._flying: list[tuple[int, int, str]] = []

    def issue(self) -> None:
        """Start the next unit's all-gather, if there is one."""
        if self._todo and self._emitter.dp.overlaps:
            name, numel = self._todo.pop()
            gather = self._emitter.dp.collective("all_gather", numel * self._param_bytes)
            self._flying.append((self._emitter.send(gather, f"{name}.parameters"), numel, name))

    def arrive(self) -> None:
        """Wait for the oldest all-gather and copy it out into parameters."""
        emitter = self._emitter
        if emitter.dp.overlaps:
            if not self._flying:
                self.issue()
            index, numel, name = self._flying.pop(0)
            emitter.wait(index)
        else:
            name, numel = self._todo.pop()
            gather = emitter.dp.collective("all_gather", numel * self._param_bytes)
            emitter.block(gather, "dp", f"{name}.parameters")
        emitter.emit(Op("copy", (numel,), self._dtype), f"{name}.copy_out")


class _Reducer:
    """Gradients on their way to other replicas, bucket by bucket or unit by unit."""

    def __init__(self, emitter: _Emitter, dtype: str, accumulate: bool, active: bool) -> None:
        self._emitter = emitter
        self._dp = emitter.dp
        self._dtype = dtype
        self._accumulate = accumulate
        self._active = active and self._dp.size > 1
        self._numel = 0
        self._buckets = 0

    def ready(self, step: Step, name: str) -> None:
        """Gradients of a step's parameters are there."""
        sharded = self._dp.size > 1 and self._dp.zero_stage >= 2
        for numel in step.parameters:
            if self._accumulate and not sharded and self._dtype == "fp32":
                self._emitter.emit(Op("add", (numel,), "fp32"), f"{name}.accumulate")
            if self._active and self._dp.zero_stage < 2 and self._dtype == "fp32":
                self._emitter.emit(Op("copy", (numel,), "fp32"), f"{name}.bucket")
            self._numel += numel
            if self._active and self._dp.zero_stage < 2 and self._numel * GRADIENT_BYTES >= self._dp.bucket_bytes:
                self._flush()

    def unit_done(self) -> None:
        """All gradients of a layer are there."""
        if self._dp.zero_stage >= 2:
            self._flush()

    def finish(self) -> None:
        """The backward pass is over."""
        self._flush()

    def _flush(self) -> None:
        numel, self._numel = self._numel, 0
        if not (self._active and numel):
            return
        name = f"gradients{self._buckets}"
        self._buckets += 1
        kind = "all_reduce" if self._dp.zero_stage == 0 else "reduce_scatter"
        work = self._dp.collective(kind, numel * GRADIENT_BYTES)
        if self._dp.zero_stage == 3:
            self._emitter.emit(Op("copy", (numel,), "fp32"), f"{name}.copy_in")
        if self._dp.zero_stage == 3 and not self._dp.overlaps:
            self._emitter.block(work, "dp", name)
        else:
            self._emitter.send(work, name)
        if self._dp.zero_stage >= 2 and self._accumulate:
            self._emitter.emit(Op("add", (-(-numel // self._dp.size),), "fp32"), f"{name}.accumulate")


def _gathers(emitter: _Emitter, units: tuple[Unit, ...], dtype: str, backward: bool) -> _Gathers | None:
    """All-gathers in the order of use: the root first, in backward layers alone (the root stays gathered)."""
    if not emitter.dp.fully_sharded:
        return None
    layers = [(unit.name, sum(unit_parameters((unit,)))) for unit in units if not unit.root]
    root = sum(unit_parameters(tuple(unit for unit in units if unit.root)))
    order = layers[::-1] if backward else ([("root", root)] if root else []) + layers
    return _Gathers(emitter, order, DTYPE_BYTES[dtype], dtype)


@lru_cache(maxsize=4096)
def forward_program(shape: RankShape, stage: StageShape, dp: DataParallel) -> Program:
    """Forward of one micro-batch on one stage."""
    units = stage_units(shape, stage)
    emitter = _Emitter("forward", dp)
    gathers = _gathers(emitter, units, shape.dtype, backward=False)
    if gathers and any(unit.root for unit in units):
        gathers.arrive()
    for unit in units:
        if gathers and not unit.root:
            gathers.arrive()
            gathers.issue()  # the next layer's parameters travel while this one computes
        emitter.forward(unit)
    return emitter.builder.build()


@lru_cache(maxsize=4096)
def backward_program(
    shape: RankShape, stage: StageShape, dp: DataParallel, recompute: str, accumulate: bool, synchronise: bool
) -> Program:
    """Backward of one micro-batch on one stage.

    Args:
        shape, stage, dp: The rank.
        recompute: ``none``, ``selective`` (the attention core again) or ``full`` (every layer's forward again).
        accumulate: Whether gradients of an earlier micro-batch are there.
        synchronise: Whether this is the last micro-batch, whose gradients ZeRO stages 0 and 1 reduce.
    """
    units = stage_units(shape, stage)
    emitter = _Emitter("backward", dp)
    gathers = _gathers(emitter, units, shape.dtype, backward=True)
    reducer = _Reducer(emitter, shape.dtype, accumulate, synchronise or dp.zero_stage >= 2)
    root_steps: list[tuple[Step, str]] = []
    if gathers and stage.last:
        gathers.issue()  # the last layer's parameters travel beside the head
    for unit in reversed(units):
        if gathers and not unit.root:
            gathers.arrive()
            gathers.issue()
        if recompute == "full" and not unit.root:
            emitter.forward(unit)
        for step in reversed(unit.block):
            name = f"{unit.name}.{step.name}"
            if recompute == "selective" and step.attention_core:
                for work in step.forward:
                    emitter.emit(work, f"{name}.again")
            for work in step.backward + step.weight_grad:
                emitter.emit(work, name)
            if unit.root and dp.fully_sharded:
                root_steps.append((step, name))  # the root's gradients are reduced at the end
            else:
                reducer.ready(step, name)
        if not unit.root or not dp.fully_sharded:
            reducer.unit_done()
    for step, name in root_steps:
        reducer.ready(step, name)
    reducer.finish()
    return emitter.builder.build()


@lru_cache(maxsize=4096)
def optimizer_program(shape: RankShape, stage: StageShape, dp: DataParallel) -> Program:
    """Fused AdamW on a rank's share of the parameters; ZeRO stages 1 and 2 then gather them again."""
    tensors = unit_parameters(stage_units(shape, stage))
    shards = dp.size if dp.zero_stage else 1
    numel = -(-sum(tensors) // shards)
    emitter = _Emitter("optimizer", dp)
    emitter.emit(Op("adamw", (numel, len(tensors)), "fp32"), "adamw")
    if shape.dtype != "fp32":
        emitter.emit(Op("copy", (numel,), shape.dtype), "cast")
    if shards > 1 and dp.zero_stage < 3:
        gather = dp.collective("all_gather", sum(tensors) * DTYPE_BYTES[shape.dtype])
        emitter.block(gather, "dp", "parameters")
    return emitter.builder.build()
