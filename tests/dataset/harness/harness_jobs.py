"""Tiny jobs and plans for the harness's tests, and what one rank of a parallel test runs.

As a script (see ``run_ranks``): train every job of a JSON list for three steps of plain SGD and let rank 0 write each
job's losses.  SGD, unlike Adam, notices a gradient that is wrong by a factor.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MODEL = {
    "name": "",
    "family": "gpt",
    "layers": 3,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 32,
    "vocab": 32,
    "seq_len": 8,
    "gated_mlp": False,
    "tied_embeddings": False,
}
LLAMA = {"family": "llama", "kv_heads": 2, "gated_mlp": True}
MIXTURE = {**LLAMA, "layers": 2, "experts": 4, "experts_per_token": 2, "expert_ffn": 16, "capacity_factor": 1.0}
T5 = {"family": "t5", "layers": 2, "encoder_layers": 2, "encoder_seq_len": 12, "fused_attention": False}
PARALLEL = {
    "tp": 1,
    "pp": 1,
    "dp": 1,
    "sequence_parallel": False,
    "zero_stage": 0,
    "schedule": "1f1b",
    "virtual_stages": 1,
    "recompute": "none",
    "bucket_mbytes": 25.0,
}


def job(model: dict[str, Any] | None = None, micro_batch: int = 2, **parallel: Any) -> dict[str, Any]:
    """A job of eight sequences."""
    degrees = {**PARALLEL, **parallel}
    ranks = degrees["tp"] * degrees["pp"] * degrees["dp"] * degrees.get("cp", 1)
    return {
        "model": {**MODEL, **(model or {})},
        "parallel": degrees,
        "batch": {"micro_batch": micro_batch, "global_batch": 8, "precision": "fp32"},
        "cluster": {"hardware": "local-cpu", "nodes": 1, "devices_per_node": ranks, "fabric": "loopback"},
    }


def run(name: str, job: dict[str, Any], **options: int) -> dict[str, Any]:
    return {
        "name": name,
        "role": "train",
        "job": job,
        "rounds": 2,
        "steps": 2,
        "warmup": 2,
        "profile_steps": 2,
        **options,
    }


def plan(runs: list[dict[str, Any]], events: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"schema": 1, "runs": runs, "events": events or []}


def run_ranks(arguments: list[str], ranks: int, folder: Path) -> tuple[int, str]:
    """Run this file with arguments as so many ranks; exit code and output."""
    from stepsight.dataset.harness.running.workers import WORKER_ENVIRONMENT, Workers, meeting_file, places

    with meeting_file(folder) as meeting:
        common = {**os.environ, **WORKER_ENVIRONMENT, **meeting}
        workers = Workers([sys.executable, __file__, *arguments], [{**common, **place} for place in places(ranks)])
        try:
            output = "".join(workers.lines())
        finally:
            workers.close()
    return workers.code, output


def losses(job: dict[str, Any]) -> list[float]:
    """Mean loss of each of three SGD steps over the whole batch (on every rank)."""
    import torch

    from stepsight.dataset.harness.base.collective_calls import gather
    from stepsight.dataset.harness.models.parallel import Training

    training = Training(job, torch.device("cpu"))
    training.optimizer = torch.optim.SGD(training.updated, lr=2.0)
    own = [float(training.step()) for _ in range(3)]
    known = [each for each in gather(own if training.last else None) if each is not None]
    return [sum(column) / len(known) for column in zip(*known, strict=True)]


def main() -> None:
    import torch
    import torch.distributed as dist

    from stepsight.dataset.harness.running.worker import leave
    from stepsight.dataset.harness.running.workers import join

    def refuse(*_: Any) -> None:
        raise AssertionError("a rank unpickled what another one sent")

    torch.set_num_threads(1)
    dist.distributed_c10d._tensor_to_object = refuse
    join("gloo")
    found = [losses(each) for each in json.loads(Path(sys.argv[1]).read_text("utf-8"))]
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(found), "utf-8")
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
