"""Traces of a job's ranks together: what is refused, what is warned of, and what is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.rank_trace import Placement
from stepsight.dataset.traces.import_traces import TRACE_READERS, import_ranks, read_rank_trace, summary
from tests.dataset.kineto_files import KinetoFile
from tests.dataset.traced_jobs import GpuJob, two_ranks


def written(folder: Path, *files: KinetoFile) -> list[Path]:
    return [file.write(folder / f"trace{place}.json.gz") for place, file in enumerate(files)]


def test_the_summary_has_what_was_promised(tmp_path: Path) -> None:
    told = summary(import_ranks(written(tmp_path, *two_ranks())))
    assert told["ranks"] == 2 and told["steps"] == 2
    assert set(told["dependencies"]) == {
        "data", "stream_order", "launch", "synchronisation", "rendezvous", "host_order"
    }  # fmt: skip
    assert min(told["dependencies"].values()) > 0
    assert told["dependencies"]["rendezvous"] == 2
    assert told["device_time_s"] == pytest.approx(1e-6 * sum(length for length in _device_lengths()))
    own = 2 * 2 * 50e-6
    assert told["opaque_percent"] == pytest.approx(100 * own / told["device_time_s"])
    assert told["recognised_percent"] + told["opaque_percent"] == pytest.approx(100)


def _device_lengths() -> list[float]:
    return [event["dur"] for file in two_ranks() for event in file.events if event.get("cat") == "kernel"]


def test_a_folder_of_traces_is_one_job(tmp_path: Path) -> None:
    written(tmp_path, *two_ranks())
    assert [graph.rank for graph in import_ranks([tmp_path]).graphs] == [0, 1]


def test_ranks_come_from_names_where_traces_do_not_say(tmp_path: Path) -> None:
    files = two_ranks()
    for file in files:
        del file.header["distributedInfo"]
    paths = [file.write(tmp_path / f"worker{rank}_12.json") for rank, file in zip((1, 0), files, strict=True)]
    found = import_ranks(paths)
    assert [graph.rank for graph in found.graphs] == [0, 1] and found.sources == (paths[1], paths[0])


def test_a_rank_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="rank 0 twice"):
        import_ranks(written(tmp_path, GpuJob(0, 2).step(1).file, GpuJob(0, 2).step(1).file))


def test_ranks_of_different_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="one job"):
        import_ranks(written(tmp_path, GpuJob(0, 2).step(1).file, GpuJob(1, 4).step(1).file))


def test_ranks_whose_collectives_differ_are_refused(tmp_path: Path) -> None:
    other = two_ranks()[1]
    for event in other.events:
        if "Collective name" in event.get("args", {}):
            event["args"]["Process Group Ranks"] = "[1, 3]"
    with pytest.raises(TraceError, match="collectives in common"):
        import_ranks(written(tmp_path, two_ranks()[0], other))


def test_missing_ranks_and_inference_are_warned_of(tmp_path: Path) -> None:
    file = KinetoFile(0, 4).note("ProfilerStep#1", 0, 100).call("aten::mm", 5, 20, [8, 8], [8, 8])
    file.launch(10, 1).kernel("gemm", 15, 40, 7, 1)
    warnings = import_ranks(written(tmp_path, file)).warnings
    assert any("ranks are missing: 3 of 4" in warning for warning in warnings)
    assert any("inference" in warning for warning in warnings)


def test_negative_durations_and_jumping_clocks_are_warned_of(tmp_path: Path) -> None:
    job = GpuJob().step(1)
    job.file.call("aten::mul", 5000, -3, [4])
    for event in job.file.events:
        if event.get("cat") == "kernel":
            event["ts"] -= 5000.0 if event["ts"] > 5000.0 else 0.0
            event["ts"] = max(event["ts"] - 900.0, 0.0) if event["name"].startswith("multi") else event["ts"]
    job.file.launch(90_000, 999).kernel("late", 80_000, 10, 7, 999)
    warnings = import_ranks(written(tmp_path, job.file)).warnings
    assert any("negative durations: 1" in warning for warning in warnings)
    assert any("clocks that jump" in warning for warning in warnings)


def test_overlapping_and_missing_steps_are_warned_of(tmp_path: Path) -> None:
    job = GpuJob().step(1).step(4)
    job.file.note("ProfilerStep#5", job.now - 500, 700)
    warnings = import_ranks(written(tmp_path, job.file)).warnings
    assert any("missing steps: ProfilerStep#1 is followed by ProfilerStep#4" in warning for warning in warnings)
    assert any("overlapping steps" in warning for warning in warnings)


PLACE = Placement(rank=0, devices_per_node=1, tp=1, dp=1)


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        ("kineto", "trace format 'mine': a reader of traces must be a function of path, placement, got 'kineto'"),
        (lambda path: None, r"a reader of traces must take 2 \(path, placement\), got \(path\)"),
    ],
)
def test_what_is_no_reader_is_refused(reader: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        TRACE_READERS.register("mine", reader)
    assert "mine" not in TRACE_READERS


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (lambda path, placement: {}[placement.rank], "trace format mine: cannot read rank0.txt: KeyError: 0"),
        (lambda path, placement: [1.0], r"trace format mine: a reader must return a RankTrace, got \[1.0\]"),
    ],
)
def test_a_reader_that_fails_is_one_line(reader: Any, message: str) -> None:
    with TRACE_READERS.registered("mine", reader), pytest.raises(TraceError, match=message):
        read_rank_trace("mine", Path("rank0.txt"), PLACE)
