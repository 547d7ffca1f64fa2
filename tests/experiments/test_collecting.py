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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parallel": {"pp": 2}, "cluster": {"devices_per_node": 2}}, "as many micro-batches as stages, got 1 < 2"),
        (
            {
                "parallel": {"pp": 2, "schedule": "gpipe"},
                "cluster": {"devices_per_node": 2},
                "model": {"tied_embeddings": True},
            },
            "ties embeddings only within one stage",
        ),
        ({"batch": {"precision": "fp8"}}, "precisions fp32, bf16 and fp16, got 'fp8'"),
        ({"parallel": {"recompute": "selective"}}, "recompute none and full, got 'selective'"),
    ],
)
def test_a_plan_that_the_harness_would_refuse_is_not_written(
    job: Path, tmp_path: Path, changes: dict[str, dict[str, Any]], text: str
) -> None:
    tables = json.loads(job.read_text())
    tables["model"]["layers"] = 2
    tables["parallel"]["dp"] = 1
    for table, keys in changes.items():
        tables[table] |= keys
    job.write_text(json.dumps(tables))
    with pytest.raises(CollectError, match=text):
        collect(job, tmp_path / "p", plan_only=True)
    assert not (tmp_path / "p").exists()


def test_a_role_must_be_a_word(job: Path, tmp_path: Path) -> None:
    with pytest.raises(CollectError, match="role must be a word, got ''"):
        collect(job, tmp_path / "p", plan_only=True, role="")


@pytest.mark.parametrize(
    "changes", [{"runs": 3}, {"schema": 9}, {"events": 3}, {"runs": [{"name": "a", "role": "train", "job": {}}]}]
)
def test_a_plan_changed_by_hand_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema": 1, "runs": [], "events": [], **changes}))
    with pytest.raises(CollectError, match=r"^cannot read plan .*plan\.json: .*$"):
        collect(path, tmp_path / "c", plan_only=True)
    assert not (tmp_path / "c").exists()
