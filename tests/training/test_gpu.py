"""Training on what a made-up GPU did: its kernels' seconds and its host's launches are known, and so is the truth of a
step: the host launches every op, the device runs them in order, and the profiler slows the host."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware, launch_units, roofline_seconds
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.run_folder import read_run
from stepsight.simulator.programs.lower import lower
from stepsight.training.fitting.train_runs import evaluate_heldout, train
from stepsight.training.measured.imported_facts import fit_launches, launches_in_traces
from stepsight.training.measured.measured import read_runs
from tests.dataset.kineto_files import MAIN, KinetoFile

GPU = "h100-sxm-80gb"
OVERHEAD_US = 1.5  # of every recorded call
LAUNCH_US = {"linear": 9.0, "linear_dgrad": 6.0, "linear_wgrad": 7.0, "adamw": 11.0, "rms_norm": 40.0}  # else 12


def _job(layers: int, hidden: int, micro_batch: int, micro_batches: int = 1, seq_len: int = 256) -> Job:
    return Job(
        model=ModelSpec(family="llama", layers=layers, hidden=hidden, heads=hidden // 64, vocab=4096, seq_len=seq_len),
        parallel=ParallelSpec(dp=1),
        batch=BatchSpec(micro_batch=micro_batch, global_batch=micro_batch * micro_batches, precision="bf16"),
        cluster=ClusterSpec(hardware=GPU, devices_per_node=1),
    )


def _seconds(op: Op) -> float:
    hardware = find_hardware(GPU)
    assert hardware is not None
    return 1.3 * roofline_seconds(op, hardware) + 1e-6


def _launch_us(op: Op) -> float:
    return LAUNCH_US.get(op.kind, 12.0) * launch_units(op)


def _nodes(job: Job) -> list[tuple[str, int, list[Op]]]:
    """Label, micro-batch and ops of each segment of a step."""
    hardware = find_hardware(GPU)
    assert hardware is not None
    low = lower(job, hardware)
    order = [*low.segment.tolist(), int(low.optimizer[0])]
    counts: dict[str, int] = {}
    out = []
    for at in order:
        label = low.segments[at].label
        counts[label] = counts.get(label, -1) + 1
        ops = [node.work for node in low.segments[at].program.nodes if isinstance(node.work, Op)]
        out.append((label, counts[label], ops))
    return out


def _step_s(job: Job, kinds: dict[str, float] | None = None) -> float:
    """A step without a profiler, begun when host and device are free; ``kinds``: other launch seconds."""
    host = device = 0.0
    for _, _, ops in _nodes(job):
        for op in ops:
            host += kinds[op.kind] * launch_units(op) if kinds else _launch_us(op) * 1e-6
            device = max(device, host) + _seconds(op)
    return device


def _trace(job: Job) -> KinetoFile:
    file, begin, correlation = KinetoFile(), 0.0, 0
    for _ in range(2):
        host = device = begin
        for label, micro_batch, ops in _nodes(job):
            first = host
            for op in ops:
                spent = _launch_us(op) + 2 * OVERHEAD_US  # the op's own record and the launch's
                dims = "x".join(map(str, op.dims))
                name = f"stepsight::op kind={op.kind} dims={dims} dtype={op.dtype}"
                file.note(name, host, spent)
                host += spent
                correlation += 1
                launch = {"correlation": correlation}
                file.event("cuda_runtime", "cudaLaunchKernel", host - 0.01, 0.01, MAIN, launch)
                device = max(device, host)
                file.kernel("k", device, _seconds(op) * 1e6, 7, correlation)
                device += _seconds(op) * 1e6
            file.segment(label, first, host - first, micro_batch)
        file.segment("step", begin, host + 0.1 - begin)  # the host does not wait for the device
        begin = max(host, device) + 100.0
    return file


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture(scope="module")
def collect(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[Job], Sequence[Job]], Path]:
    def make(train_jobs: Sequence[Job], heldout: Sequence[Job]) -> Path:
        folder = tmp_path_factory.mktemp("gpu")
        hardware = find_hardware(GPU)
        assert hardware is not None
        ops: set[Op] = set()
        for index, job in enumerate([*train_jobs, *heldout]):
            role = "train" if index < len(train_jobs) else "heldout"
            run = folder / "runs" / f"run{index}"
            run.mkdir(parents=True)
            _trace(job).write(run / "rank0.kineto.json")
            seconds = _step_s(job)
            _write(
                run / "manifest.json",
                {
                    "schema": 1, "name": f"run{index}", "role": role, "job": job.to_dict(), "world_size": 1,
                    "fingerprint": {"device": "NVIDIA H100 80GB HBM3"}, "versions": {}, "rounds": [[seconds] * 3] * 2,
                    "profiled_seconds": [2 * seconds], "losses": [], "peak_memory_bytes": [10**9],
                    "traces": {"0": {"kineto": "rank0.kineto.json"}},
                },
            )  # fmt: skip
            if role == "train":
                ops |= {op for _, _, found in _nodes(job) for op in found}
        records = [
            {"op": asdict(op), "seconds": _seconds(op), "host_seconds": _launch_us(op) * 1e-6}
            for op in sorted(ops, key=str)
        ]
        facts = {name: value for name, value in hardware.to_dict().items() if name in ("peak_flops", "memory_bytes")}
        table = {"schema": 1, "busy": 1, "world_size": 1, "records": records, "hardware": facts}
        _write(folder / "events" / "world1.json", table)
        return folder

    return make


TRAIN = (
    _job(2, 256, 1), _job(4, 512, 2), _job(2, 1024, 4, 2), _job(3, 2048, 8), _job(4, 384, 1, 3), _job(2, 1536, 16),
    _job(6, 256, 2), _job(3, 768, 4),
)  # fmt: skip
HELDOUT = (_job(5, 320, 1), _job(3, 640, 2, 2), _job(2, 1792, 8), _job(8, 448, 1, 2))


@pytest.mark.parametrize("job", [TRAIN[0], TRAIN[3]], ids=["host decides", "device decides"])
def test_a_traces_device_seconds_are_the_kernels_own(job: Job, collect: Any) -> None:
    trace = read_run(collect([job], []) / "runs" / "run0")
    wanted = {op: _seconds(op) for _, _, ops in _nodes(job) for op in ops}
    segments = trace.segments()
    assert {segment.label for segment in segments} == {"forward", "backward", "optimizer"}
    for segment in segments:
        for node, seconds in zip(segment.program.nodes, segment.slot_s.tolist(), strict=True):
            assert seconds == pytest.approx(wanted[node.work], rel=1e-3, abs=2e-8)  # type: ignore[index]


def test_launches_by_kind_are_found_in_traces(collect: Any) -> None:
    runs = read_runs([collect([TRAIN[0], TRAIN[2]], [])], ("train",))
    found = launches_in_traces(runs, OVERHEAD_US * 1e-6)
    for kind in ("linear", "linear_wgrad", "rms_norm", "adamw", "attention"):
        assert found[kind] == pytest.approx(LAUNCH_US.get(kind, 12.0) * 1e-6, rel=0.02), kind
    profiled = launches_in_traces(runs, 0.0)
    assert profiled["linear"] > found["linear"]


def test_how_much_the_profiler_slows_the_host_is_what_explains_the_runs(collect: Any) -> None:
    runs = read_runs([collect([TRAIN[0], TRAIN[4]], [])], ("train",))

    def iterations(kinds: dict[str, float]) -> np.ndarray:
        return np.array([_step_s(run.manifest.job, kinds) for run in runs])

    found = fit_launches(runs, [(Op("to_host", (8,)), 3e-6)], iterations)
    assert found["linear"] == pytest.approx(9e-6, rel=0.05) and found["to_host"] == 3e-6
    assert fit_launches([], [(Op("to_host", (8,)), 3e-6)], iterations) == {"to_host": 3e-6}


def test_event_profiles_tell_what_no_trace_does() -> None:
    ops = [Op("linear", (8, 8, 8)), Op("linear", (16, 8, 8)), Op("adamw", (100, 10)), Op("add", (8,))]
    launched = zip(ops, [4e-6, 6e-6, 50e-6, 0.0], strict=True)
    assert fit_launches([], launched, lambda kinds: np.zeros(0)) == {
        "adamw": pytest.approx(5e-6),
        "linear": pytest.approx(5e-6),
    }


def test_held_out_steps_of_a_made_up_gpu(collect: Any, tmp_path: Path) -> None:
    """Launch-bound ones and others, shapes that no training run had."""
    folder = collect(TRAIN, HELDOUT)
    predictor = train([folder], tmp_path / "p", hardware_name=GPU, progress=False)
    assert predictor.hardware.launch_s(Op("linear", (8, 8, 8))) == pytest.approx(9e-6, rel=0.1)
    evaluation = evaluate_heldout(predictor, folder, role="heldout")
    assert evaluation.mape < 3.0
