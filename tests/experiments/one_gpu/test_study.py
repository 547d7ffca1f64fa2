"""The whole way of a GPU's study, from what was brought back to figures; and what a study refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.errors import CollectError
from stepsight.experiments.one_gpu import main, study
from stepsight.experiments.one_gpu.study import Asked, run, write_plans


@pytest.fixture(scope="module")
def figures(brought_back: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "_has_gpu", lambda: False)
        return run(Asked(brought_back, tables=brought_back / "collections"))


def test_what_was_brought_back_is_judged(figures: dict[str, Any], brought_back: Path) -> None:
    """Ops take a third more than their roofline: all is found again, and what is absent is said."""
    assert set(figures["variants"]) == {"eager", "compiled"}
    eager = figures["variants"]["eager"]
    assert eager["ops"]["all"]["long_mape"] < 5
    assert {"gemm", "attention", "norm", "loss"} <= set(eager["ops"])
    assert eager["step_figures"]["all"]["mape"] < 10
    assert eager["step_figures"]["launch-bound"]["rows"] == 1
    assert [row["measured_bytes"] for row in eager["memory"]] == [
        pytest.approx(row["with_libraries_bytes"]) for row in eager["memory"]
    ]
    assert len(eager["stand_ins"]) == 3 and not figures["variants"]["compiled"]["stand_ins"]
    assert max(abs(row["error_percent"]) for row in eager["stand_ins"]) < 15
    assert [note.partition(":")[0] for note in figures["notes"]] == ["eager", "compiled"]
    assert all("not measured: " in note for note in figures["notes"])
    assert {"summary.json", "summary.txt", "error_against_minutes.png", "predicted_vs_measured.png"} <= {
        path.name for path in brought_back.iterdir()
    }
    assert json.loads((brought_back / "summary.json").read_text())["variants"].keys() == figures["variants"].keys()


def test_the_curve_has_nested_parts(figures: dict[str, Any]) -> None:
    rows = figures["variants"]["eager"]["curve"]
    assert [row["part"] for row in rows] == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0]
    assert [row["minutes"] for row in rows] == sorted(row["minutes"] for row in rows)
    assert rows[-1]["minutes"] < 10 and rows[-1]["ops"] == figures["variants"]["eager"]["num_training_ops"]
    assert rows[-1]["op_mape"] < rows[0]["op_mape"]


def test_the_text_tells_all_of_it(figures: dict[str, Any]) -> None:
    for words in (
        "== eager: h200-sxm-141gb", "== compiled:", "held-out ops", "held-out steps", "by regressors alone",
        "peak memory of held-out runs: mean error", "stand-ins", "ops that teach",
        "1980 (1755)", "sw_power_cap 25 %", "not measured",
    ):  # fmt: skip
        assert words in figures["text"]


def test_plans_are_written_once_and_tell_how_to_run_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan-only", "--device", "cuda", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "about" in said and "python -m harness FOLDER/plan.json --out FOLDER" in said
    assert {path.parent.name for path in tmp_path.glob("collections/*/plan.json")} == {"ops", "eager", "compiled"}
    with pytest.raises(CollectError, match="a folder holds one study"):
        write_plans(Asked(tmp_path, "cuda"))


def test_what_holds_no_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "_has_gpu", lambda: False)
    write_plans(Asked(tmp_path, "cuda"))
    assert main(["--out", str(tmp_path)]) == 2
    assert "error: a study needs runs" in capsys.readouterr().err
    assert main(["--out", str(tmp_path), "--tables", str(tmp_path / "none")]) == 2


def test_devices_have_the_names_of_presets() -> None:
    assert study._hardware("NVIDIA H200") == "h200-sxm-141gb"
    assert study._hardware("Some GPU") == "local-gpu"
