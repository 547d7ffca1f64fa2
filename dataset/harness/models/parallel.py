"""A job made runnable: the device mesh, the sharded model, and one training step.

Orders of ranks: tensor parallel varies fastest, then data parallel, then pipeline.  Without pipeline parallel the
step runs each micro-batch forward and backward in turn (DDP synchronises gradients in the last one; FSDP2
reduce-scatters in every one, its default).  With it, ``torch.distributed.pipelining`` runs the schedule, and
plain data parallel all-reduces the gradients in buckets after it: DDP's own reducer crashes when every forward
precedes the first backward, so it is not used there at all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from ..base import annotate, cores
from ..ops import composite
from ..plan import num_micro_batches, world_size
from .torch_parts import CrossEntropy
from .transformer import Stage, shape_of, token_rows

AXES = ("pp", "dp", "tp")


@lru_cache(maxsize=64)
def device_mesh(device: str, pp: int, dp: int, tp: int) -> DeviceMesh:
    """The mesh of these degrees, the same one until ``end_groups``."""
    with cores.any_core():
        return init_device_mesh(device, (pp, dp, tp), mesh_dim_names=AXES)


@lru_cache(maxsize=64)
def stages_group(device: str, **degrees: int) -> Any:
    """This rank's pipeline in the mesh of these degrees, as a group for messages between its stages."""
    mesh = device_mesh(device, **degrees)
    with cores.any_core(messages=True):
        lines = mesh.mesh.flatten(1).T.tolist()
        groups = [dist.new_group(line) for line in lines]
    return next(group for line, group in zip(lines, groups, strict=True) if dist.get_rank() in line)


def end_groups(mesh: DeviceMesh | None, stages: Any = None) -> None:
    """End the process groups of a run: its mesh's, and ``stages_group``.

    Gloo's threads of each wake a hundred times a second.  Those of forty runs together, on eight ranks, kept two cores
    busy a fifth of the time.
    """
    gc.collect()  # what a run's models hold of them
    device_mesh.cache_clear()
    stages_group.cache_clear()
    groups = {id(group): group for group in [*(mesh.get_all_groups() if mesh else ()), stages]}
    for group in groups.values():
        if group not in (None, dist.group.WORLD):
            dist.destroy_process_group(group)


class ParallelRank:
    """This rank's place in a checked job: its mesh and groups, and data parallelism of models and gradients."""

    def __init__(self, job: dict[str, Any], device: torch.device) -> None:
        self.job, self.device = job, device
        self.num_micro_batches = num_micro_batches(job)
        self.degrees = degrees = {axis: job["parallel"][axis] for axis in AXES}
        self.mesh = mesh = device_mesh(device.type, **degrees) if world_size(job) > 1 else None
        self.groups: dict[str, Any] = {
            axis: mesh.get_group(axis) if mesh and degrees[axis] > 1 else None for axis in AXES
        }
        self.stage_index = self.place("pp")
        self.sharded = job["parallel"]["zero_stage"] == 3 and degrees["dp"] > 1

    def place(self, axis: str) -> int:
        """This rank's number on an axis."""
        group = self.groups[axis]
        return 0 if group is None else int(group.rank())

    def data_parallel(
        self, model: nn.Module, layers: Iterable[nn.Module], policy: MixedPrecisionPolicy | None = None
    ) -> nn.Module:
        """A model whose replicas share their gradients, by FSDP2 (each layer by itself) or by DDP.

        In a pipeline without FSDP2 it stays as it is: see ``all_reduce_gradients``.
        """
        group = self.groups["dp"]
        if group is None or self.mesh is None:
            return model
        if self.sharded:
            for part in (*layers, model):
                fully_shard(part, mesh=self.mesh["dp"], mp_policy=policy or MixedPrecisionPolicy())
            return model
        if self.groups["pp"] is not None:
            return model
        bucket = self.job["parallel"]["bucket_mbytes"]
        return DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket, gradient_as_bucket_view=True)

    def all_reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of a pipeline's replicas in buckets, after its schedule."""
        group = self.groups["dp"]
        if group is None or self.sharded or self.groups["pp"] is None:
            return
        gradients = [p.grad for p in reversed(list(parameters)) if p.grad is not None]
        limit = self.job["parallel"]["bucket_mbytes"] * 2**20
        bucket: list[Tensor] = []
        for index, gradient in enumerate(gradients):
            bucket.append(gradient)
            if index == len(gradients) - 1 or sum(g.numel() * g.element_size() for g in bucket) >= limit:
                all_reduce_flat(bucket, group, group.size())
                bucket = []


