"""Jobs and hardware for simulator tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec

JobMaker = Callable[..., Job]


@pytest.fixture(scope="session")
def gpu() -> Hardware:
    return Hardware(
        name="toy-gpu",
        kind="gpu",
        peak_flops={"fp32": 20e12, "bf16": 300e12, "fp16": 300e12},
        memory_bandwidth_bytes_per_s=2e12,
        memory_bytes=80e9,
        op_latency_s=2e-6,
        comm_compute_share=0.1,
    )


@pytest.fixture(scope="session")
def cpu() -> Hardware:
    return Hardware(
        name="toy-cpu",
        kind="cpu",
        peak_flops={"fp32": 80e9},
        memory_bandwidth_bytes_per_s=10e9,
        memory_bytes=8e9,
        op_latency_s=5e-6,
        comm_compute_share=0.5,
    )


@pytest.fixture(scope="session")
def make_job() -> JobMaker:
    """Makes jobs of a small model: parallel fields by name, the rest by prefix ``model_`` or as listed."""

    def make(
        *,
        micro_batch: int = 1,
        micro_batches: int = 4,
        precision: str = "fp32",
        devices_per_node: int = 8,
        fabric: Any = "dgx-a100",
        model: dict[str, Any] | None = None,
        **parallel: Any,
    ) -> Job:
        spec = ParallelSpec(**{"dp": 1, **parallel})
        devices = spec.tp * spec.cp * spec.pp * spec.dp
        nodes = max(1, devices // devices_per_node)
        sizes: dict[str, Any] = {"family": "gpt", "layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 32}
        return Job(
            model=ModelSpec(**{**sizes, **(model or {})}),
            parallel=spec,
            batch=BatchSpec(
                micro_batch=micro_batch, global_batch=micro_batch * micro_batches * spec.dp, precision=precision
            ),
            cluster=ClusterSpec(
                hardware="toy", nodes=nodes, devices_per_node=min(devices, devices_per_node), fabric=fabric
            ),
        )

    return make
