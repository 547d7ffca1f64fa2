"""Figures say what they are named for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tables import Measurements
from stepsight.dataset.tables.measurements import SourceFile
from stepsight.experiments.studies import one_gpu_judge as judge
from stepsight.training.collectives.collective_models import fit_collectives
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.predictor.predictor import Predictor

OPS = [Op("linear", (m, n, n), "bf16") for m in (64, 128, 256, 512) for n in (512, 1024, 2048, 4096)]


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


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    hardware = find_hardware("h200-sxm-141gb")
    assert hardware is not None
    seconds = np.array([5e-6 + op.flops / 5e14 for op in OPS])
    return Predictor(hardware, fit_kernels(OPS, 1, seconds, hardware), fit_collectives([], [], np.zeros(0)))


def test_agreement_is_ours_over_theirs_of_ops_within_our_reach(predictor: Predictor) -> None:
    """What was measured counts before what is predicted; other devices and ops far outside do not count."""
    theirs = [*OPS, Op("linear", (512, 4096, 400000), "bf16"), OPS[0]]
    seconds = np.array([2 * (5e-6 + op.flops / 5e14) for op in theirs])
    count = len(theirs)
    table = Measurements(
        tuple(theirs), seconds, ("h200-sxm-141gb",) * (count - 1) + ("a100-sxm-80gb",), ("",) * count,
        ("lib",) * count, ("file",) * count, {"file": SourceFile("MIT", "")},
    )  # fmt: skip
    rows = judge.agreement(predictor, {OPS[0]: 100 * seconds[0]}, table, "h200-sxm-141gb")
    whole = rows[0]
    assert (whole["ops"], whole["size"], whole["rows"], whole["same"]) == ("linear/bf16", "all", len(OPS), 1)
    assert whole["median"] == pytest.approx(0.5, rel=0.05)
    assert sum(row["rows"] for row in rows[1:]) == len(OPS)
    assert judge.agreement(predictor, {}, table, "b200-sxm-180gb") == []


def test_words_of_sizes() -> None:
    words = [judge._words(*pair) for pair in ((0.0, float("inf")), (0.0, 10.0), (10.0, 20.0), (1000.0, float("inf")))]
    assert words == ["all", "below 10 us", "10 to 20 us", "1000 us and more"]
