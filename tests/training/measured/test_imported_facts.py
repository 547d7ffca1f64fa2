"""What traces tell of launches and of compute beside collectives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.graph.intervals import covered
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.training.measured.imported_facts import launch_seconds, overlap_of, with_facts
from stepsight.training.measured.measured import read_imported_runs
from tests.dataset.kineto_files import KinetoFile
from tests.dataset.traced_jobs import imported_collection


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
