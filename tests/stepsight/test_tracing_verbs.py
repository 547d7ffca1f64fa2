"""The verbs for traces, as programs call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.dataset import TraceGraphs
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.graph.columns import Span
from stepsight.dataset.graph.program import Node, Program
from stepsight.dataset.graph.rank_trace import Placement, RankTrace
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.traces.import_traces import TRACE_READERS
from tests.dataset.traced_jobs import GpuJob, two_ranks


def ask(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_from_traces_to_a_dataset(tmp_path: Path) -> None:
    paths = [file.write(tmp_path / f"rank{rank}.json.gz") for rank, file in enumerate(two_ranks())]
    runs, data = tmp_path / "runs", tmp_path / "data"
    told = ask("import", "kineto", *paths, "--out", runs, "--json")
    promised = {"ranks", "steps", "device_time_s", "recognised_percent", "opaque_percent", "dependencies", "warnings"}
    assert promised <= set(told)
    replayed = ask("replay", runs, "--json")
    assert {"measured_s", "replayed_s", "error_percent", "streams"} <= set(replayed)
    assert abs(replayed["error_percent"]) < 0.5
    made = ask("dataset", runs, "--out", data, "--json")
    assert made["graphs"] == len(TraceGraphs(data)) and {"nodes", "edges"} <= set(made)
    GpuJob().step(1).file.write(tmp_path / "other.json")
    ask("import", "kineto", tmp_path / "other.json", "--out", runs, "--json")
    both = ask("replay", runs, "--json")
    assert len(both["runs"]) == 2 and abs(both["error_percent"]) < 0.5


def read_mine(path: Path, placement: Placement) -> RankTrace:
    """A reader outside the package: each line has the size of an op, its start and its duration in seconds."""
    rows = [line.split() for line in path.read_text().splitlines()]
    nodes = [Node(Op("gelu", (int(size),), "fp32"), name="line") for size, _, _ in rows]
    start, length = (np.array([float(row[column]) for row in rows]) for column in (1, 2))
    zeros, end = np.zeros(len(rows)), float((start + length).max())
    spans = (Span("forward", 0.0, end),)
    return RankTrace(
        0, Program(tuple(nodes)), start, length, length, zeros, zeros.astype(np.int64), spans, num_events=zeros
    )


def test_a_format_of_ones_own_is_imported(tmp_path: Path) -> None:
    path, runs = tmp_path / "rank0.mine", tmp_path / "runs"
    path.write_text("8 0.0 0.002\n16 0.002 0.003\n8 0.005 0.001\n")
    with TRACE_READERS.registered("mine", read_mine):
        told = ask("import", "mine", path, "--out", runs, "--json")
    assert told["ranks"] == 1 and told["steps"] == 1 and told["recognised_percent"] == 100
    assert told["device_time_s"] == pytest.approx(0.006) and told["dependencies"]["stream_order"] == 2
    assert ask("replay", runs, "--json")["replayed_s"] == pytest.approx(0.006)
    made = ask("dataset", runs, "--out", tmp_path / "data", "--json")
    assert made["step_graphs"] == made["segment_graphs"] == 1 and made["nodes"]["op"] == 6
    with pytest.raises(StepsightError, match=r"of traces \(kineto, chakra.*did you mean 'kineto'"):
        ask("import", "kinetto", path)


def test_what_if_and_show(tmp_path: Path) -> None:
    path, runs = GpuJob().step(1).step(2).file.write(tmp_path / "t.json"), tmp_path / "runs"
    ask("import", "kineto", path, "--out", runs, "--json")
    told = ask("what-if", runs, "--faster", "gemm=2", "--batch", "2x", "--hardware", "h100-sxm", "--json")
    assert {"measured_s", "replayed_s", "changed_s", "changes", "predicted_percent", "scaled_percent"} <= set(told)
    assert len(told["changes"]) == 3 and told["changes"][0]["step_s"] < told["replayed_s"]
    fast = ask("what-if", runs, "--faster", "gemm=100", "--json")
    free = ask("what-if", runs, "--no-host", "--json")
    assert free["changed_host_percent"] < fast["host_percent"] <= fast["changed_host_percent"]
    with pytest.raises(StepsightError, match="the trace is of 'NVIDIA A100-SXM4-80GB', got 'MI300X'"):
        ask("what-if", runs, "--on", "MI300X", "--batch", "2x")
    for other in ("h100-sxm", "local-cpu"):  # whatever is asked
        with pytest.raises(StepsightError, match="--on must be the traced device"):
            ask("what-if", runs, "--on", other, "--no-host")
    ask("what-if", runs, "--on", "a100-sxm", "--batch", "2x", "--json")
    job = GpuJob().step(1)
    job.file.header["deviceProperties"] = [{"id": 0, "name": "a device of tomorrow"}]
    other = tmp_path / "other"
    ask("import", "kineto", job.file.write(tmp_path / "o.json"), "--out", other, "--json")
    amd = ask("what-if", other, "--on", "MI300X", "--batch", "2x", "--json")["traced_on"]
    assert (amd["hardware"], amd["predictor"]) == ("mi300x-192gb", "roofline")
    with pytest.raises(StepsightError, match="--on must be the traced device"):
        ask("what-if", other, "--on", "abacus", "--batch", "2x")
    with pytest.raises(StepsightError, match="name the traced one with --on-fabric"):
        ask("what-if", other, "--on", "mi250x-gcd-64gb", "--batch", "2x")
    shown = ask("show", path, "--json")
    assert shown["kinds"]["opaque"] == pytest.approx(100e-6) and "very_own_kernel(float*)" in shown["opaque"]
    assert ask("show", runs, "--json")["runs"][0]["imported"] is True
    (run,) = (runs / "runs").iterdir()
    assert ask("show", run, "--json")["kinds"] == shown["kinds"]


def test_a_job_of_another_trace_is_refused(tmp_path: Path) -> None:
    path = GpuJob().step(1).file.write(tmp_path / "t.json")
    job = Path(__file__).parents[2] / "examples" / "gpt3-175b-1024.toml"
    with pytest.raises(StepsightError, match="the job has 1024 devices, the trace 1"):
        ask("import", "kineto", path, "--job", job, "--out", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["import", "kineto", "t.json"], "needs --out"),
        (["import", "neusight", "t.json", "t.json"], "takes one file or folder"),
        (["import", "neusight", "t.json", "--et", "t.json"], "belong to traces"),
        (["replay", "nowhere"], "a run folder or a collection"),
        (["what-if", "nowhere", "--faster", "gemm"], "must be KEY=NUMBER"),
        (["what-if", "nowhere", "--batch", "big"], "takes a factor"),
        (["dataset", "nowhere", "--out", "d"], "a run folder or a collection"),
    ],
)
def test_misuse_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str) -> None:
    monkeypatch.chdir(tmp_path)
    GpuJob().step(1).file.write(tmp_path / "t.json")
    with pytest.raises(StepsightError, match=told):
        ask(*arguments)


def test_names_of_a_trace_do_nothing_to_a_terminal_or_a_page(tmp_path: Path) -> None:
    """Control characters and HTML in names of kernels, calls and devices are escaped where they are printed."""
    wild = "\x1b[2J\x9b31m\nspoofed <script>alert(1)</script>"
    job = GpuJob().step(1).step(2)
    job.file.header["deviceProperties"] = [{"id": 0, "name": wild}]
    for event in job.file.events:
        if event.get("cat") in ("kernel", "cuda_runtime", "cpu_op"):
            event["name"] += wild
    job.file.write(tmp_path / "t.json")
    runs, data = tmp_path / "runs", tmp_path / "data"
    for arguments in (
        ("import", "kineto", tmp_path / "t.json", "--out", runs),
        ("replay", runs, "--timeline", tmp_path / "step.json"),
        ("show", runs),
        ("show", tmp_path / "t.json"),
        ("doctor", runs),
        ("compare", runs, tmp_path / "t.json"),
        ("what-if", runs, "--no-host"),
        ("dataset", runs, "--out", data),
    ):
        result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
        assert result.exit_code == 0 and not {"\x1b", "\x9b"} & set(result.output), (arguments[0], result.output)
        assert not any(line.startswith("spoofed") for line in result.output.splitlines()), result.output
    assert "<script>" not in (data / "README.md").read_text()
