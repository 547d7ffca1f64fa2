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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.parallel import DistributedDataParallel

from ..base import annotate
from ..models.parallel import ParallelRank, stages_group
from .slept_blocks import Device, Part, Rank

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

    @contextmanager
    def _segment(self, label: str, micro_batch: int) -> Iterator[None]:
        with self.rank.device_segment(label, micro_batch, self.stage_index):
            yield

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
    """Like ``parallel.Training``, with sleeping instead of computation.

    Args:
        run: A run of a checked plan.
        device: The CPU.
    """

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
        device = self.rank.device  # the hook must not hold the model that holds it: neither would ever be freed
        # Without annotations: DDP checks them, and takes none that is text.
        model.register_comm_hook(None, lambda _, bucket: _reduce_when_done(device, group, bucket))
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
        settings: dict[str, Any] = {"n_microbatches": self.num_micro_batches, "loss_fn": _loss, "scale_grads": False}
        schedule: Any
        if chunks == 1 and name in SINGLE:
            schedule = getattr(torch_schedules, SINGLE[name])(stages[0], **settings)
        elif name in MULTI:
            schedule = getattr(torch_schedules, MULTI[name])(stages, **settings)
        else:
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


def _reduce_when_done(device: Device, group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's own sum of a bucket, after the device has its gradients."""
    device.finish()
    return allreduce_hook(group, bucket)


def _own(parallel: dict[str, Any], stage: int) -> list[int]:
    """Parts of a stage."""
    stages, chunks = parallel["pp"], parallel["virtual_stages"]
    if parallel["schedule"] in V_SHAPED:
        return [stage, 2 * stages - 1 - stage]
    return [stage + chunk * stages for chunk in range(chunks)]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()
