"""Train recommendation models with torchrec on CPU ranks, a step of each job in turn.

    torchrun --nproc-per-node 2 train_torchrec.py JOB.toml...
    torchrun --nproc-per-node 2 train_torchrec.py --sleep JOB.toml...

``DistributedModelParallel`` of torchrec 1.8 shards the tables as the job's `[sharding]` says, DDP has the dense part,
and ``TrainPipelineSparseDist`` sends the indices of the next batch beside this one.  With ``--sleep`` each rank
measures its lookups and its dense part once, forward and backward, while the others wait, and sleeps as long from then
on: so more ranks than cores can train, as in a cluster in a box.
"""

from __future__ import annotations

import copy
import fcntl
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from train_dlrm import Cross, drawn, mlp

with warnings.catch_warnings(action="ignore"):
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    from torchrec.streamable import Pipelineable

import stepsight
from stepsight.dataset.job.sharding import placements_of, table_names
from stepsight.dataset.job.sharding_plans import plan_tables
from stepsight.experiments.search.sharding import torchrec_plan

_MEASURED = 5  # calls of which the shortest is slept


class Batch(Pipelineable):
    """Numbers, indices and labels of a rank's samples."""

    def __init__(self, numbers: Tensor, indices: KeyedJaggedTensor, labels: Tensor) -> None:
        self.numbers, self.indices, self.labels = numbers, indices, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self

    def record_stream(self, stream: Any) -> None:
        pass


class Top(nn.Module):
    """Cross layers and the top MLP."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        width = sum(table.dim for table in model.tables) + model.bottom_mlp[-1]
        self.cross = nn.ModuleList([Cross(width, model.cross_rank) for _ in range(model.cross_layers)])
        self.mlp = mlp(width, model.top_mlp, ends=True)

    def forward(self, first: Tensor) -> Tensor:
        x = first
        for layer in self.cross:
            x = layer(first, x)
        out: Tensor = self.mlp(x)
        return out


class Model(nn.Module):
    """Tables, the bottom MLP beside them, and what follows; returns the loss and what it is of."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(num_embeddings=table.rows, embedding_dim=table.dim, name=name, feature_names=[name])
            for name, table in zip(names, model.tables, strict=True)
        ]
        self.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
        self.bottom, self.top = mlp(model.dense_features, model.bottom_mlp), Top(model)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        sums = self.tables(batch.indices)
        out = self.top(torch.cat([self.bottom(batch.numbers), sums.values()], 1))
        return F.binary_cross_entropy_with_logits(out, batch.labels), out.detach()


class _Slept(torch.autograd.Function):
    """Sleeps instead of computation, forward and backward; gradients are zero."""

    @staticmethod
    def forward(ctx: Any, size: torch.Size, seconds: list[float], *tensors: Tensor) -> Tensor:
        ctx.seconds, ctx.save = seconds[1], tensors
        time.sleep(seconds[0])
        return torch.zeros(size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        time.sleep(ctx.seconds)
        return None, None, *(torch.zeros_like(one) if one.requires_grad else None for one in ctx.save)


def sleep_instead(module: nn.Module, *, lookups: bool) -> None:
    """Replace a module's computation by sleeps as long as the shortest of its first calls, made by a rank at a time."""
    plain = module.forward if lookups else copy.deepcopy(module)  # whose gradients DDP does not see
    own = [torch.zeros(1, requires_grad=True)] if lookups else list(module.parameters())

    def measured(*args: Any, **named: Any) -> Any:
        seconds = list[tuple[float, float]]()
        with Path(__file__).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            given = args if lookups else [one.detach().requires_grad_() for one in args]
            for _ in range(_MEASURED):
                begin = time.perf_counter()
                out = plain(*given, **named)
                middle = time.perf_counter()
                out.backward(torch.ones_like(out))
                seconds.append((middle - begin, time.perf_counter() - middle))
        size, least = out.shape, [min(each) for each in zip(*seconds, strict=True)]
        print("slept:", dist.get_rank(), type(module).__name__, *least, flush=True)
        module.forward = lambda *args, **_: _Slept.apply(size, least, *own, *(() if lookups else args))
        return module(*args, **named)

    module.forward = measured


def trained(job: stepsight.Job, *, sleeps: bool) -> Callable[[], Any]:
    """What takes one step of a job."""
    names = table_names(job.model.tables)
    places = placements_of(job.model.tables, job.sharding, job.table_ranks)
    plan = plan_tables(job.model.tables, places, job.table_ranks, "tables")
    sharder: Any = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    )
    whole = Model(job.model, names)
    for module in (whole.bottom, whole.top) if sleeps else ():
        sleep_instead(module, lookups=False)
    model = DistributedModelParallel(
        whole, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"),
        torchrec_plan(plan, "cpu"), [sharder],
    )  # fmt: skip
    held = [own for module in model.modules() for own in getattr(module, "_lookups", ())]  # which it does not register
    for module in {own for each in held for own in each.modules()} if sleeps else ():
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
            sleep_instead(module, lookups=True)
    dense = {
        name: own for name, own in model.named_parameters() if "tables" not in name or "embedding_bags" not in name
    }
    optimizer = KeyedOptimizerWrapper(dense, lambda own: torch.optim.SGD(own, lr=1e-3))
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    batches = cycle([_batch(job, names) for _ in range(4)])
    return lambda: pipeline.progress(batches)


def _batch(job: stepsight.Job, names: list[str]) -> Batch:
    samples, tables = job.batch.micro_batch, job.model.tables
    lengths = torch.tensor([int(table.pooling) for table in tables for _ in range(samples)], dtype=torch.int32)
    indices = KeyedJaggedTensor(names, torch.cat([drawn(table, samples) for table in tables]), lengths=lengths)
    labels = torch.rand(samples, 1).round()
    return Batch(torch.randn(samples, job.model.dense_features), indices, labels)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    sleeps = sys.argv[1] == "--sleep"
    jobs: Iterator[stepsight.Job] = map(stepsight.Job.from_file, sys.argv[1 + sleeps :])
    steps = [trained(job, sleeps=sleeps) for job in jobs]
    for _ in count():
        for step in steps:
            step()
            stepsight.step()


if __name__ == "__main__":
    main()
