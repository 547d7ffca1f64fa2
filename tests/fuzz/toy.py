"""A small predictor, job and study that fuzzing targets ask about."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from stepsight.dataset.hardware.hardware import Hardware, find_fabric
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.experiments.search.search import search
from stepsight.training.collectives.collective_models import fit_collectives
from stepsight.training.corrections.calibration import Calibration
from stepsight.training.corrections.intervals import Intervals
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.predictor.predictor import Predictor

HARDWARE = Hardware(
    name="toy",
    kind="gpu",
    peak_flops={"fp32": 20e12, "bf16": 300e12, "fp16": 300e12, "fp8": 600e12},
    memory_bandwidth_bytes_per_s=2e12,
    memory_bytes=80e9,
    op_latency_s=3e-6,
    host_op_s=4e-6,
    host_kinds_s={"linear": 5e-6},
)
SEARCHED = "study"


@cache
def toy_predictor() -> Predictor:
    """Learned from made-up times: two kinds with trees, collectives of one node, calibrated intervals."""
    sizes = [(m, n, k) for m in (128, 512, 2048) for n in (256, 1024, 4096) for k in (256, 1024, 4096)]
    ops = [Op(kind, dims, "bf16") for kind in ("linear", "linear_dgrad") for dims in sizes]
    ops += [Op("gelu", (m * n,), "bf16") for m, n, _ in sizes]
    ops = list(dict.fromkeys(ops))
    rng = np.random.default_rng(0)
    seconds = np.array([8e-6 + op.flops / 2e14 + op.num_bytes / 1.5e12 for op in ops]) * np.exp(
        rng.normal(0, 0.1, len(ops))
    )
    kernel = fit_kernels(ops, 1, seconds, HARDWARE)
    collectives = [Collective("all_reduce", 2**power, 2, 2) for power in range(8, 24)]
    times = np.array([2e-5 + c.num_bytes / 1e11 for c in collectives])
    collective = fit_collectives(collectives, [find_fabric("dgx-a100")] * len(collectives), times)
    return Predictor(
        HARDWARE,
        replace(kernel, derives=True),
        collective,
        calibration=Calibration(1.05),
        intervals=Intervals(0.2, 0.9, 10),
    )


@cache
def toy_job() -> Job:
    """Tensor and data parallel on one node, for the toy predictor."""
    return Job(
        model=ModelSpec(family="gpt", layers=4, hidden=256, heads=8, vocab=1024, seq_len=256),
        parallel=ParallelSpec(tp=2, dp=2),
        batch=BatchSpec(micro_batch=2, global_batch=8, precision="bf16"),
        cluster=ClusterSpec(hardware="toy", devices_per_node=4, fabric="dgx-a100"),
    )


def search_journal() -> bytes:
    """The journal of a small study, as ``search --storage`` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.log"
        search(toy_job(), toy_predictor(), storage=str(path), study_name=SEARCHED, trials=4)
        return path.read_bytes()
