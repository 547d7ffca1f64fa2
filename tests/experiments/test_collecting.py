"""``collect`` from job files: real runs, resumed with the same command."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.errors import CollectError
from stepsight.experiments.collecting import collect_jobs
from stepsight.experiments.local_jobs import local_job
from stepsight.experiments.showing import describe

COUNTS = {"rounds": 1, "steps": 2, "warmup": 2, "profile_steps": 1}


def collect(job: Path, out: Path, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"role": "train", "counts": COUNTS, "event_seconds": 0.5, "plan_only": False}
    return collect_jobs([job], out, progress=False, **{**options, **changes})


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.json"
    path.write_text(local_job("gpt", 1, 32, 2, 2, 64, 64, 16, "single", 1, 1).to_json())
    return path


def test_the_same_command_goes_on(job: Path, tmp_path: Path) -> None:
    """A second call keeps what is there; another plan in the same folder is refused; ``show`` tells what was run."""
    out = tmp_path / "c"
    assert collect(job, out)["collected"] == 2
    assert collect(job, out)["kept"] == 2
    with pytest.raises(CollectError, match="one plan"):
        collect(job, out, event_seconds=1.0)
    shown = describe(out)
    assert [run["role"] for run in shown["runs"]] == ["train"] and shown["events"]["world1"] > 10
    (run,) = (out / "runs").iterdir()
    assert "linear_wgrad" in describe(run)["kinds"]


def test_a_plan_runs_elsewhere(job: Path, tmp_path: Path) -> None:
    """``--plan-only`` writes what the harness reads, and never over another plan."""
    collect(job, tmp_path / "p", plan_only=True)
    plan = json.loads((tmp_path / "p" / "plan.json").read_text())
    assert plan["runs"][0]["rounds"] == 1 and plan["events"][0]["world_size"] == 1
    collect(job, tmp_path / "p", plan_only=True)
    with pytest.raises(CollectError, match="one plan"):
        collect(job, tmp_path / "p", plan_only=True, event_seconds=9.0)
