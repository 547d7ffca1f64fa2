"""Verification: strategies of a search become jobs, what cannot run is named, what ran stands beside its prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepsight import Job
from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.runs.run_manifest import read_box
from stepsight.experiments.search.search import search
from stepsight.experiments.tasks import verifying
from stepsight.experiments.tasks.verifying import strategies_of, verify

COUNTS = {"rounds": 1, "steps": 2, "warmup": 2, "profile_steps": 0}


def tiny(ranks: int = 1, **parallel: Any) -> Job:
    model = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 2, "vocab": 256, "seq_len": 32}
    return Job.from_dict(
        {
            "model": model,
            "parallel": parallel,
            "batch": {"micro_batch": 1, "global_batch": max(4, ranks), "precision": "fp32"},
            "cluster": {"hardware": "local-cpu", "nodes": 1, "devices_per_node": ranks, "fabric": "loopback"},
        }
    )


def test_strategies_of_a_search_become_jobs_again() -> None:
    job = tiny(2)
    result = search(job, "roofline", trials=4, sampler="random")
    found = json.loads(json.dumps(result.to_dict()))
    assert strategies_of(job, found) == [choice.job for choice in result.choices if choice.fits]


@pytest.mark.parametrize("found", [{}, {"choices": 3}, {"choices": [1]}])
def test_a_file_that_is_no_search_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(CollectError, match="search's result"):
        strategies_of(tiny(), found)
    with pytest.raises(CollectError, match=r"found\.json must hold `choices` or `top`"):
        strategies_of(tiny(), found, "found.json")


def test_a_strategy_of_another_job_is_refused() -> None:
    with pytest.raises(CollectError, match="does not fit the job"):
        strategies_of(tiny(), {"choices": [{"tp": 4, "fits": True}]})


def test_what_cannot_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match=r"none of the strategies.*ranks <= \d+ here, got 64"):
        verify([tiny(64, dp=64)], tmp_path, counts=COUNTS)


def test_a_box_holds_only_its_own_number_of_ranks(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match="none of the strategies"):
        verify([tiny(2, dp=2)], tmp_path, counts=COUNTS, box=read_box("4x1@200mbit"))


def test_runs_stand_beside_their_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "available_ranks", lambda: 1)
    value = verify([tiny(), tiny(2, dp=2)], tmp_path, "roofline", counts=COUNTS)
    (run,) = value["runs"]
    assert run["measured_s"] > 0 and run["low_s"] <= run["predicted_s"] <= run["high_s"]
    assert run["error_percent"] == pytest.approx(100 * (run["predicted_s"] / run["measured_s"] - 1))
    (reason,) = value["not_run"].values()
    assert "ranks <= 1 here, got 2" in reason and "predicted ms" in value["text"]


def test_a_run_that_does_not_count_says_why(tmp_path: Path) -> None:
    for name, manifest in (("busy", {}), ("large", {"rejected": "it needs 3 GB, this machine has 2"})):
        folder = tmp_path / "rejected" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "took more than" in verifying.why_no_run(tmp_path, "busy")
    assert verifying.why_no_run(tmp_path, "large") == "it needs 3 GB, this machine has 2"
    assert "ended before" in verifying.why_no_run(tmp_path, "never")
