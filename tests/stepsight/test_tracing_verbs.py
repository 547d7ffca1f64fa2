"""The verbs for traces, as programs call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.dataset import TraceGraphs
from stepsight.dataset.errors import StepsightError
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
        (["dataset", "nowhere", "--out", "d"], "a run folder or a collection"),
    ],
)
def test_misuse_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str) -> None:
    monkeypatch.chdir(tmp_path)
    GpuJob().step(1).file.write(tmp_path / "t.json")
    with pytest.raises(StepsightError, match=told):
        ask(*arguments)
