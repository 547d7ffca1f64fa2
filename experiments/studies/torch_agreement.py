"""Jobs against PyTorch itself: predicted peak memory, and programs captured from scripts.

The reference of memory is torch's ``MemTracker`` in training steps of the harness in a fake world: tensors are fake and
messages go nowhere, but every storage is made and freed as in a real run.  Plain data parallelism is left out: DDP's
reducer reads data that fake tensors lack.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
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

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.capture.captured import collective_counts, compute_flops
from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.harness.models import parallel
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective
from stepsight.experiments.reports.text_table import Column, table_of
from stepsight.experiments.studies.study import Row, Study, cases, figures_text
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.programs.lower import Lowered
from stepsight.simulator.replay.captured_step import time_captured
from stepsight.training.prediction.prediction import asked_predictor

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


SCRIPT = Path(__file__).with_name("trained_job.py")
CAPTURED_ON = "h100-sxm-80gb"
Counts = Counter[tuple[str, int, int]]  # by kind, bytes and group size


def strategies() -> dict[str, Row]:
    """Sizes and degrees of every strategy, by name."""
    found = cases("capture")
    models: dict[str, Row] = found["models"]
    return {name: {**models[re.split("[ ,]", name)[0]], **own} for name, own in found["strategies"].items()}


def captured_job(values: Mapping[str, Any]) -> Job:
    """A job from sizes and degrees."""
    values = {"precision": "pure-bf16", **{key: value for key, value in values.items() if key != "autocast"}}
    ranks = math.prod(values.get(key, 1) for key in ("tp", "pp", "dp"))
    if values.get("pp", 1) > 1:  # as the harness runs pipelines: torch's runtime, gradients reduced after the schedule
        values |= {"runtime": "torch", "overlap_grad_reduce": False}
    cluster = {"hardware": CAPTURED_ON, "nodes": -(-ranks // 8), "devices_per_node": min(ranks, 8)}
    return tracked_job(values, cluster=cluster, execution={"engine": "eager-pytorch"})


def lowered_counts(lowered: Lowered, stage: int) -> tuple[Counts, float]:
    """Collectives and FLOP of one rank of a stage."""
    found: Counts = Counter()
    flops, track = 0.0, lowered.track
    for index in [*lowered.segment[track.stage == stage].tolist(), int(lowered.optimizer[stage])]:
        segment = lowered.segments[index]
        flops += segment.flops
        for node, lost in zip(segment.program.nodes, segment.graph.taken, strict=True):
            if isinstance(node.work, Collective) and not lost:
                both = 2 if node.work.kind == "send_recv" else 1  # a rank of a ring sends one and receives one
                found[node.work.kind, node.work.num_bytes, node.work.group_size] += both
    for message, source, target in zip(lowered.message, track.source, track.target, strict=True):
        if stage in (track.stage[source], track.stage[target]):
            work = lowered.messages[message]
            found[work.kind, work.num_bytes, work.group_size] += 1
    return found, flops


def compare(name: str, values: Mapping[str, Any]) -> Row:
    """One strategy, lowered and captured."""
    job = captured_job(values)
    predictor = asked_predictor(job.cluster.hardware, None)
    assert predictor is not None
    latency = predictor.latency(job)
    simulation = simulate(job, latency)
    words = (json.dumps(job.to_dict()), *(["--autocast"] if values.get("autocast") else []))
    asked = CaptureRequest(SCRIPT, words, job.cluster.num_devices, job.cluster.devices_per_node)
    captured = capture(asked)
    step = time_captured(captured.graphs, latency)
    differences, flops, collectives = [], [], 0
    for graph in captured.graphs:
        stage = graph.rank // (job.cluster.num_devices // job.parallel.pp)
        mine, lowered_flops = lowered_counts(simulation.lowered, stage)
        theirs: Counts = Counter()
        for row in collective_counts(graph):
            theirs[row["kind"], row["num_bytes"], row["group_size"]] += row["count"]
        flops.append(abs(lowered_flops / compute_flops(graph) - 1.0))
        collectives += int(theirs.total())
        differences += [
            {"stage": stage, "kind": key[0], "num_bytes": key[1], "group_size": key[2], "lowered": mine[key],
             "captured": theirs[key]}
            for key in sorted(mine.keys() | theirs.keys())
            if mine[key] != theirs[key]
        ]  # fmt: skip
    return {
        "strategy": name,
        "ranks": job.cluster.num_devices,
        "captured_ranks": len(captured.graphs),
        "collectives": collectives,
        "differences": differences,
        "flops_off_percent": 100.0 * max(flops),
        "lowered_s": simulation.iteration_time_s,
        "captured_s": step.iteration_time_s,
        "time_off_percent": 100.0 * (simulation.iteration_time_s / step.iteration_time_s - 1.0),
        "breakdowns": [simulation.breakdown, step.breakdown],
    }


def run_capture(options: argparse.Namespace) -> tuple[Any, str]:
    """All strategies whose names match."""
    rows = []
    for name, values in strategies().items():
        if fnmatch.fnmatch(name, options.only):
            print(f"capturing {name}", file=sys.stderr)
            rows.append(compare(name, values))
    if not rows:
        raise StepsightError(f"--only must match one of {', '.join(strategies())}, got {options.only!r:.80}")
    keys = ("strategy", "ranks", "collectives")
    columns: dict[str, str | Column] = {key: key for key in keys}
    columns["differ"] = lambda row: len(row["differences"])
    columns |= {"FLOP off, %": "flops_off_percent", "job ms": "lowered_s", "script ms": "captured_s"}
    off = [abs(row["time_off_percent"]) for row in rows]
    told = figures_text({"mean time off, %": float(np.mean(off)), "most": max(off), "strategies": len(rows)})
    return {"rows": rows}, f"{table_of(rows, {**columns, 'time off, %': 'time_off_percent'}, 2)}\n\n{told}"


_ONLY = {"--only": {"default": "*", "help": "strategies whose names match, as '*fsdp*'"}}
CAPTURE = Study("capture", cases("about")["capture"], run_capture, _ONLY)
