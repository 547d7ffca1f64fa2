"""Train recommendation models on CPU ranks, a step of each job in turn.

    torchrun --nproc-per-node 2 train_dlrm.py JOB.toml...
    torchrun --nproc-per-node 2 train_dlrm.py PART PART...   # only exchanges of unequal parts: elements of each rank

Tables are whole, split by columns, or replicated, as the job's `[sharding]` says.  FBGEMM (fbgemm-gpu-cpu 1.8) looks
rows up, and its backward steps row-wise Adagrad.  Sums travel while the bottom MLP runs.  Threads that communicate go
before those that compute, where the system allows that.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

import stepsight
from stepsight.dataset.job.sharding import placements_of


class _Begin(torch.autograd.Function):
    """Begin an exchange of sums; its gradients have arrived when its backward runs."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, state: dict[str, Any]) -> Tensor:
        ctx.state = state
        out = sums.new_empty(sum(state["received"]))
        state["work"] = dist.all_to_all_single(out, sums.reshape(-1), state["received"], state["sent"], async_op=True)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        ctx.state["work"].wait()
        return ctx.state["grads"].view(ctx.state["shape"]), None


class _End(torch.autograd.Function):
    """Wait for the sums; its backward begins the exchange of their gradients."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, state: dict[str, Any]) -> Tensor:
        ctx.state = state
        state["work"].wait()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        state = ctx.state
        state["grads"] = grads[0].new_empty(sum(state["sent"]))
        state["work"] = dist.all_to_all_single(
            state["grads"], grads[0].contiguous(), state["sent"], state["received"], async_op=True
        )
        return grads[0], None


class Cross(nn.Module):
    """A cross layer of low rank: ``x0 * (U (V x) + b) + x``."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.v, self.u = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return first * self.u(self.v(x)) + x


def mlp(width: int, sizes: tuple[int, ...], *, ends: bool = False) -> nn.Sequential:
    parts: list[nn.Module] = []
    for size in sizes:
        parts += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*parts[: -1 if ends else None])


