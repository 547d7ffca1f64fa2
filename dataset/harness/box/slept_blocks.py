"""Blocks whose computation is slept: autograd functions and modules that sleep for ops and call real collectives."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base import annotate
from ..base.collective_calls import Group, all_gather, reduce_scatter

SLACK_S = 2e-3  # time by which the host may be late without delaying the device
FP32_BYTES = 4

Item = Sequence[Any]


class Device:
    """The rank's simulated device: consecutive ops, with the host running ahead.

    The host waits only where others must not see what is not there yet: waking for every op would cost the cores more
    than all that is real.
    """

    def __init__(self) -> None:
        self.pace = 1.0
        self._until = 0.0

    def begin(self) -> None:
        """It waited for something else: its next op starts now."""
        self._until = time.perf_counter()

    def finish(self) -> None:
        """Sleep until its ops have finished."""
        left = self._until - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def compute(self, seconds: float) -> None:
        """Add one op."""
        self._until = max(self._until, time.perf_counter() - SLACK_S) + seconds * self.pace


class Rank:
    """What the items of steps need."""

    def __init__(self, group: Group | None) -> None:
        self.device = Device()
        self.group = group
        self.sharded = False  # then hooks gather and scatter between blocks
        self._buffers: dict[int, Tensor] = {}

    def at_edge(self) -> None:
        """Wait for the device; with hooks that wait for others, its time starts again."""
        if self.sharded:
            self.device.finish()
            self.device.begin()

    def do(self, items: Sequence[Item]) -> None:
        """Sleep for ops, call collectives."""
        for item in items:
            if item[0] == "op":
                _, kind, dims, dtype, seconds = item
                with annotate.op(kind, dims, DTYPES[dtype]):
                    self.device.compute(seconds)
                    if annotate.active():  # a trace shows what every op takes
                        self.device.finish()
            else:
                self.device.finish()
                self._collective(item[1], item[2])

    @contextmanager
    def device_segment(self, label: str, micro_batch: int, stage: int = 0) -> Iterator[None]:
        """A segment that ends when the device has finished."""
        with annotate.segment(label, micro_batch=micro_batch, stage=stage):
            self.device.begin()
            yield
            self.device.finish()

    def _collective(self, kind: str, num_bytes: int) -> None:
        assert self.group is not None
        numel = -(-num_bytes // FP32_BYTES)
        full = self._buffers.setdefault(numel, torch.zeros(numel))
        if kind == "all_reduce":
            dist.all_reduce(full, group=self.group)
        else:
            shard = torch.zeros(numel // self.group.size())
            if kind == "all_gather":
                all_gather(full, shard, self.group)
            else:
                reduce_scatter(shard, full, self.group)
        self.device.begin()


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _Input(torch.autograd.Function):
    """A step forward, and the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: Rank, step: dict[str, Any]) -> Tensor:
        ctx.work = (rank, step["backward"])
        rank.do(step["forward"])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rank, items = ctx.work
        rank.do(items)
        return gradients[0], None, None


class _Weight(torch.autograd.Function):
    """Gradients of a step's parameters."""

    @staticmethod
    def forward(ctx: Any, rank: Rank, step: dict[str, Any], *parameters: Tensor) -> Tensor:
        ctx.work = (rank, step["weight"])
        ctx.shapes = [parameter.shape for parameter in parameters]
        return parameters[0].new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        rank, items = ctx.work
        rank.do(items)
        return (None, None, *(torch.zeros(shape) for shape in ctx.shapes))


class _Resize(torch.autograd.Function):
    """Changes the number of elements, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numel: int) -> Tensor:
        ctx.shape = x.shape
        return x.new_zeros(1, numel)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.zeros(ctx.shape), None


class _Edge(torch.autograd.Function):
    """The begin or end of a block: hooks at this place find the device idle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: Rank) -> Tensor:
        ctx.rank = rank
        rank.at_edge()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.rank.at_edge()
        return gradients[0], None


class Block(nn.Module):
    """A layer, an embedding or a head."""

    def __init__(self, rank: Rank, steps: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self.rank, self.steps = rank, steps
        self.weights = nn.ParameterList(torch.zeros(numel) for step in steps for numel in step["parameters"])

    def forward(self, x: Tensor) -> Tensor:
        held = iter(self.weights)
        x = cast(Tensor, _Edge.apply(x, self.rank))
        for step in self.steps:
            parameters = [next(held) for _ in step["parameters"]]
            apply = [partial(_Input.apply, x, self.rank, step)]
            if parameters:  # autograd goes back first through what came last
                apply.insert(0 if not step["weight_first"] else 1, partial(_Weight.apply, self.rank, step, *parameters))
            results = [cast(Tensor, make()) for make in apply]
            x = results[0] if len(results) == 1 else results[0] + results[1]
        return cast(Tensor, _Edge.apply(x, self.rank))


class Part(nn.Module):
    """A pipeline part: its blocks between the activations that pass it."""

    def __init__(self, rank: Rank, sleeps: dict[str, Any], number: int) -> None:
        super().__init__()
        own = sleeps["parts"][number]
        self.layers = nn.ModuleList(Block(rank, sleeps["blocks"][block]) for block in own)
        self.wrapped = [block not in sleeps["root"] for block in own]
        sizes = sleeps["boundary_numel"]
        self.first, self.last = number == 0, number == len(sleeps["parts"]) - 1
        self.size_in, self.size_out = 1 if self.first else sizes[number - 1], 1 if self.last else sizes[number]

    def forward(self, x: Tensor) -> Tensor:
        x = cast(Tensor, _Resize.apply(x, 1))
        for layer in self.layers:
            x = layer(x)
        return cast(Tensor, _Resize.apply(x, self.size_out))
