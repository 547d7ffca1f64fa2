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

A step is ``{"forward", "backward", "weight": items, "parameters": [numel], "weight_first": bool}``; an item is
``["op", kind, dims, dtype, seconds]`` or ``["tp", kind, num_bytes]``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.parallel import DistributedDataParallel

from ..base import annotate
from ..base.collective_calls import Group, all_gather, reduce_scatter
from .parallel import ParallelRank, stages_group

SINGLE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
MULTI = {
    "1f1b": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
V_SHAPED = ("zbv", "dualpipev")
WARM_UP_PACE = 0.1  # share of the sleeps in uncounted steps: they allocate buffers and open connections


class RecordedStage(PipelineStage):
    """A pipeline stage whose chunks are segments."""

    rank: Rank

    def _segment(self, label: str, micro_batch: int) -> AbstractContextManager[None]:
        return self.rank.device_segment(label, micro_batch, self.stage_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._segment("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._segment("backward" if full_backward else "input", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._segment("weight", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class SleepingTraining(ParallelRank):
    """Like ``parallel.Training`` of a run of a checked plan, with sleeping instead of computation."""

    def __init__(self, run: dict[str, Any], device: torch.device) -> None:
        job, sleeps = run["job"], run["sleeps"]
        parallel = job["parallel"]
        super().__init__(job, device)
        if self.degrees["pp"] > 1:
            self.groups["pp"] = stages_group(device.type, **self.degrees)
        annotate.name_groups(self.groups)
        self.rank = Rank(self.groups["tp"])
        self._pace = sleeps["paces"][dist.get_rank()]
        self._optimizer = sleeps["optimizer"][self.stage_index]
        self.parts = {number: Part(self.rank, sleeps, number) for number in _own(parallel, self.stage_index)}
        self.rank.sharded = self.sharded
        self.models = {number: self._replicated(part) for number, part in self.parts.items()}
        self.schedule = self._schedule(parallel, sleeps) if self.degrees["pp"] > 1 else None
        self.last = any(part.last for part in self.parts.values())
        self.stage = next(reversed(self.parts.values()))

    def hurry(self, pace: float) -> None:
        """Sleep for this share of the stated time."""
        self.rank.device.pace = self._pace * pace

    def _replicated(self, part: Part) -> nn.Module:
        own = [layer for layer, alone in zip(part.layers, part.wrapped, strict=True) if alone]
        model, group = self.data_parallel(part, own), self.groups["dp"]
        if not isinstance(model, DistributedDataParallel):
            return model
        device = self.rank.device

        def reduce_when_done(_, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations, and takes no text
            device.finish()  # the hook must not hold the model that holds it: neither would ever be freed
            return allreduce_hook(group, bucket)

        model.register_comm_hook(None, reduce_when_done)
        return model

    def _schedule(self, parallel: dict[str, Any], sleeps: dict[str, Any]) -> Any:
        stages = []
        for number, part in self.parts.items():
            stage = RecordedStage(
                self.models[number], number, len(sleeps["parts"]), self.device,
                input_args=torch.zeros(1, part.size_in, requires_grad=not part.first),
                output_args=torch.zeros(1, part.size_out, requires_grad=True), group=self.groups["pp"],
            )  # fmt: skip
            stage.rank = self.rank
            stages.append(stage)
        name, chunks = parallel["schedule"], parallel["virtual_stages"]
        settings: dict[str, Any] = {"n_microbatches": self.num_micro_batches, "scale_grads": False}
        settings["loss_fn"] = lambda output, target: output.sum()
        if chunks == 1 and name in SINGLE:
            return getattr(torch_schedules, SINGLE[name])(stages[0], **settings)
        if name in MULTI:
            return getattr(torch_schedules, MULTI[name])(stages, **settings)
        schedule = torch_schedules._PipelineScheduleRuntime(stages, **settings)
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(sleeps["table"])
            file.flush()
            schedule._load_csv(file.name)
        return schedule

    def step(self) -> Tensor:
        """One training step; there is no loss."""
        with annotate.segment("step"):
            if self.schedule is not None:
                batch = torch.zeros(self.num_micro_batches, 1)
                arguments = (batch,) if any(part.first for part in self.parts.values()) else ()
                self.schedule.step(*arguments, target=batch if self.last else None, return_outputs=False)
            else:
                self._micro_batches()
            with self.rank.device_segment("optimizer", -1, self.stage_index):
                self.all_reduce_gradients(p for part in self.parts.values() for p in part.parameters())
                self.rank.device.begin()
                self.rank.do([self._optimizer])
                for model in self.models.values():
                    model.zero_grad(set_to_none=True)
        return torch.zeros(())

    def _micro_batches(self) -> None:
        (model,) = self.models.values()
        for index in range(self.num_micro_batches):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = index == self.num_micro_batches - 1
            with self.rank.device_segment("forward", index):
                loss = model(torch.zeros(1, 1)).sum()
            with self.rank.device_segment("backward", index):
                loss.backward()


def _own(parallel: dict[str, Any], stage: int) -> list[int]:
    """Parts of a stage."""
    stages, chunks = parallel["pp"], parallel["virtual_stages"]
    if parallel["schedule"] in V_SHAPED:
        return [stage, 2 * stages - 1 - stage]
    return [stage + chunk * stages for chunk in range(chunks)]


SLACK_S = 2e-3  # time by which the host may be late without delaying the device
FP32_BYTES = 4

Item = Sequence[Any]
Work = Callable[[], object]


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
    """Work on the way forward, and other work on the way back, which do nothing to the numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Work, back: Work) -> Tensor:
        ctx.back = back
        ahead()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.back()
        return gradients[0], None, None


class _Weight(torch.autograd.Function):
    """Gradients of a step's parameters."""

    @staticmethod
    def forward(ctx: Any, back: Work, *parameters: Tensor) -> Tensor:
        ctx.back, ctx.shapes = back, [parameter.shape for parameter in parameters]
        return parameters[0].new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.back()
        return (None, *(torch.zeros(shape) for shape in ctx.shapes))


class _Resize(torch.autograd.Function):
    """Changes the number of elements, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numel: int) -> Tensor:
        ctx.shape = x.shape
        return x.new_zeros(1, numel)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.zeros(ctx.shape), None


class Block(nn.Module):
    """A layer, an embedding or a head."""

    def __init__(self, rank: Rank, steps: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self.rank, self.steps = rank, steps
        self.weights = nn.ParameterList(torch.zeros(numel) for step in steps for numel in step["parameters"])

    def forward(self, x: Tensor) -> Tensor:
        held, edge, do = iter(self.weights), self.rank.at_edge, self.rank.do
        x = cast(Tensor, _Input.apply(x, edge, edge))  # hooks at both ends find the device idle
        for step in self.steps:
            parameters = [next(held) for _ in step["parameters"]]
            work = (partial(do, step[way]) for way in ("forward", "backward"))
            apply = [partial(_Input.apply, x, *work)]
            if parameters:  # autograd goes back first through what came last
                weight = partial(_Weight.apply, partial(do, step["weight"]), *parameters)
                apply.insert(0 if not step["weight_first"] else 1, weight)
            results = [cast(Tensor, make()) for make in apply]
            x = results[0] if len(results) == 1 else results[0] + results[1]
        return cast(Tensor, _Input.apply(x, edge, edge))


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
