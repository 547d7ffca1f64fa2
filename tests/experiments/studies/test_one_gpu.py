"""The whole way of a GPU's study, from what was brought back to figures; and what a study refuses."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepsight.dataset.base.errors import CollectError
from stepsight.experiments.questions.describe import describe
from stepsight.experiments.studies import one_gpu as study
from stepsight.experiments.studies.one_gpu import run_study, write_plans
from stepsight.training.fitting import train_runs


@pytest.fixture(scope="module")
def figures(brought_back: Path) -> dict[str, Any]:
    """Without the plot and MLflow, whose start takes longer than all else, and which have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "num_gpus", lambda: 0)
        patch.setattr(study, "plot_predicted_against_measured", lambda rows, path, title: path.touch())
        tracked = SimpleNamespace(run_id="", finish=lambda *_: None)
        patch.setattr(train_runs, "tracked", lambda uri, name: nullcontext(tracked))
        return run_study(brought_back)


def test_what_was_brought_back_is_judged(figures: dict[str, Any], brought_back: Path) -> None:
    """Ops take a third more than their roofline: all is found again, and what is absent is said."""
    assert set(figures["variants"]) == {"eager", "compiled"}
    eager = figures["variants"]["eager"]
    assert eager["ops"]["all"]["mape_over_50us"] < 5
    assert {"gemm", "attention", "norm", "loss"} <= set(eager["ops"])
    assert eager["steps"]["overall"]["mape"] < 10 and "train" not in {row["role"] for row in eager["steps"]["runs"]}
    assert [row["error_percent"] for row in eager["memory"]] == pytest.approx([0.0] * len(eager["memory"]), abs=1e-6)
    assert len(eager["stand_ins"]) == 3 and not figures["variants"]["compiled"]["stand_ins"]
    assert max(abs(row["error_percent"]) for row in eager["stand_ins"]) < 15
    assert [note.partition(":")[0] for note in figures["notes"]] == ["eager", "compiled"]
    assert all("not measured: " in note for note in figures["notes"])
    assert {"summary.json", "summary.txt", "predicted_vs_measured.png"} <= {
        path.name for path in brought_back.iterdir()
    }
    assert json.loads((brought_back / "summary.json").read_text())["variants"].keys() == figures["variants"].keys()


def test_what_came_out_is_shown_again(figures: dict[str, Any], brought_back: Path) -> None:
    assert describe(brought_back)["text"] == figures["text"]
    assert f"eager: {brought_back / 'predictor-eager'}" in figures["text"]


def test_the_text_tells_all_of_it(figures: dict[str, Any]) -> None:
    for words in (
        "== eager: h200-sxm-141gb", "== compiled:", "held-out ops", "mean error", "peak memory", "stand-ins",
        "not measured",
    ):  # fmt: skip
        assert words in figures["text"]


def test_plans_are_written_once_and_tell_how_to_run_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.STUDY.main(["--plan-only", "--device", "cuda", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "about" in said and "python -m harness collections/NAME/plan.json --out collections/NAME" in said
    assert "for h200-sxm-141gb" in said
    assert {path.parent.name for path in tmp_path.glob("collections/*/plan.json")} == {"ops", "eager", "compiled"}
    with pytest.raises(CollectError, match="a folder holds one study"):
        write_plans(tmp_path, "cuda")


def test_plans_are_for_the_gpu_that_is_named(tmp_path: Path) -> None:
    assert "for a100-sxm-80gb" in write_plans(tmp_path / "a", hardware="a100-sxm-80gb")
    with pytest.raises(CollectError, match=r"--hardware must be one of .*h100-sxm-80gb.*, got 'h100'"):
        write_plans(tmp_path / "b", hardware="h100")
    with pytest.raises(CollectError, match="--hardware names a GPU"):
        write_plans(tmp_path / "b", "cpu", hardware="h100-sxm-80gb")


def test_another_gpu_than_the_plans_are_for_teaches_nothing(
    brought_back: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its times would answer for jobs on the one that was named."""
    monkeypatch.setattr(study, "num_gpus", lambda: 0)
    shutil.copytree(brought_back / "collections", tmp_path / "collections")
    for path in tmp_path.glob("collections/*/runs/*/manifest.json"):
        path.write_text(path.read_text().replace("NVIDIA H200", "NVIDIA A100-SXM4-80GB"))
    with pytest.raises(CollectError, match=r"made for h200.*, and ran on NVIDIA A100.*--hardware a100-sxm-80gb"):
        run_study(tmp_path)


def test_what_holds_no_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "num_gpus", lambda: 0)
    write_plans(tmp_path, "cuda")
    assert study.STUDY.main(["--out", str(tmp_path)]) == 2
    assert "there is no GPU here; measure where there is one" in capsys.readouterr().err


def test_devices_have_the_names_of_presets() -> None:
    assert study._hardware("NVIDIA H200") == "h200-sxm-141gb"
    assert study._hardware("Some GPU") == "local-gpu"


def _events(folder: Path, name: str, seconds: float) -> None:
    record = {"op": {"kind": "add", "dims": [8], "dtype": "fp32"}, "seconds": seconds}
    (folder / "events").mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text('{"schema": 1, "runs": [], "events": []}')
    (folder / "events" / f"{name}.json").write_text(json.dumps({"schema": 1, "busy": 1, "records": [record]}))


def test_what_judges_is_read_apart(tmp_path: Path) -> None:
    _events(tmp_path, "train", 1.0)
    _events(tmp_path, "heldout", 2.0)
    (add,) = study.measured_ops([tmp_path], heldout=False)
    assert study.measured_ops([tmp_path], heldout=False) == {add: 1.0}
    assert study.measured_ops([tmp_path], heldout=True) == {add: 2.0}
