"""Closed forms of what a box is compared with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import ParallelSpec
from stepsight.dataset.runs.run_manifest import read_box
from stepsight.experiments.studies import small_to_large
from stepsight.experiments.studies.box_cases import MODELS, case
from stepsight.experiments.studies.small_to_large import Silent, by_facts, formula
from stepsight.simulator.schedules import KIND_NAMES
from stepsight.training.prediction.prediction import ROOFLINE, predict

BERT = replace(MODELS["bert"], layers=8)


def roofline(job: Job) -> float:
    return by_facts(job).iteration_time_s


def ideal(job: Job) -> float:
    return by_facts(job, Silent).iteration_time_s


def job_of(text: str, **parallel: int) -> Job:
    return case("bert", BERT, read_box(text), ParallelSpec(**parallel)).job  # type: ignore[arg-type]


def test_without_communication_they_agree() -> None:
    job = job_of("1x1@100mbit")
    assert ideal(job) == pytest.approx(roofline(job), rel=1e-6)
    assert formula(job) == pytest.approx(roofline(job), rel=0.02)  # no optimizer in it


def test_a_pipeline_of_free_messages_is_the_bubble_formula() -> None:
    fast = job_of("4x1@100000mbit", pp=4)
    assert formula(fast) == pytest.approx(ideal(fast), rel=0.08)  # its slowest stage is every stage


def test_communication_takes_time() -> None:
    job = job_of("8x1@100mbit", tp=8)
    assert ideal(job) < 0.9 * roofline(job)


def test_a_run_that_is_as_predicted_has_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of every rank are written as the harness writes them, from the simulation itself."""
    monkeypatch.setattr(small_to_large, "predict", lambda job, predictor: predict(job, ROOFLINE))
    found = [case("bert", BERT, read_box("8x1@100mbit"), ParallelSpec(pp=pp)) for pp in (2, 4)]
    labels = {KIND_NAMES.index(kind): label for label, kind in small_to_large.LABELS.items()}
    for each in found:
        simulation = predict(each.job, ROOFLINE).simulation
        passes, optimizer = small_to_large.predicted_passes(simulation)
        spans = [[["optimizer", 0, 0, *ends]] for ends in (optimizer + 5.0).tolist()]
        for rank, kind, *rest, start, end in passes.tolist():
            spans[int(rank)].append([labels[int(kind)], *rest, start + 5.0, end + 5.0])
        folder = each.folder(tmp_path) / "runs" / each.file_name
        folder.mkdir(parents=True)
        seconds, ranks = simulation.iteration_time_s, each.job.cluster.num_devices
        traces = {str(rank): {} for rank in range(ranks)}
        manifest = {"name": each.file_name, "role": "judge", "job": each.job.to_dict(), "rounds": [[seconds]]}
        manifest |= {"schema": 1, "world_size": ranks, "traces": traces}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        (folder / "records.json").write_text(json.dumps({"steps": [{"begin": 5.0, "cpu": 0.1, "spans": spans}]}))
    rows = small_to_large.compare_cases(found, tmp_path, SimpleNamespace())  # type: ignore[arg-type]
    summary = small_to_large.summarise_boxes(rows, SimpleNamespace(without_context=None))  # type: ignore[arg-type]
    for key in ("mean_error", "max_error", "activity_error", "timestamp_error", "regret"):
        assert summary[key] == pytest.approx(0.0, abs=1e-6)
    assert summary["others"]["ideal arithmetic"]["mean_error"] > 1 and summary["coverage"] == 100
    text = small_to_large.box_text({**summary, "rejected": ["box/a"]})
    assert "mean error 0.000; " in text and "left out, cores more than 25 % busy: box/a" in text
