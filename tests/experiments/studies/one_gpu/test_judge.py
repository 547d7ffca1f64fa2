"""Figures say what they are named for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepsight.experiments.studies import one_gpu_judge as judge


def _row(family: str, dtype: str, measured: float, predicted: float) -> dict[str, Any]:
    return {"family": family, "dtype": dtype, "measured_s": measured, "predicted_s": predicted}


def test_errors_of_all_ops_and_of_long_ones() -> None:
    rows = [_row("gemm", "bf16", 1e-5, 1.2e-5), _row("gemm", "fp8", 1e-4, 0.9e-4), _row("norm", "bf16", 1e-3, 1e-3)]
    found = judge.op_figures(rows)
    assert list(found) == ["all", "gemm", "gemm/bf16", "gemm/fp8", "norm"]
    assert found["all"]["mape"] == pytest.approx(10.0)
    assert (found["all"]["long_rows"], found["all"]["long_mape"]) == (2, pytest.approx(5.0))
    assert "long_mape" not in found["gemm/bf16"]
    assert judge.op_figures([]) == {}


def _events(folder: Path, name: str, seconds: float) -> None:
    record = {"op": {"kind": "add", "dims": [8], "dtype": "fp32"}, "seconds": seconds}
    (folder / "events").mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text('{"schema": 1, "runs": [], "events": []}')
    (folder / "events" / f"{name}.json").write_text(json.dumps({"schema": 1, "busy": 1, "records": [record]}))


def test_what_judges_is_read_apart(tmp_path: Path) -> None:
    _events(tmp_path, "train", 1.0)
    _events(tmp_path, "heldout", 2.0)
    (add,) = judge.measured_ops([tmp_path], heldout=False)
    assert judge.measured_ops([tmp_path], heldout=False) == {add: 1.0}
    assert judge.measured_ops([tmp_path], heldout=True) == {add: 2.0}