class Training(ParallelRank):
    """One checked job's model, data and optimizer on this rank."""

    def __init__(self, job: dict[str, Any], device: torch.device) -> None:
        super().__init__(job, device)
        annotate.name_groups(self.groups)
        self.shape = shape_of(job, device, self.groups["tp"])
        num_stages = self.degrees["pp"]
        self.stage = Stage(self.shape, self.stage_index, num_stages)
        policy = MixedPrecisionPolicy(self.shape.dtype, self.shape.main_dtype)
        self.model = self.data_parallel(self.stage, self.stage.layers, policy)
        self.schedule = self._schedule(num_stages) if num_stages > 1 else None
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        self._adamw_dims = (sum(_local(p).numel() for p in parameters), len(parameters))
        self.tokens, self.targets = self._data()

    def _schedule(self, num_stages: int) -> Any:
        shape, job = self.shape, self.job
        rows, vocab = shape.micro_batch * shape.seq_len, shape.vocab // shape.size
        hidden = torch.empty(shape.rows, shape.hidden, device="meta", dtype=shape.dtype, requires_grad=True)
        logits = torch.empty(rows, vocab, device="meta", dtype=shape.dtype, requires_grad=True)
        tokens = torch.empty(shape.micro_batch, shape.seq_len, device="meta", dtype=torch.int64)
        given, made = (tokens if self.stage.first else hidden,), (logits if self.stage.last else hidden,)
        stage = _AnnotatedStage(
            self.model, self.stage_index, num_stages, self.device, input_args=given, output_args=made,
            group=self.groups["pp"],
        )  # fmt: skip
        kind = ScheduleGPipe if job["parallel"]["schedule"] == "gpipe" else Schedule1F1B

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            loss = self._loss(output, target)
            stage.end_forward()
            return loss

        schedule = kind(stage, self.num_micro_batches, loss_fn=loss_fn, scale_grads=False)
        # The logits of a whole batch are not used, and joining them would take time.
        schedule._merge_outputs = lambda output_chunks: None  # type: ignore[method-assign]
        return schedule

    def _data(self) -> tuple[Tensor, Tensor]:
        """This replica's ``tokens`` and ``targets``, each ``[num_micro_batches * micro_batch, seq_len]``.

        An encoder's tokens come before the decoder's, and then the micro-batch is the last dimension (``token_rows``).
        """
        batch, model = self.job["batch"], self.job["model"]
        generator = torch.Generator().manual_seed(20)
        length = model["seq_len"] + model.get("encoder_seq_len", 0)
        tokens = torch.randint(model["vocab"], (batch["global_batch"], length + 1), generator=generator)
        mine = tokens.chunk(self.job["parallel"]["dp"])[self.place("dp")].to(self.device)
        each = (mine[:, :-1], mine[:, -model["seq_len"] :])
        tokens, targets = (token_rows(self.shape, part.contiguous()) for part in each)
        return tokens, targets

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = CrossEntropy.apply(
            composite.cast(logits, self.shape.main_dtype),
            targets.reshape(-1),
            self.groups["tp"],
            1.0 / self.num_micro_batches,
        )
        return loss

    def step(self) -> Tensor:
        """One training step; the replica's mean loss (0 on ranks without the last stage), still on the device."""
        with annotate.segment("step"):
            losses: list[Tensor] = []
            if self.schedule is not None:
                arguments = (self.tokens,) if self.stage.first else ()
                self.schedule.step(*arguments, target=self.targets if self.stage.last else None, losses=losses)
                losses = [loss.detach() for loss in losses]
            else:
                losses.extend(self._micro_batches())
            with annotate.segment("optimizer", stage=self.stage_index):
                if self.shape.sequence_parallel and self.groups["tp"] is not None:
                    partial = [p.grad for p in self.stage.replicated_parameters() if p.grad is not None]
                    all_reduce_flat(list(map(_local, partial)), self.groups["tp"], 1)
                self.all_reduce_gradients(self.model.parameters())
                with annotate.op("adamw", self._adamw_dims, self.shape.main_dtype):
                    self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)

    def _micro_batches(self) -> Iterator[Tensor]:
        count, ddp = self.num_micro_batches, isinstance(self.model, DistributedDataParallel)
        batches = zip(self.tokens.chunk(count), self.targets.chunk(count), strict=True)
        for index, (tokens, targets) in enumerate(batches):
            with self.model.no_sync() if ddp and index < count - 1 else nullcontext():  # type: ignore[operator]
                with annotate.segment("forward", micro_batch=index, stage=0):
                    loss = self._loss(self.model(tokens), targets)
                with annotate.segment("backward", micro_batch=index, stage=0):
                    loss.backward()
            yield loss.detach()


class _AnnotatedStage(PipelineStage):
    """A pipeline stage whose chunks are segments in the trace; the last stage's forward ends with the loss."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._forward = annotate.segment("forward", micro_batch=fwd_chunk_id, stage=self.stage_index)
        self._forward.__enter__()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self.end_forward()
        return output

    def end_forward(self) -> None:
        self._forward.__exit__(None, None, None)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with annotate.segment("backward", micro_batch=bwd_chunk_id, stage=self.stage_index):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def all_reduce_flat(tensors: list[Tensor], group: dist.ProcessGroup, divisor: int) -> None:
    """Sum the tensors over the group as one message, divide, and put them back."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    if divisor > 1:
        flat.div_(divisor)
    torch._foreach_copy_(
        tensors, [p.view_as(t) for p, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
    )
