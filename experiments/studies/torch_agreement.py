"""Predicted peak memory of jobs against PyTorch itself.

The reference of memory is torch's ``MemTracker`` in training steps of the harness in a fake world: tensors are fake and
messages go nowhere, but every storage is made and freed as in a real run.  Plain data parallelism is left out: DDP's
reducer reads data that fake tensors lack.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.pipelining import schedules as pipelines
from torch.distributed.pipelining import stage as stages_of_pipelines
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.harness.models import parallel
from stepsight.dataset.job.job import Job
from stepsight.experiments.reports.text_table import Column, table_of
from stepsight.experiments.studies.study import Row, Study, cases, figures_text
from stepsight.simulator.memory import estimate_memory

_MODEL = ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "tied_embeddings",
          "experts", "experts_per_token", "expert_ffn", "capacity_factor")  # fmt: skip


def tracked_job(values: Mapping[str, Any], **tables: Row) -> Job:
    """A job of the harness from sizes and changes; other tables of it as they are stated."""
    merged: Row = {"tp": 1, "pp": 1, "dp": 1, "micro_batch": 1, "micro_batches": 1, "precision": "fp32", **values}
    model: Row = {"family": "gpt", **{key: merged.pop(key) for key in _MODEL if key in merged}}
    batch: Row = {key: merged.pop(key) for key in ("micro_batch", "precision")}
    batch["global_batch"] = batch["micro_batch"] * merged.pop("micro_batches") * merged["dp"]
    devices = merged["tp"] * merged["pp"] * merged["dp"] * merged.get("cp", 1)
    cluster = {"hardware": "local-cpu", "devices_per_node": devices, "fabric": "loopback"}
    return Job.from_dict({"model": model, "parallel": merged, "batch": batch, "cluster": cluster, **tables})


def tracked_row(job: Job, rank: int = 0) -> Row:
    """One rank of a job, tracked and estimated."""
    p = job.parallel
    stage = estimate_memory(job, HARDWARE["local-cpu"]).stages[rank // (p.tp * p.cp * p.dp)]
    name = job.name + (f" {p.recompute}" if p.recompute != "none" else "") + (f" rank {rank}" if rank else "")
    truth = tracked_peak(job, rank)
    return {"name": name, "truth_bytes": truth, "estimate_bytes": stage.tensors, "error": stage.tensors / truth - 1}


class _Tracker(MemTracker):
    """Only storages: statistics of modules allow one micro-batch."""

    _ignored: Any = lambda *_: None
    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _ignored


def tracked_peak(job: Job, rank: int = 0) -> int:
    """Bytes of all tensors of a rank at the peak of its second step."""
    p, device = job.parallel, torch.device("cpu")
    ranks, replicas = job.cluster.num_devices, p.dp * p.cp
    sharded = p.zero_stage == 3 and replicas > 1
    if replicas > 1 and p.pp == 1 and not sharded:
        raise JobError("DDP does not run on fake tensors: dp > 1 needs zero_stage 3 or pp > 1")
    if job.batch.precision == "bf16" and not sharded:
        raise JobError("mixed precision is FSDP2's here: bf16 needs zero_stage 3 and dp > 1")
    with ExitStack() as stack:
        if ranks > 1:
            stack.enter_context(_fake_world(ranks, rank))
            degrees = {"pp": p.pp, "dp": replicas, "tp": p.tp}
            parallel.device_mesh("cpu", **degrees)  # with real numbers, before all tensors are fake
            for axis, size in (("cp", p.cp), ("ep", p.ep)):
                if size > 1:
                    parallel.own_group("cpu", axis, size, **degrees)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        training, tracker = parallel.Training(job.to_dict(), device), _Tracker()
        tracker.track_external(training.model, training.optimizer, training.tokens, training.targets)
        with tracker:
            training.step()
            tracker._peak_mem = dict.fromkeys(tracker._peak_mem, 0)
            training.step()
        return int(tracker.get_tracker_snapshot("peak")[device]["Total"])


@contextmanager
def _fake_world(size: int, rank: int) -> Iterator[None]:
    parallel.end_groups(None)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with mock.patch.object(pipelines._PipelineSchedule, "_warmup_p2p", _agree_on_static_shapes):
            yield
    finally:
        parallel.end_groups(None)
        dist.destroy_process_group()


def _agree_on_static_shapes(_: object, stages: list[object], *__: object) -> None:
    """Stages exchange messages about whether their shapes are static; they are."""
    for stage in stages:
        stage._inference_mode = stages_of_pipelines.InferenceMode.STATIC  # type: ignore[attr-defined]


def run_memory(options: argparse.Namespace) -> tuple[Any, str]:
    """Track every size with every strategy."""
    tried, rows = cases("memory"), list[Row]()
    for size in tried["sizes"]:
        for way in tried["ways"]:
            change = {key: value for key, value in way.items() if key != "rank"}
            rows.append(tracked_row(tracked_job({**size, **change}), way["rank"]))
    errors = np.array([row["error"] for row in rows])
    summary = {"median": float(np.median(np.abs(errors))), "worst": float(np.abs(errors).max())}
    summary |= {"rows": len(rows), "bias": float(np.median(errors))}
    columns: dict[str, str | Column] = {
        "job": "name",
        "MemTracker GB": lambda row: row["truth_bytes"] / 1e9,
        "estimate GB": lambda row: row["estimate_bytes"] / 1e9,
        "error %": lambda row: 100 * row["error"],
    }
    return {"summary": summary, "rows": rows}, f"{table_of(rows, columns, 3)}\n\n{figures_text(summary)}"


MEMORY = Study("memory", cases("about")["memory"], run_memory)
