"""A training script: ``pair_script.py JOB`` trains one of ``pair_jobs.JOBS`` on all ranks until it is stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from stepsight.experiments.studies.pairs.pair_jobs import DDP, JOBS, PairJob

STEPS = 100_000
UNIT = 20_000  # parameters of the smallest module that is sharded on its own


class Whole(nn.Module):
    """A model whose forward is its loss, as DDP needs it."""

    def __init__(self, model: nn.Module, loss_of: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self) -> Tensor:
        return self.loss_of()


def wrapped(job: PairJob, model: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The loss of a model that is replicated (DDP) or sharded (FSDP2)."""
    if job.wrap == DDP:
        return DistributedDataParallel(Whole(model, loss_of), bucket_cap_mb=job.bucket_mb)
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = narrow if job.bf16 else MixedPrecisionPolicy()
    for layers in [each for each in model.modules() if isinstance(each, (nn.Sequential, nn.ModuleList))][:1]:
        for layer in layers:
            if sum(parameter.numel() for parameter in layer.parameters()) >= UNIT:
                fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return loss_of


def main(name: str) -> None:
    """Train."""
    job = JOBS[name]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, loss_of = job.make()
    loss_of = wrapped(job, model, loss_of)
    optimizer = job.optimizer(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=job.bf16 and job.wrap == DDP):
            loss = loss_of()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
