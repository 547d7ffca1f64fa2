"""A job whose computation is replaced by sleeping; everything else is real.

Parameters, gradients and activations have their sizes, tensor-parallel collectives, DDP, FSDP2 and pipeline runtimes do
what they do; only the ops of a block are not computed: the rank sleeps for as long as they are said to take.  So
many ranks fit on few cores, and time tells of schedules, communication and their overlap.

What to sleep is in the plan: ``sleeps`` of a run, which ``stepsight collect --box`` makes from the job's blocks::

    {"parts": [[block, ...], ...],                 # numbers of blocks, for each part of the pipeline in model order
     "blocks": [[step, ...], ...],
     "root": [...],                                # blocks that FSDP wraps with the model rather than on their own
     "boundary_numel": [...],                      # elements (fp32) that pass from each part to the next
     "optimizer": [["op", kind, dims, dtype, seconds], ...],   # per stage
     "paces": [...],                               # per rank: how much slower than said
     "table": ""}                                  # the schedule, as CSV, where torch has no class for it

A step is ``{"forward", "backward", "weight": items, "parameters": [numel], "weight_first": bool}``, and perhaps
``"expert": true`` if the parameters are of experts that other ranks do not hold; an item is ``["op", kind, dims, dtype,
seconds]`` or a collective, ``["tp" | "cp" | "ep", kind, num_bytes]``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import compress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from ..base import annotate
from ..base.collective_calls import Buffers, Group, collective_call
from ..ops.composite import conjugate, function
from ..ops.input_pool import DTYPES
from .parallel import ParallelTraining, own_group

WARM_UP_PACE = 0.1  # share of the sleeps in uncounted steps: they allocate buffers and open connections


class SleepingTraining(ParallelTraining):
    """A run of a checked plan, with sleeping instead of computation."""

    def __init__(self, run: dict[str, Any], device: torch.device) -> None:
        job, sleeps = run["job"], run["sleeps"]
        super().__init__(job, device)
        if self.degrees["pp"] > 1:
            self.groups["pp"] = own_group(device.type, "pp", self.degrees["pp"], **self.degrees)
        annotate.name_groups(self.groups)
        self.rank = Rank(self.groups, sharded=self.sharded)
        self._pace = sleeps["paces"][dist.get_rank()]
        self._optimizer = sleeps["optimizer"][self.stage_index]
        parts = {number: Part(self.rank, sleeps, number) for number in self.part_numbers}

        def shapes(number: int) -> tuple[Tensor, Tensor]:
            part = parts[number]
            given = torch.zeros(1, part.size_in, requires_grad=number > 0)
            return given, torch.zeros(1, part.size_out, requires_grad=True)

        self.assemble(parts, shapes, sleeps["table"])
        self.tokens = self.targets = torch.zeros(self.num_micro_batches, 1)

    def hurry(self, pace: float) -> None:
        """Sleep for this share of the stated time."""
        self.rank.pace = self._pace * pace

    def data_parallel(self, part: Part) -> nn.Module:
        model, group = super().data_parallel(part), self.groups["dp"]
        if not isinstance(model, DistributedDataParallel):
            return model
        finish = self.rank.finish  # the hook must not hold the model that holds it: neither would ever be freed

        def reduce_when_done(_, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations, and takes no text
            finish()
            return allreduce_hook(group, bucket)

        model.register_comm_hook(None, reduce_when_done)
        return model

    def segment(self, label: str, micro_batch: int, stage: int = 0) -> AbstractContextManager[None]:
        return self.rank.segment(label, micro_batch, stage)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output.sum()

    def update(self) -> None:
        self.all_reduce_gradients()
        self.rank.begin()
        self.rank.do([self._optimizer])
        self.model.zero_grad(set_to_none=True)


SLACK_S = 2e-3  # time by which the host may be late without delaying the device
FP32_BYTES = 4

Work = Callable[[], object]


class Rank:
    """The rank's simulated device, and what steps need of it: consecutive ops, with the host running ahead.

    The host waits only where others must not see what is not there yet: waking for every op would cost the cores more
    than all that is real.  If the parameters are ``sharded``, hooks gather and scatter between blocks.
    """

    def __init__(self, groups: Mapping[str, Group | None], *, sharded: bool = False) -> None:
        self.groups, self.sharded, self.pace = groups, sharded, 1.0
        self._until = 0.0
        self._buffers: dict[int, Tensor] = {}

    def begin(self) -> None:
        """It waited for something else: its next op starts now."""
        self._until = time.perf_counter()

    def finish(self) -> None:
        """Sleep until its ops have finished."""
        if (left := self._until - time.perf_counter()) > 0:
            time.sleep(left)

    def compute(self, seconds: float) -> None:
        """Add one op."""
        self._until = max(self._until, time.perf_counter() - SLACK_S) + seconds * self.pace

    def at_edge(self) -> None:
        """Wait for the device; with hooks that wait for others, its time starts again."""
        if self.sharded:
            self.finish()
            self.begin()

    def do(self, items: Sequence[Sequence[Any]]) -> None:
        """Sleep for ops, call collectives."""
        for item in items:
            if item[0] == "op":
                _, kind, dims, dtype, seconds = item
                with annotate.op(kind, dims, DTYPES[dtype]):
                    self.compute(seconds)
                    if annotate.active():  # a trace shows what every op takes
                        self.finish()
            else:
                self.finish()
                self._collective(*item)
                self.begin()

    @contextmanager
    def segment(self, label: str, micro_batch: int, stage: int = 0) -> Iterator[None]:
        """A segment that ends when the device has finished."""
        with annotate.segment(label, micro_batch=micro_batch, stage=stage):
            self.begin()
            yield
            self.finish()

    def _collective(self, axis: str, kind: str, num_bytes: int) -> None:
        group, numel = self.groups[axis], -(-num_bytes // FP32_BYTES)
        assert group is not None
        full = self._buffers.setdefault(numel, torch.zeros(numel))
        call = collective_call(kind, group.size())
        call.run(Buffers(full, torch.empty_like(full), torch.zeros(numel // group.size()), [], group))


def _done(x: Tensor, work: Work) -> Tensor:
    work()
    return x.clone()


# Work on the way forward, and other work on the way back, which do nothing to the numbers.
_Input = conjugate("_Input", lambda x, ahead, _: _done(x, ahead), lambda grad, _, back: _done(grad, back))
# Changes the number of elements, forward and backward.
_Resize = conjugate("_Resize", lambda x, numel, _: x.new_zeros(1, numel), lambda _, __, shape: torch.zeros(shape))


# Work on the way back of a step's parameters, whose gradients are zero.
_Weight = function(
    "_Weight",
    lambda back, *held: (held[0].new_zeros(1), (), (back, [each.shape for each in held])),
    lambda _, back, shapes: (back(), *map(torch.zeros, shapes)),
)


class Block(nn.Module):
    """A layer, an embedding or a head."""

    def __init__(self, rank: Rank, steps: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self.rank, self.steps = rank, steps
        self.weights = nn.ParameterList(torch.zeros(numel) for step in steps for numel in step["parameters"])
        of_experts = ["expert" in step for step in steps for _ in step["parameters"]]
        for each in compress(self.weights, of_experts):
            each.unshared = True

    def forward(self, x: Tensor) -> Tensor:
        held, edge, do = iter(self.weights), self.rank.at_edge, self.rank.do
        x = cast(Tensor, _Input.apply(x, edge, edge))  # hooks at both ends find the device idle
        for step in self.steps:
            parameters = [next(held) for _ in step["parameters"]]
            apply = [partial(_Input.apply, x, *(partial(do, step[way]) for way in ("forward", "backward")))]
            if parameters:  # autograd goes back first through what came last
                weight = partial(_Weight.apply, partial(do, step["weight"]), *parameters)
                apply.insert(int(step["weight_first"]), weight)
            first, *others = [cast(Tensor, make()) for make in apply]
            x = sum(others, first)
        return cast(Tensor, _Input.apply(x, edge, edge))


class Part(nn.Module):
    """A pipeline part: its blocks between the activations that pass it."""

    def __init__(self, rank: Rank, sleeps: dict[str, Any], number: int) -> None:
        super().__init__()
        own = sleeps["parts"][number]
        self.layers = nn.ModuleList(Block(rank, sleeps["blocks"][block]) for block in own)
        self.wrapped = [layer for layer, block in zip(self.layers, own, strict=True) if block not in sleeps["root"]]
        self.precision = MixedPrecisionPolicy()
        self.size_in, self.size_out = [1, *sleeps["boundary_numel"], 1][number : number + 2]

    def forward(self, x: Tensor) -> Tensor:
        x = cast(Tensor, _Resize.apply(x, 1, x.shape))
        for layer in self.layers:
            x = layer(x)
        return cast(Tensor, _Resize.apply(x, self.size_out, x.shape))
