"""A job made runnable: the device mesh, the sharded model, and one training step.

Orders of ranks: tensor parallel varies fastest, then data parallel, then pipeline.  Without pipeline parallel the
step runs each micro-batch forward and backward in turn (DDP synchronises gradients in the last one; FSDP2
reduce-scatters in every one, its default).  With it, ``torch.distributed.pipelining`` runs the schedule, and
plain data parallel all-reduces the gradients in buckets after it: DDP's own reducer crashes when every forward
precedes the first backward, so it is not used there at all.

With ZeRO-1 and ZeRO-2 each replica updates its shard of the parameters, and all gather what the others have updated.
Gradients are summed in buckets, each to the rank that owns that part (Rajbhandari et al. 2020, arXiv:1910.02054): with
ZeRO-1 once a step, with ZeRO-2 after the backward pass of every micro-batch.
"""

from __future__ import annotations

import gc
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.parallel import DistributedDataParallel

from ..base import annotate, cores
from ..base.collective_calls import Group, all_gather, reduce_scatter
from ..ops import composite
from ..plan.plan_checks import SCHEDULES, num_micro_batches, world_size
from .torch_parts import CrossEntropy
from .transformer import Stage, shape_of, token_rows

AXES = ("pp", "dp", "tp")  # of the mesh, where context-parallel ranks are replicas too
WITHIN_DP = ("cp", "ep")
Held = TypeVar("Held", bound=Tensor)
V_SHAPED = ("zbv", "dualpipev")


@lru_cache(maxsize=64)
def device_mesh(device: str, pp: int, dp: int, tp: int) -> DeviceMesh:
    """The mesh of these degrees, the same one until ``end_groups``."""
    with cores.any_core():
        return init_device_mesh(device, (pp, dp, tp), mesh_dim_names=AXES)


@lru_cache(maxsize=64)
def own_group(device: str, axis: str, size: int, **degrees: int) -> Any:
    """This rank's group in the mesh of these degrees: its pipeline, for messages between its stages, or the neighbours
    among its replicas that share sequences (``cp``) or experts (``ep``).
    """
    mesh = device_mesh(device, **degrees).mesh
    with cores.any_core(messages=axis == "pp"):
        rows = mesh.flatten(1).T if axis == "pp" else mesh.unflatten(1, (-1, size)).movedim(2, -1).reshape(-1, size)
        lines = rows.tolist()
        groups = [dist.new_group(line) for line in lines]
    return next(group for line, group in zip(lines, groups, strict=True) if dist.get_rank() in line)


def end_groups(mesh: DeviceMesh | None, others: Iterable[Any] = ()) -> None:
    """End the process groups of a run: its mesh's, and the others.

    Gloo's threads of each wake a hundred times a second.  Those of forty runs together, on eight ranks, kept two cores
    busy a fifth of the time.
    """
    gc.collect()  # what a run's models hold of them
    device_mesh.cache_clear()
    own_group.cache_clear()
    groups = {id(group): group for group in [*(mesh.get_all_groups() if mesh else ()), *others]}
    for group in groups.values():
        if group not in (None, dist.group.WORLD):
            dist.destroy_process_group(group)


