"""Data-parallel traffic of one rank: DDP's buckets, ZeRO's scattered gradients, FSDP's gathered parameters."""

from __future__ import annotations

from stepsight.dataset.op import DTYPE_BYTES, Op
from stepsight.simulator.emitter import Emitter
from stepsight.simulator.layers import RankShape, Step

GRADIENT_BYTES = 4


class Gathers:
    """FSDP's all-gathers of parameters, one unit ahead of the computation where they overlap.

    Args:
        emitter: Where to.
        units: Name and elements of what is gathered, in the order of use.
        dtype: Of the parameters that travel.
        ahead: Whether the next unit is asked for early even where that hides nothing (backward on CPU).
    """

    def __init__(self, emitter: Emitter, units: list[tuple[str, int]], dtype: str, ahead: bool) -> None:
        self._emitter = emitter
        self._todo = units[::-1]
        self._dtype = dtype
        self._ahead = ahead or emitter.dp.overlaps
        self._flying: list[tuple[int, int, str]] = []

    def ask(self) -> None:
        """Ask for the next unit ahead of its use, if there is one."""
        if self._todo and self._ahead:
            self._issue()

    def _issue(self) -> None:
        emitter = self._emitter
        name, numel = self._todo.pop()
        emitter.emit(Op("copy", (-(-numel // emitter.dp.size),), self._dtype), f"{name}.copy_in")
        gather = emitter.dp.collective("all_gather", numel * DTYPE_BYTES[self._dtype])
        if emitter.dp.overlaps:
            index = emitter.send(gather, f"{name}.parameters")
        else:
            index = emitter.block(gather, "dp", f"{name}.parameters")
        self._flying.append((index, numel, name))

    def arrive(self) -> None:
        """Wait for the oldest all-gather and copy it out into parameters."""
        if not self._flying:
            self._issue()
        index, numel, name = self._flying.pop(0)
        self._emitter.wait(index)
        self._emitter.emit(Op("copy", (numel,), self._dtype), f"{name}.copy_out")


class Reducer:
    """Gradients on their way to other replicas, bucket by bucket or unit by unit."""

    def __init__(self, emitter: Emitter, dtype: str, accumulate: bool, active: bool) -> None:
        self._emitter = emitter
        self._dp = emitter.dp
        self._dtype = dtype
        self._accumulate = accumulate
        self._active = active
        self._tensors: list[int] = []
        self._buckets = 0

    def ready(self, step: Step, name: str) -> None:
        """Gradients of a step's parameters are there."""
        sharded = self._dp.size > 1 and self._dp.zero_stage >= 2
        for numel in step.parameters:
            if self._accumulate and not sharded and self._dtype == "fp32":
                self._emitter.emit(Op("add", (numel,), "fp32"), f"{name}.accumulate")
            if self._active and self._dp.zero_stage < 2 and self._dtype == "fp32":
                self._emitter.emit(Op("copy", (numel,), "fp32"), f"{name}.bucket")
            self._tensors.append(numel)
            if self._dp.zero_stage < 2 and sum(self._tensors) * GRADIENT_BYTES >= self._dp.bucket_bytes:
                self._flush()

    def unit_done(self) -> None:
        """All gradients of a layer are there."""
        if self._dp.zero_stage >= 2:
            self._flush()

    def finish(self) -> None:
        """The backward pass is over."""
        self._flush()

    def _flush(self) -> None:
        tensors, self._tensors = self._tensors, []
        if not (self._active and tensors):
            return
        numel = sum(tensors)
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
            for tensor in reversed(tensors):  # as the parameters were declared
                self._emitter.emit(Op("add", (-(-tensor // self._dp.size),), "fp32"), f"{name}.accumulate")


def sum_replicated(emitter: Emitter, shape: RankShape, steps: list[Step], shards: int) -> None:
    """Sequence parallelism: each rank has a part of the gradients of norms and positions; one message sums them."""
    numel = sum(-(-tensor // shards) for step in steps if step.replicated for tensor in step.parameters)
    if numel:
        emitter.emit(Op("copy", (numel,), "fp32"), "replicated.copy_in")
        emitter.emit(shape.collective("all_reduce", numel * GRADIENT_BYTES), "replicated")
        emitter.emit(Op("copy", (numel,), "fp32"), "replicated.copy_out")


def sum_buckets(emitter: Emitter, steps: list[Step]) -> None:
    """All gradients, bucket by bucket: joined, summed, divided, put back."""
    buckets: list[int] = []
    held = 0
    for tensor in (numel for step in reversed(steps) for numel in step.parameters):
        held += tensor
        if held * GRADIENT_BYTES >= emitter.dp.bucket_bytes:
            buckets, held = [*buckets, held], 0
    for index, numel in enumerate([*buckets, held] if held else buckets):
        name = f"gradients{index}"
        emitter.emit(Op("copy", (numel,), "fp32"), f"{name}.copy_in")
        emitter.block(emitter.dp.collective("all_reduce", numel * GRADIENT_BYTES), "dp", name)
        emitter.emit(Op("elementwise", (numel,), "fp32"), f"{name}.mean")
        emitter.emit(Op("copy", (numel,), "fp32"), f"{name}.copy_out")
