"""What traces tell of launches and of compute beside collectives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.columns import covered
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.clock.track import find_track, run_track
from stepsight.simulator.schedules import KIND_NAMES
from stepsight.training.measured.imported_facts import KINDS, fit_host, launch_seconds, overlap_of, with_facts
from stepsight.training.measured.imported_ops import imported_times
from stepsight.training.measured.measured import read_imported_runs, read_profiles, read_runs
from tests.dataset.kineto_files import KinetoFile
from tests.dataset.traced_jobs import GpuJob, imported_collection, two_ranks


def test_covered_time_counts_once() -> None:
    start, end = np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 6.0])
    found = covered(start, end, np.array([0.0, 2.5, 4.0, 7.0]), np.array([10.0, 5.5, 5.0, 8.0]))
    assert found == pytest.approx([4.0, 1.0, 0.0, 0.0])


def _overlapped(beside_us: float, alone_us: float) -> KinetoFile:
    """120 additions, every other one beside an all-reduce."""
    file, correlation = KinetoFile(0, 2), 0
    for number in range(120):
        at, beside = 1000.0 * number, number % 2
        if beside:
            file.launch(at, correlation := correlation + 1)
            file.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 10, 800.0, 20, correlation)
        file.call("aten::add", at + 15, 20.0, [1024, 1024], [1024, 1024])
        file.launch(at + 20, correlation := correlation + 1)
        file.kernel("elementwise_kernel", at + 40, beside_us if beside else alone_us, 7, correlation)
    return file


def test_compute_beside_collectives_says_what_is_lost(tmp_path: Path) -> None:
    file = _overlapped(150.0, 100.0)
    steps = [run.steps for run in read_imported_runs([imported_collection(tmp_path, file)])]
    overlap = overlap_of(steps)
    assert overlap is not None and overlap.share == pytest.approx(1 / 3, rel=0.05)
    assert overlap.slowdown == pytest.approx(1.5, rel=0.05)
    assert overlap_of([]) is None
    short = [
        run.steps for run in read_imported_runs([imported_collection(tmp_path / "short", _overlapped(20.0, 10.0))])
    ]
    assert overlap_of(short) is None  # the delay of short kernels is not what long ones lose
    launches = launch_seconds(steps)
    assert set(launches) >= {"add"}
    taught = with_facts(HARDWARE["a100-sxm-80gb"], launches, overlap)
    assert taught.comm_compute_share == overlap.share and taught.host_kinds_s["add"] == launches["add"]
    assert taught.source.endswith("launches and overlap by imported traces")
    assert with_facts(taught, {}, None) is taught


A100 = "a100-sxm-80gb"


def test_each_signature_has_its_seconds(tmp_path: Path) -> None:
    times = imported_times(read_imported_runs([imported_collection(tmp_path, *two_ranks())], A100))
    seconds = {str(work): values for work, values in times.items()}
    assert sorted(seconds["linear[1024x512x256]fp32"]) == pytest.approx([400e-6, 400e-6, 800e-6, 800e-6])
    assert not any(op.kind == "opaque" for op in times)
    (work,) = (work for work in times if isinstance(work, Collective))
    assert work.num_bytes == 4 * 131072 and max(times[work]) < 1e-3  # without the wait for the slow rank


def test_collectives_of_some_ranks_teach_nothing(tmp_path: Path) -> None:
    times = imported_times(read_imported_runs([imported_collection(tmp_path, two_ranks()[0])], A100))
    assert times and all(isinstance(work, Op) for work in times)


def test_profiles_hold_what_was_imported(tmp_path: Path) -> None:
    folder = imported_collection(tmp_path, *two_ranks())
    profile = read_profiles([folder], None, read_imported_runs([folder], A100))
    assert len(profile.ops) == len(set(profile.ops)) > 0 and profile.device == "cuda" and profile.digest
    assert profile.hardware(A100, profile.device).kind == "gpu"
    assert read_runs([folder], ("train",)) == []


def test_another_device_is_refused(tmp_path: Path) -> None:
    folder = imported_collection(tmp_path, GpuJob().step(1).file)
    for name in ("h100-sxm-80gb", "local-cpu"):
        with pytest.raises(TraceError, match=f"must be '{name}', got 'NVIDIA A100-SXM4-80GB'"):
            read_imported_runs([folder], name)


def test_a_trace_of_a_cpu_teaches_no_gpu(tmp_path: Path) -> None:
    file = KinetoFile(0, 1)
    file.call("aten::add", 15, 20.0, [1024, 1024], [1024, 1024])
    folder = imported_collection(tmp_path, file)
    for name in ("h100-sxm-80gb", "H100"):  # also by a usual name
        with pytest.raises(TraceError, match=f"device must be '{name}', got 'cpu'.*--hardware"):
            read_imported_runs([folder], name)
    assert [run.device for run in read_imported_runs([folder], "local-cpu")] == ["cpu"]


HOST_ACTION_S, HOST_MESSAGE_S = 1e-3, 5e-4
JOB = Job.from_dict(
    {
        "model": {"family": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 1024, "seq_len": 64},
        "parallel": {"pp": 4, "schedule": "zb-h1"},
        "batch": {"micro_batch": 1, "global_batch": 32, "precision": "fp32"},
        "cluster": {"hardware": "local-cpu", "devices_per_node": 4, "fabric": "loopback"},
    }
)


def test_host_times_come_from_gaps_without_a_wait() -> None:
    """A step of known costs gives them back; too few records give none."""
    track = find_track("zb-h1", 4, JOB.num_micro_batches, 1, runtime="torch")
    segments = np.arange(track.num_actions, dtype=np.int32)
    seconds = np.full(track.num_actions, 0.05).reshape(-1, 1, 1)
    messages = np.full(track.num_messages, 1e-4)
    found = run_track(track, segments, seconds, messages, (HOST_ACTION_S, HOST_MESSAGE_S))
    labels = {name: label for label, name in KINDS.items()}
    spans = [
        [
            (labels[KIND_NAMES[track.kind[at]]], int(track.part[at]), int(track.micro_batch[at]),
             float(found.log.start[at, 0]), float(found.log.finish[at, 0]))
            for at in np.flatnonzero(track.stage == stage).tolist()
        ]
        for stage in range(4)
    ]  # fmt: skip
    assert fit_host([(JOB, {"spans": spans})]) == pytest.approx((HOST_ACTION_S, HOST_MESSAGE_S), rel=0.2)
    assert fit_host([]) == (0.0, 0.0)
