"""Predicted peak memory against PyTorch's own count.

The reference is torch's ``MemTracker`` in training steps of the harness in a fake world: tensors are fake and
messages go nowhere, but every storage is made and freed as in a real run.  Plain data parallelism is left out: DDP's
reducer reads data that fake tensors lack.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

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
from stepsight.experiments.studies.study import Row, Study, cases, rows_text
from stepsight.simulator.memory import estimate_memory

_MODEL = ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "tied_embeddings")


def tracked_job(values: Mapping[str, Any]) -> Job:
    """A job of the harness from sizes and changes."""
    merged: Row = {"family": "gpt", "tp": 1, "pp": 1, "dp": 1, "micro_batches": 1, **values}
    micro, many = merged.pop("micro_batch"), merged.pop("micro_batches")
    model = {key: merged.pop(key) for key in _MODEL if key in merged}
    precision = merged.pop("precision", "fp32")
    devices = merged["tp"] * merged["pp"] * merged["dp"]
    return Job.from_dict(
        {
            "model": model,
            "parallel": merged,
            "batch": {"micro_batch": micro, "global_batch": micro * many * merged["dp"], "precision": precision},
            "cluster": {"hardware": "local-cpu", "devices_per_node": devices, "fabric": "loopback"},
        }
    )


def tracked_row(job: Job, rank: int = 0) -> Row:
    """One rank of a job, tracked and estimated."""
    p = job.parallel
    stage = estimate_memory(job, HARDWARE["local-cpu"]).stages[rank // (p.tp * p.dp)]
    name = job.name + (f" {p.recompute}" if p.recompute != "none" else "") + (f" rank {rank}" if rank else "")
    truth = tracked_peak(job, rank)
    return {"name": name, "truth_bytes": truth, "estimate_bytes": stage.tensors, "error": stage.tensors / truth - 1}


class _Tracker(MemTracker):
    """Only storages: statistics of modules allow one micro-batch."""

    _ignored: Any = lambda *_: None
    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _ignored


def tracked_peak(job: Job, rank: int = 0) -> int:
    """Bytes of all tensors of a rank at the peak of its second step.

    Raises:
        JobError: If the fake world cannot run it.
    """
    p, device = job.parallel, torch.device("cpu")
    ranks, sharded = p.tp * p.pp * p.dp, p.zero_stage == 3 and p.dp > 1
    if p.dp > 1 and p.pp == 1 and not sharded:
        raise JobError("DDP does not run on fake tensors: dp > 1 needs zero_stage 3 or pp > 1")
    if job.batch.precision == "bf16" and not sharded:
        raise JobError("mixed precision is FSDP2's here: bf16 needs zero_stage 3 and dp > 1")
    with ExitStack() as stack:
        if ranks > 1:
            stack.enter_context(_fake_world(ranks, rank))
            parallel.device_mesh("cpu", pp=p.pp, dp=p.dp, tp=p.tp)  # with real numbers, before all tensors are fake
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
    parallel.device_mesh.cache_clear()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with mock.patch.object(pipelines._PipelineSchedule, "_warmup_p2p", _agree_on_static_shapes):
            yield
    finally:
        dist.destroy_process_group()
        parallel.device_mesh.cache_clear()


def _agree_on_static_shapes(_: object, stages: list[object], *__: object) -> None:
    """Stages exchange messages about whether their shapes are static; they are."""
    for stage in stages:
        stage._inference_mode = stages_of_pipelines.InferenceMode.STATIC  # type: ignore[attr-defined]


def run(options: argparse.Namespace) -> tuple[Any, str]:
    """Track every size with every strategy."""
    tried, rows = cases("memory"), list[Row]()
    for size in tried["sizes"]:
        for way in tried["ways"]:
            change = {key: value for key, value in way.items() if key != "rank"}
            rows.append(tracked_row(tracked_job({**size, **change}), way["rank"]))
    errors = [row["error"] for row in rows]
    sizes = list(map(abs, errors))
    median, worst, bias = statistics.median(sizes), max(sizes), statistics.median(errors)
    shown = [
        {"name": row["name"], "truth": row["truth_bytes"] / 1e9, "estimate": row["estimate_bytes"] / 1e9,
         "percent": 100 * row["error"]}
        for row in rows
    ]  # fmt: skip
    columns = {"job": "name", "MemTracker GB": "truth", "estimate GB": "estimate", "error %": "percent"}
    told = f"{len(rows)} jobs: median error {100 * median:.1f} %, worst {100 * worst:.1f} %, bias {100 * bias:.1f} %"
    summary = {"rows": len(rows), "median": median, "worst": worst, "bias": bias}
    return {"summary": summary, "rows": rows}, f"{rows_text(shown, columns, 3)}\n\n{told}"


STUDY = Study(
    "memory",
    "Compare predicted peak memory with PyTorch's own count of every tensor, in training steps of the harness on fake "
    "tensors.",
    run,
)