class ParallelTraining:
    """This rank's parts of a checked job: mesh and groups, data parallelism, the pipeline's schedule, a training step.

    Subclasses make the parts and call ``assemble``; they say what a ``loss`` is and how an ``update`` is done.
    """

    tokens: Tensor
    targets: Tensor

    def __init__(self, job: dict[str, Any], device: torch.device) -> None:
        self.job, self.device = job, device
        self.num_micro_batches = num_micro_batches(job)
        own = {axis: job["parallel"].get(axis, 1) for axis in (*AXES, *WITHIN_DP)}
        self.degrees = degrees = {"pp": own["pp"], "dp": own["dp"] * own["cp"], "tp": own["tp"]}
        self.mesh = mesh = device_mesh(device.type, **degrees) if world_size(job) > 1 else None
        self.groups: dict[str, Any] = {
            axis: mesh.get_group(axis) if mesh and degrees[axis] > 1 else None for axis in AXES
        }
        for axis in WITHIN_DP:
            self.groups[axis] = own_group(device.type, axis, own[axis], **degrees) if own[axis] > 1 else None
        self.stage_index = self.place("pp")
        self.sharded = job["parallel"]["zero_stage"] == 3 and degrees["dp"] > 1
        self.num_parts = degrees["pp"] * job["parallel"]["virtual_stages"]
        self.part_numbers = parts_of_stage(job["parallel"], self.stage_index)
        self.first, self.last = 0 in self.part_numbers, self.num_parts - 1 in self.part_numbers

    def place(self, axis: str) -> int:
        """This rank's number on an axis."""
        group = self.groups[axis]
        return 0 if group is None else int(group.rank())

    def assemble(self, parts: dict[int, Any], shapes: Callable[[int], tuple[Tensor, Tensor]], table: str = "") -> None:
        """Replicate the parts and schedule them; ``shapes`` are a part's input and output, ``table`` a schedule's."""
        self.parts = parts
        self.models = {number: self.data_parallel(part) for number, part in parts.items()}
        self.model = next(iter(self.models.values())) if len(parts) == 1 else nn.ModuleList(self.models.values())
        self.schedule = self._schedule(shapes, table) if self.degrees["pp"] > 1 else None
        if self.schedule is not None:  # logits of the whole batch are kept, as by default; joining them takes time
            self.schedule._merge_outputs = lambda output_chunks: None

    def data_parallel(self, part: Any) -> nn.Module:
        """A part whose replicas share their gradients, by FSDP2 (each layer by itself) or by DDP.

        With ZeRO-1 and -2 and in a pipeline it stays as it is: see ``Bucket`` and ``all_reduce_gradients``.
        """
        group, parallel = self.groups["dp"], self.job["parallel"]
        own = {name: each for name, each in part.named_parameters() if hasattr(each, "unshared")}
        if self.sharded and self.mesh is not None:
            for module in (*part.wrapped, part):
                ignored = set(own.values())
                fully_shard(module, mesh=self.mesh["dp"], mp_policy=part.precision, ignored_params=ignored)
        if group is None or self.reduces_last or parallel["zero_stage"]:
            return part
        bucket = parallel["bucket_mbytes"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(part, list(own))
        return DistributedDataParallel(part, process_group=group, bucket_cap_mb=bucket, gradient_as_bucket_view=True)

    @property
    def reduces_last(self) -> bool:
        """Whether replicas sum their gradients after the last backward pass."""
        replicated = self.groups["dp"] is not None and not self.job["parallel"]["zero_stage"]
        overlaps = self.groups["pp"] is None and self.job["parallel"].get("overlap_grad_reduce", True)
        return replicated and not overlaps

    def all_reduce_gradients(self) -> None:
        """Sum the gradients of replicas in buckets, if nothing has summed them yet."""
        parameters = reversed(self.shared_parameters()) if self.reduces_last else ()
        gradients = [p.grad for p in parameters if p.grad is not None]
        for bucket in in_buckets(gradients, self.job["parallel"]["bucket_mbytes"] * 2**20):
            all_reduce_flat(bucket, self.groups["dp"], self.degrees["dp"])

    def shared_parameters(self) -> list[nn.Parameter]:
        """Parameters that replicas share, which are all but those of experts that each rank has some of."""
        return [each for each in self.model.parameters() if not hasattr(each, "unshared")]

    def _schedule(self, shapes: Callable[[int], tuple[Tensor, Tensor]], table: str) -> Any:
        stages = []
        for number, model in self.models.items():
            given, made = shapes(number)
            told = {"input_args": given, "output_args": made, "group": self.groups["pp"]}
            stages.append(_SegmentedStage(model, number, self.num_parts, self.device, **told))
            stages[-1].segment = self.segment

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            loss = self.loss(output, target)
            stages[-1].end_forward()
            return loss

        name, chunks = self.job["parallel"]["schedule"], self.job["parallel"]["virtual_stages"]
        settings: dict[str, Any] = {"n_microbatches": self.num_micro_batches, "scale_grads": False, "loss_fn": loss_fn}
        whole = chunks == 1 and name in SCHEDULES["whole"]
        if owner := SCHEDULES["whole" if whole else "split"].get(name):
            return getattr(torch_schedules, owner)(stages[0] if whole else stages, **settings)
        schedule = torch_schedules._PipelineScheduleRuntime(stages, **settings)
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(table)
            file.flush()
            schedule._load_csv(file.name)
        return schedule

    def segment(self, label: str, micro_batch: int, stage: int = 0) -> AbstractContextManager[Any]:
        """A part of a step in traces; ``micro_batch`` -1: of none."""
        return annotate.segment(label, **({"micro_batch": micro_batch} if micro_batch >= 0 else {}), stage=stage)

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of a micro-batch."""

    @abstractmethod
    def update(self) -> None:
        """Update the parameters, and forget their gradients."""

    def step(self) -> Tensor:
        """One training step; the replica's mean loss (0 on ranks without the last part), still on the device."""
        with annotate.segment("step"):
            losses: list[Tensor] = []
            if self.schedule is not None:
                arguments, target = (self.tokens,) if self.first else (), self.targets if self.last else None
                self.schedule.step(*arguments, target=target, losses=losses)
                losses = [loss.detach() for loss in losses]
            else:
                losses.extend(self._micro_batches())
            with self.segment("optimizer", -1, self.stage_index):
                self.update()
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)

    def _micro_batches(self) -> Iterator[Tensor]:
        count, (model,) = self.num_micro_batches, self.models.values()
        batches = zip(self.tokens.chunk(count), self.targets.chunk(count), strict=True)
        for index, (tokens, targets) in enumerate(batches):
            waits = isinstance(model, DistributedDataParallel) and index < count - 1
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                with self.segment("forward", index):
                    loss = self.loss(model(tokens), targets)
                with self.segment("backward", index):
                    loss.backward()
            yield loss.detach()


