"""Imported runs teach: each call once, collectives only where all ranks were traced, and on their own hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.training.measured.imported_ops import imported_times
from stepsight.training.measured.measured import read_imported_runs, read_profiles, read_runs
from tests.dataset.traced_jobs import GpuJob, imported_collection, two_ranks

HARDWARE = "a100-sxm-80gb"


def test_each_signature_has_its_seconds(tmp_path: Path) -> None:
    times = imported_times(read_imported_runs([imported_collection(tmp_path, *two_ranks())], HARDWARE))
    seconds = {str(op): values for op, values in times.ops.items()}
    assert sorted(seconds["linear[1024x512x256]fp32"]) == pytest.approx([400e-6, 400e-6, 800e-6, 800e-6])
    assert not any(op.kind == "opaque" for op in times.ops)
    (work,) = times.collectives
    assert work.num_bytes == 4 * 131072 and max(times.collectives[work]) < 1e-3  # without the wait for the slow rank


def test_collectives_of_some_ranks_teach_nothing(tmp_path: Path) -> None:
    times = imported_times(read_imported_runs([imported_collection(tmp_path, two_ranks()[0])], HARDWARE))
    assert times.ops and not times.collectives


def test_profiles_hold_what_was_imported(tmp_path: Path) -> None:
    folder = imported_collection(tmp_path, *two_ranks())
    profile = read_profiles([folder], None, read_imported_runs([folder], HARDWARE))
    assert len(profile.ops) == len(set(profile.ops)) > 0 and profile.device == "cuda" and profile.digest
    assert profile.hardware(HARDWARE, profile.device).kind == "gpu"
    assert read_runs([folder], ("train",)) == []


def test_another_device_is_refused(tmp_path: Path) -> None:
    folder = imported_collection(tmp_path, GpuJob().step(1).file)
    with pytest.raises(TraceError, match="A100-SXM4-80GB"):
        read_imported_runs([folder], "h100-sxm-80gb")