class Trained:
    """One job: its tables on this rank, its dense part, and batches."""

    def __init__(self, job: stepsight.Job) -> None:
        model, self.job, self.rank, self.world = job.model, job, dist.get_rank(), dist.get_world_size()
        self.samples = job.batch.micro_batch
        places = list(zip(model.tables, placements_of(model.tables, job.sharding, job.table_ranks), strict=True))
        self.shares = [
            [(table, len(place.ranks)) for table, place in places for own in place.ranks if own == rank]
            for rank in range(self.world)
        ]
        self.copies = [table for table, place in places if not place.ranks]
        own, on_cpu = self.shares[self.rank], (EmbeddingLocation.HOST, ComputeDevice.CPU)
        sizes = [(table.rows, table.dim // shards, *on_cpu) for table, shards in own]
        adagrad = EmbOptimType.EXACT_ROWWISE_ADAGRAD
        self.look = SplitTableBatchedEmbeddingBagsCodegen(sizes, optimizer=adagrad, learning_rate=0.01) if own else None
        counts = [int(table.pooling) for table, _ in own for _ in range(self.samples * self.world)]
        self.offsets = torch.tensor([0, *counts]).cumsum(0)
        self.replicas = nn.ModuleList([nn.EmbeddingBag(table.rows, table.dim, mode="sum") for table in self.copies])
        widths = [sum(-(-table.dim // shards) for table, shards in share) for share in self.shares]
        self.sent, self.received = [self.samples * widths[self.rank]] * self.world, [self.samples * w for w in widths]
        width = sum(widths) + sum(table.dim for table in self.copies) + model.bottom_mlp[-1]
        self.bottom = mlp(model.dense_features, model.bottom_mlp)
        self.cross = nn.ModuleList([Cross(width, model.cross_rank) for _ in range(model.cross_layers)])
        self.top = mlp(width, model.top_mlp, ends=True)
        self.dense = nn.ModuleList([self.bottom, self.cross, self.top, self.replicas])
        self.model = nn.parallel.DistributedDataParallel(_Whole(self))
        self.optimizer = torch.optim.SGD(self.dense.parameters(), lr=1e-3)
        self.batches = [self.batch() for _ in range(4)]

    def batch(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Indices of this rank's samples, table by table as ranks have them, its numbers and its labels."""
        shares = [*self.shares, [(table, 1) for table in self.copies]]
        ids = [
            torch.cat([drawn(table, self.samples) for table, _ in share] or [torch.empty(0, dtype=torch.long)])
            for share in shares
        ]
        return ids, torch.randn(self.samples, self.job.model.dense_features), torch.rand(self.samples, 1).round()

    def step(self, turn: int) -> None:
        ids, numbers, labels = self.batches[turn % len(self.batches)]
        loss = F.binary_cross_entropy_with_logits(self.model(ids, numbers), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Whole(nn.Module):
    def __init__(self, own: Trained) -> None:
        super().__init__()
        self.dense, self.own = own.dense, [own]

    def forward(self, ids: list[Tensor], numbers: Tensor) -> Tensor:
        own = self.own[0]
        share = own.shares[own.rank]
        each = [int(own.samples * table.pooling) for table, _ in share]
        sizes = [len(part) for part in ids[: own.world]]
        received = torch.empty(sum(each) * own.world, dtype=torch.long)
        dist.all_to_all_single(received, torch.cat(ids[: own.world]), [sum(each)] * own.world, sizes)
        parts = [rank.split(each) for rank in received.split(sum(each))] if each else []
        rows = [torch.cat([part[at] for part in parts]) for at in range(len(each))]
        state: dict[str, Any] = {"sent": own.sent, "received": own.received}
        if own.look is not None:
            sums = own.look(torch.cat(rows), own.offsets)
        else:
            sums = torch.zeros(own.samples * own.world, 0, requires_grad=True)
        state["shape"] = sums.shape
        sent = _Begin.apply(sums, state)
        copies = ids[own.world].split([int(own.samples * table.pooling) for table in own.copies])
        pieces = [table(ids.view(own.samples, -1)) for ids, table in zip(copies, own.replicas, strict=True)]
        pieces.append(own.bottom(numbers))
        arrived = _End.apply(sent, state)
        x = first = torch.cat([part.view(own.samples, -1) for part in arrived.split(own.received)] + pieces, 1)
        for layer in own.cross:
            x = layer(first, x)
        return own.top(x)


def drawn(table: Any, samples: int) -> Tensor:
    count, rows = int(samples * table.pooling), torch.arange(1, table.rows + 1, dtype=torch.double)
    return torch.randperm(table.rows)[torch.multinomial(rows**-table.zipf, count, replacement=True)]


def exchange_of(parts: list[int]) -> Callable[[int], Any]:
    """What exchanges sums of which each rank sends its own number of elements to every rank."""
    own = [parts[dist.get_rank()]] * len(parts)
    sent, received = torch.zeros(sum(own)), torch.empty(sum(parts))
    return lambda turn: dist.all_to_all_single(received, sent, parts, own)


def hurry_communication() -> None:
    """Run all other threads in real time: with a rank on each core, those of gloo would wait for a slice of its time,
    which is up to 3 ms.
    """
    with suppress(OSError):  # not Linux, or not allowed
        for thread in {int(task.name) for task in Path("/proc/self/task").iterdir()} - {threading.get_native_id()}:
            os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    if sys.argv[1].isdigit():
        ranks = zip(*[map(int, sys.argv[1:])] * dist.get_world_size(), strict=True)
        steps = [exchange_of(list(parts)) for parts in ranks]
    else:
        steps = [Trained(stepsight.Job.from_file(path)).step for path in sys.argv[1:]]
    hurry_communication()
    for turn in count():
        for step in steps:
            step(turn)
            stepsight.step()


if __name__ == "__main__":
    main()