class Training(ParallelTraining):
    """One checked job's model, data and optimizer on this rank."""

    def __init__(self, job: dict[str, Any], device: torch.device, table: str = "") -> None:
        super().__init__(job, device)
        annotate.name_groups(self.groups)
        self.shape = shape_of(job, device, self.groups)
        self.assemble({n: Stage(self.shape, n, self.num_parts) for n in self.part_numbers}, self._shapes, table)
        parameters, replicated = list(self.model.parameters()), self.shared_parameters()
        parallel, group = job["parallel"], self.groups["dp"]
        zero = parallel["zero_stage"] if group is not None else 0
        passes = 1 if zero == 2 else self.num_micro_batches if parallel.get("overlap_grad_reduce", True) else 0
        shared = in_buckets(replicated[::-1], parallel["bucket_mbytes"] * 2**20) if zero in (1, 2) else ()
        self.buckets = [Bucket(each, group, passes) for each in shared]  # in the order in which their gradients come
        own = [each for each in parameters if hasattr(each, "unshared")]
        groups = [bucket.shard for bucket in self.buckets] or replicated, own  # no kernel takes DTensors and others
        self.updated = [*groups[0], *own]
        self.optimizer = torch.optim.AdamW([{"params": each} for each in groups if each], lr=1e-4, fused=True)
        self._adamw_dims = (sum(_local(p).numel() for p in self.updated), len(parameters))
        self.tokens, self.targets = self._data()

    def _shapes(self, number: int) -> tuple[Tensor, Tensor]:
        shape = self.shape
        sizes = (shape.rows, shape.hidden), (shape.micro_batch * shape.seq_len, shape.vocab // shape.size)
        hidden, logits = (torch.empty(*s, device="meta", dtype=shape.dtype, requires_grad=True) for s in sizes)
        tokens = torch.empty(shape.micro_batch, shape.seq_len, device="meta", dtype=torch.int64)
        return hidden if number else tokens, hidden if number < self.num_parts - 1 else logits

    def _data(self) -> tuple[Tensor, Tensor]:
        """This rank's ``tokens`` and ``targets``, each ``[num_micro_batches * micro_batch, seq_len]``.

        An encoder's tokens come before the decoder's, and then the micro-batch is the last dimension (``token_rows``).
        """
        model, generator = self.job["model"], torch.Generator().manual_seed(20)
        sizes = self.job["batch"]["global_batch"], model["seq_len"] + model.get("encoder_seq_len", 0) + 1
        tokens = torch.randint(model["vocab"], sizes, generator=generator)
        parallel = self.job["parallel"]
        mine = tokens.chunk(parallel["dp"])[self.place("dp") // parallel.get("cp", 1)].to(self.device)
        first, last = mine[:, :-1].contiguous(), mine[:, -model["seq_len"] :].contiguous()
        if self.groups["cp"] is not None:
            first, last = (each[:, self.shape.places] for each in (first, last))
        return token_rows(self.shape, first), token_rows(self.shape, last)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        logits, share = composite.cast(output, self.shape.main_dtype), 1.0 / self.num_micro_batches
        loss: Tensor = CrossEntropy.apply(logits, target.reshape(-1), self.groups["tp"], share)
        return loss

    def update(self) -> None:
        if self.shape.sequence_parallel and self.groups["tp"] is not None:
            replicated = (p for part in self.parts.values() for p in part.replicated_parameters())
            all_reduce_flat([_local(p.grad) for p in replicated if p.grad is not None], self.groups["tp"], 1)
        self.all_reduce_gradients()
        for bucket in self.buckets:
            bucket.finish()
        with annotate.op("adamw", self._adamw_dims, self.shape.main_dtype):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for bucket in self.buckets:
            bucket.gather()


def parts_of_stage(parallel: dict[str, Any], stage: int) -> list[int]:
    """Numbers of a stage's parts of the model, in their order."""
    stages, chunks = parallel["pp"], parallel["virtual_stages"]
    turned = parallel["schedule"] in V_SHAPED
    return [stage, 2 * stages - 1 - stage] if turned else [stage + chunk * stages for chunk in range(chunks)]


class _SegmentedStage(PipelineStage):
    """A pipeline stage whose chunks are segments; the last stage's forward ends with the loss."""

    segment: Callable[..., AbstractContextManager[Any]]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._forward = self.segment("forward", fwd_chunk_id, self.stage_index)
        self._forward.__enter__()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self.end_forward()
        return output

    def end_forward(self) -> None:
        self._forward.__exit__(None, None, None)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self.segment("backward" if full_backward else "input", bwd_chunk_id, self.stage_index):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.segment("weight", bwd_chunk_id, self.stage_index):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


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
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


class Bucket:
    """Parameters whose gradients travel together once each has got ``passes`` of them; 0: when all are there."""

    def __init__(self, parameters: list[nn.Parameter], group: Group, passes: int) -> None:
        self._parameters, self._group, self._size = parameters, group, group.size()
        flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        self._padding = flat.new_zeros(-len(flat) % self._size)
        self._whole = torch.cat([flat, self._padding])
        sizes = [*map(Tensor.numel, parameters), len(self._padding)]
        for p, part in zip(parameters, self._whole.split(sizes)[:-1], strict=True):
            p.data = part.view_as(p)
            if passes:
                p.register_post_accumulate_grad_hook(self._count)
        self.shard = nn.Parameter(self._whole.chunk(self._size)[group.rank()].clone())
        self._received: Any = None  # the work, and the shard of the gradients
        self._wanted = self._missing = passes * len(parameters)

    def _count(self, _: Tensor) -> None:
        self._missing -= 1
        if not self._missing:
            self._missing = self._wanted
            self._send()

    def _send(self) -> None:
        """Begin to sum the gradients so far."""
        self._settle()
        flat = torch.cat([*(p.grad.reshape(-1) for p in self._parameters if p.grad is not None), self._padding])
        for p in self._parameters:
            p.grad = None
        part = torch.empty_like(self.shard, requires_grad=False)
        self._received = reduce_scatter(part, flat, self._group, async_op=True), part

    def finish(self) -> None:
        """Have this rank's shard of the gradients ready."""
        if not self._wanted:
            self._send()
        self._settle()

    def _settle(self) -> None:
        """Wait for the sum, and add it to those of earlier micro-batches."""
        if self._received is not None:
            work, part = self._received
            work.wait()
            self._received, gradient = None, part.div_(self._size)
            self.shard.grad = gradient if self.shard.grad is None else self.shard.grad.add_(gradient)

    def gather(self) -> None:
        """Get what the other ranks have updated."""
        all_gather(self._whole, self.shard.detach(), self._group)


def in_buckets(tensors: Sequence[Held], bucket_bytes: float) -> Iterator[list[Held]]:
    """Tensors in buckets of at least so many bytes."""
    bucket: list[Held] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(each.nbytes for each in bucket) >= bucket_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
