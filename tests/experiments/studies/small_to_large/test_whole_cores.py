"""Held-out runs are held out, whatever is asked for; rows and figures say what they are named for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.harness.plan import job_problems
from stepsight.dataset.job.job import Job
from stepsight.experiments.studies.small_to_large import whole_cores
from stepsight.experiments.studies.small_to_large.core_jobs import HELDOUT, TRAIN, profile_jobs
from stepsight.experiments.studies.small_to_large.whole_cores import CoreCase, core_cases, plan_of, regret_on_all_ranks
from stepsight.training.heldout import HeldoutEvaluation
from stepsight.training.measured.planning import run_name

JOB = """
[model]
family = "gpt"
layers = 2
hidden = 288
heads = 6
vocab = 1536
seq_len = 64
[parallel]
tp = 2
[batch]
micro_batch = 2
global_batch = 4
precision = "fp32"
[cluster]
hardware = "local-cpu"
devices_per_node = 2
fabric = "loopback"
"""


def _shape(job: Job) -> tuple[int, ...]:
    model = job.model
    return model.layers, model.hidden, model.heads, model.ffn, model.vocab, model.seq_len


def _strategies(rows: Any) -> set[tuple[str, str]]:
    return {(model.family, strategy) for _, model, runs in rows for strategy, _, _ in runs}


def test_no_heldout_shape_is_trained_on() -> None:
    """Shapes and widths of held-out models occur neither in training runs nor in event profiles."""
    seen = [*(case.job for case in core_cases() if case.role == "train"), *profile_jobs()]
    heldout = [case.job for case in core_cases() if case.role == "heldout"]
    assert not {_shape(job) for job in seen} & {_shape(job) for job in heldout}
    assert not {job.model.hidden for job in seen} & {job.model.hidden for job in heldout}


def test_some_strategies_are_never_trained_on() -> None:
    unseen = _strategies(HELDOUT) - _strategies(TRAIN)
    assert {strategy for _, strategy in unseen} >= {"pp2-gpipe", "single-recompute", "tp2sp"}


def test_every_case_has_a_name_and_runs_on_two_cores() -> None:
    found = core_cases()
    assert len({case.name for case in found}) == len(found)
    assert {case.job.model.family for case in found if case.role == "heldout"} == {"gpt", "llama", "bert", "t5"}
    assert not [job_problems(case.job.to_dict()) for case in found if job_problems(case.job.to_dict())]
    assert max(case.job.cluster.num_devices for case in found) == 2
    assert all(case.name.startswith("cores/") and case.name.count("/") == 2 for case in found)


def test_training_and_heldout_runs_take_turns() -> None:
    roles = [run["role"] for run in plan_of(core_cases())["runs"]]
    half = len(roles) // 2
    assert abs(roles[:half].count("train") - roles[half:].count("train")) <= 2


def test_a_job_file_is_one_more_heldout_run(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(JOB)
    last = core_cases([tmp_path / "mine.toml"])[-1]
    assert (last.name, last.role, last.job.model.hidden) == ("cores/mine", "heldout", 288)


def test_regret_is_what_the_chosen_strategy_loses() -> None:
    """Per sequence: predicted best takes 1.2 s for 4, the really best 1.0 s; another model has one strategy alone."""
    found = {case.name: case for case in core_cases()}
    one = found["cores/gpt2/ddp2"]
    other = CoreCase("cores/gpt2/again", one.job, "heldout")
    alone = found["cores/t5/tp2"]
    runs = [{"predicted_s": 0.9, "measured_s": 1.2}, {"predicted_s": 1.1, "measured_s": 1.0}]
    regret = regret_on_all_ranks([one, other, alone], [*runs, {"predicted_s": 1.0, "measured_s": 9.0}])
    assert regret == pytest.approx(20.0)
    assert regret_on_all_ranks([alone], [{"predicted_s": 1.0, "measured_s": 9.0}]) == 0.0


def _row(case: CoreCase) -> dict[str, Any]:
    return {
        "run": run_name(case.job), "measured_s": 0.1, "predicted_s": 0.11, "low_s": 0.09, "high_s": 0.12,
        "error_percent": 10.0, "op_error_regressor": 20.0, "op_error_with_gnn": 8.0,
    }  # fmt: skip


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Nothing is measured or trained; what was asked for is kept."""
    asked: dict[str, list[Any]] = {"plans": [], "trained": []}

    def train(collections: list[Path], out: Path, **_: Any) -> str:
        asked["trained"].append(out)
        out.mkdir(parents=True)
        (out / "manifest.json").write_text("{}")
        return "predictor"

    def evaluate(predictor: str, collection: Path, *, role: str) -> HeldoutEvaluation:
        assert (predictor, role) == ("predictor", "heldout")
        rows = [_row(case) for case in core_cases() if case.role == "heldout" and "/llama/" in case.name]
        return HeldoutEvaluation(rows[::-1], 10.0, 4.0, 20.0, 0.5, 100.0, 20.0, 8.0)

    def read_collection(folder: Path) -> Any:
        names = [run["name"] for run in asked["plans"][-1]["runs"]]
        return SimpleNamespace(runs=[SimpleNamespace(name=name, rounds=((0.1, 0.1), (0.12,))) for name in names])

    monkeypatch.setattr(whole_cores, "run_plan", lambda plan, out, *, progress: asked["plans"].append(plan))
    monkeypatch.setattr(whole_cores, "available_ranks", lambda: 2)
    monkeypatch.setattr(whole_cores, "train", train)
    monkeypatch.setattr(whole_cores, "evaluate_heldout", evaluate)
    monkeypatch.setattr(whole_cores, "read_collection", read_collection)
    monkeypatch.setattr(whole_cores.Predictor, "load", lambda folder: "predictor")
    return asked


def test_a_part_is_measured_with_all_training_runs_and_resumes(stubbed: dict[str, Any], tmp_path: Path) -> None:
    for _ in range(2):
        found = whole_cores.run_whole_cores(tmp_path, "cores/llama/*", progress=False)
    roles = [run["role"] for run in stubbed["plans"][0]["runs"]]
    assert roles.count("train") == len([case for case in core_cases() if case.role == "train"])
    assert [row["name"] for row in found["runs"]] == [c.name for c in core_cases() if "/llama/" in c.name]
    assert len(stubbed["trained"]) == 1
    assert {path.name for path in tmp_path.iterdir()} >= {"cores.json", "cores.txt", "cores.png"}


def test_rows_and_figures(stubbed: dict[str, Any], tmp_path: Path) -> None:
    found = whole_cores.run_whole_cores(tmp_path, "cores/llama/*", progress=False)
    row = found["runs"][0]
    assert row["spread_s"] == pytest.approx(0.01)
    assert found["mean_error"] == pytest.approx(10.0)
    assert (found["max_error"], found["regret"]) == (pytest.approx(10.0), pytest.approx(0.0))
    assert (found["op_error_regressor"], found["op_error_with_gnn"]) == (20.0, 8.0)
    assert found["families"]["llama"]["op_error_with_gnn"] == pytest.approx(8.0)
    assert "cores/llama/tp2" in found["text"] and "mean error 10.0 %" in found["text"]


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match=r"such as cores/llama/tp2, got 'box/\*'"):
        whole_cores.run_whole_cores(tmp_path, "box/*", progress=False)
