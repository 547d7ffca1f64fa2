"""A GPU that was measured elsewhere: collections as the harness brings them back, with times that are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware, roofline_seconds
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.one_gpu_plans import STAND_IN, Study, make_study
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.memory import estimate_memory
from stepsight.training.measured.planning import stand_in_seconds

H200 = "h200-sxm-141gb"
RUNS_LEFT = {"train": 3, "heldout": 3, STAND_IN: 3}  # so few that none is held back
LIBRARIES = 67e6  # bytes of workspaces
OPS_LEFT = 20  # every twentieth op is measured: enough to learn what a roofline takes


def truth(op: Op) -> float:
    """Ops take a third more than their roofline says."""
    hardware = find_hardware(H200)
    assert hardware is not None
    return 1.33 * roofline_seconds(op, hardware)


class Truth(RooflineLatency):
    """Likewise; collectives take what latency and bandwidth imply."""

    def op_seconds(self, ops: Any) -> Any:
        return np.array([truth(op) for op in ops])


@pytest.fixture(scope="session")
def study() -> Study:
    """Plans for an H200, made where there is none."""
    return make_study("cuda", H200, 10.0)


@pytest.fixture(scope="session")
def brought_back(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of few runs that was measured; one of its held-out runs did not come back."""
    out = tmp_path_factory.mktemp("study")
    for name, plan in study.plans.items():
        runs = plan["runs"]
        kept = [run for role, most in RUNS_LEFT.items() for run in [r for r in runs if r["role"] == role][:most]]
        _measure(out / "collections" / name, {**plan, "runs": kept})
    return out


def _measure(folder: Path, plan: dict[str, Any]) -> None:
    hardware = find_hardware(H200)
    assert hardware is not None
    plan["events"] = [{**event, "ops": event["ops"][::OPS_LEFT]} for event in plan["events"]]
    for event in plan["events"]:
        works = [Op(op["kind"], tuple(op["dims"]), op["dtype"]) for op in event["ops"]]
        records = [{"op": op, "seconds": truth(work)} for op, work in zip(event["ops"], works, strict=True)]
        facts = {
            "peak_flops": hardware.peak_flops,
            "memory_bandwidth_bytes_per_s": hardware.memory_bandwidth_bytes_per_s,
            "memory_bytes": hardware.memory_bytes,
        }
        head = {"schema": 1, "busy": 1, "world_size": 1, "hardware": facts}
        _write(folder / "events" / f"{event['name']}.json", {**head, "records": records})
    _write(folder / "plan.json", plan)
    lost = [run["name"] for run in plan["runs"] if run["role"] == "heldout"][2:]
    for run in plan["runs"]:
        if run["name"] not in lost:
            _write(folder / "runs" / run["name"] / "manifest.json", _manifest(run))


def _manifest(run: dict[str, Any]) -> dict[str, Any]:
    job, hardware = Job.from_dict(run["job"]), find_hardware(H200)
    assert hardware is not None
    latency = Truth(hardware, job.fabric)
    if "stand_in" in run:
        seconds = stand_in_seconds(job, run["stand_in"]["rank"], latency)
    else:
        seconds = simulate(job, latency).iteration_time_s
    memory = estimate_memory(job, replace(hardware, memory_bytes=1e15)).stages[0].tensors
    return {
        "schema": 1,
        "name": run["name"],
        "role": run["role"],
        "job": run["job"],
        "world_size": 1,
        "fingerprint": {"device": "NVIDIA H200"},
        "rounds": [[seconds, 1.01 * seconds]],
        "peak_memory_bytes": [memory + LIBRARIES],
        **({"stand_in": {"rank": run["stand_in"]["rank"]}} if "stand_in" in run else {}),
    }


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
