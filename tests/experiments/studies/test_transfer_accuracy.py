"""A device from few measurements, on a made-up one that runs at another device's efficiency."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.hardware.physics import roofline_seconds
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies import transfer_accuracy
from stepsight.training.predictor.predictor import teacher_of
from stepsight.training.shipped.from_tables import CollectiveRows, OpRows
from stepsight.training.transfer.own_table import OwnTable

GPU = find_hardware("l40s-pcie-48gb")
assert GPU is not None


def test_other_devices_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten products at A100's efficiency say more with A100 known than alone."""
    sizes = [(m, n, k) for m in (256, 1024, 4096) for n in (512, 2048, 8192) for k in (1024, 4096)]
    ops = tuple(Op("linear", size) for size in sizes)
    seconds = 1.2 * np.exp(teacher_of("a100-sxm").efficiency(ops)) * [roofline_seconds(op, GPU) for op in ops]
    none = CollectiveRows((), (), np.zeros(0), np.zeros(0, dtype=np.bool_))
    rows = OwnTable(GPU, OpRows(ops, seconds, np.zeros(len(ops), np.int64)), {"gemm": ("blas",)}, none, "", {})
    monkeypatch.setattr(transfer_accuracy, "shipped_names", lambda: ("a100-sxm",))
    figure = transfer_accuracy.figure_of(transfer_accuracy.CASES[-1], rows, samples=10, seeds=1)
    assert figure.transfer < 3 and figure.transfer < figure.alone
    assert "twin known" in transfer_accuracy.transfer_text([figure])


def test_missing_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert transfer_accuracy.main(["--data", str(tmp_path), "--only", "l40s-pcie-48gb"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
