"""A job of the harness as a script: ``captured_job.py JOB_JSON [--autocast]`` trains its model for a few steps.

With ``--autocast`` the model is that of an fp32 job, and runs under ``torch.autocast`` in bf16.

What the harness itself does not run is added here: experts, context parallelism, and schedules of several chunks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel

from stepsight.dataset.harness.models.parallel import Training
from stepsight.dataset.harness.models.transformer import Stage
from stepsight.experiments.studies.captured_experts import ContextLayer, ExpertLayer

STEPS = 4
CHUNKED = {"interleaved-zb": ScheduleInterleavedZeroBubble, "zbv": ScheduleZBVZeroBubble}


class ExpertTraining(Training):
    """Mixtures of experts: ranks with the same experts shard them or all-reduce their gradients."""

    def _data_parallel(self, mesh: DeviceMesh | None) -> nn.Module:
        p = self.job["parallel"]
        experts = init_device_mesh(self.device.type, (p["dp"] // p["ep"], p["ep"]), mesh_dim_names=("edp", "ep"))
        whole = p["ep"] == dist.get_world_size()  # then a separate group, because rows must not wait for gradients
        group = dist.new_group(group_desc="ep") if whole else experts["ep"].get_group()
        layers = [
            ExpertLayer(self.shape, f"layer{index}", self.job["model"], group) for index in range(self.shape.layers)
        ]
        self.stage.layers = nn.ModuleList(layers)
        if not self.sharded:
            own = [name for name, _ in self.stage.named_parameters() if ".experts." in name]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.stage, own)
            return super()._data_parallel(mesh)
        for layer in layers:
            if p["dp"] > p["ep"]:
                fully_shard(layer.experts, mesh=experts["edp"])
        return super()._data_parallel(mesh)


class ContextTraining(Training):
    """Context parallelism: ranks with parts of a sequence are otherwise replicas."""

    def __init__(self, job: dict[str, Any], device: torch.device) -> None:
        p, model, batch = job["parallel"], job["model"], job["batch"]
        self._context = p["cp"], p["context_parallel"]
        merged = {**p, "dp": p["dp"] * p["cp"], "cp": 1}
        part = {**model, "seq_len": model["seq_len"] // p["cp"]}
        more = {**batch, "global_batch": batch["global_batch"] * p["cp"]}
        super().__init__({**job, "parallel": merged, "model": part, "batch": more}, device)

    def _data_parallel(self, mesh: DeviceMesh | None) -> nn.Module:
        size, how = self._context
        ranks = init_device_mesh(self.device.type, (dist.get_world_size() // size, size), mesh_dim_names=("rest", "cp"))
        group = ranks["cp"].get_group()
        layers = [ContextLayer(self.shape, f"layer{index}", how, group) for index in range(self.shape.layers)]
        self.stage.layers = nn.ModuleList(layers)
        return super()._data_parallel(mesh)


class ChunkedTraining(Training):
    """Schedules in which each rank has several chunks of the model."""

    def _data_parallel(self, mesh: DeviceMesh | None) -> nn.Module:
        p = self.job["parallel"]
        self._total = p["pp"] * p["virtual_stages"]
        loop = [self.stage_index + p["pp"] * chunk for chunk in range(p["virtual_stages"])]
        self._places = [self.stage_index, self._total - 1 - self.stage_index] if p["schedule"] == "zbv" else loop
        self.chunks = [Stage(self.shape, place, self._total) for place in self._places]
        return nn.ModuleList(self.chunks)

    def _schedule(self, num_stages: int) -> Any:
        shape = self.shape
        made: dict[str, Any] = {"device": "meta", "dtype": shape.dtype, "requires_grad": True}
        hidden = torch.empty(shape.rows, shape.hidden, **made)
        logits = torch.empty(shape.micro_batch * shape.seq_len, shape.vocab // shape.size, **made)
        tokens = torch.empty(shape.micro_batch, shape.seq_len, device="meta", dtype=torch.int64)
        stages = [
            PipelineStage(
                chunk,
                place,
                self._total,
                self.device,
                input_args=(tokens if chunk.first else hidden,),
                output_args=(logits if chunk.last else hidden,),
                group=self.groups["pp"],
            )
            for place, chunk in zip(self._places, self.chunks, strict=True)
        ]
        kind: Any = CHUNKED[self.job["parallel"]["schedule"]]
        schedule = kind(stages, self.num_micro_batches, loss_fn=self._loss, scale_grads=False)
        schedule._merge_outputs = lambda chunks: None
        return schedule

    def _pipeline(self, losses: list[Tensor]) -> None:
        assert self.schedule is not None
        first, last = (any(getattr(chunk, end) for chunk in self.chunks) for end in ("first", "last"))
        self.schedule.step(*((self.tokens,) if first else ()), target=self.targets if last else None, losses=[])


def training_of(job: dict[str, Any]) -> type[Training]:
    """What runs a job."""
    if job["model"]["experts"]:
        return ExpertTraining
    if job["parallel"]["cp"] > 1:
        return ContextTraining
    return ChunkedTraining if job["parallel"]["schedule"] in CHUNKED else Training


if __name__ == "__main__":
    dist.init_process_group("gloo")
    asked, autocast = json.loads(sys.argv[1]), sys.argv[2:] == ["--autocast"]
    if autocast:
        asked["batch"]["precision"] = "fp32"
    training = training_of(asked)(asked, torch.device("cpu"))
    if autocast:
        training.model.forward = torch.autocast("cuda", torch.bfloat16)(training.model.forward)
    for _ in range(STEPS):
        training.step()
