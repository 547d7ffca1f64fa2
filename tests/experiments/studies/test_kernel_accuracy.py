"""Held-out shapes of a made-up GPU whose products take a known part of the peak."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.hardware.physics import roofline_seconds
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies import kernel_accuracy
from stepsight.training.shipped.from_tables import OpRows

GPU = find_hardware("a100-sxm-80gb")
assert GPU is not None
SIZES = [(m, n, k) for m in (256, 512, 1024, 2048) for n in (512, 1024, 4096) for k in (512, 2048, 8192)]
OPS = tuple(Op("linear", size) for size in SIZES)
ROWS = OpRows(
    OPS + OPS,
    np.array([factor * roofline_seconds(op, GPU) for factor in (1.5, 1.6) for op in OPS]),
    np.repeat([0, 1], len(OPS)),
)


def test_what_is_held_out_is_held_out_whole() -> None:
    groups = list("aabbccddeeff")
    held = kernel_accuracy.held_out(groups, seed=0)
    assert {sum(held[i : i + 2]) for i in range(0, 12, 2)} == {0, 2}
    assert held.sum() == 2
    assert (kernel_accuracy.held_out(groups, seed=0) == held).all()


def test_errors_are_of_shapes_that_were_not_fitted() -> None:
    random, unseen = kernel_accuracy.figures_of("toy", ROWS, GPU)
    assert (random.split, unseen.split) == ("random", "unseen n, k")
    assert random.rows == 2 * (len(OPS) // 5)
    assert unseen.rows == 2 * 4
    for figure in (random, unseen):
        assert figure.mape < 8 < figure.roofline_mape
        assert figure.median <= figure.p90
    assert "own, long" in kernel_accuracy.kernel_text([random, unseen])


def test_software_that_nobody_ran_has_no_error() -> None:
    others = ROWS.take(np.flatnonzero(ROWS.variants == 1))
    random, _ = kernel_accuracy.figures_of("toy", others, GPU)
    assert np.isnan(random.own_mape) and random.mape < 8


def test_json_is_strict_and_missing_data_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernel_accuracy.main(["--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    monkeypatch.setattr(kernel_accuracy, "read_recipe", lambda recipe, data: (ROWS, {}))
    assert kernel_accuracy.main(["--data", str(tmp_path), "--only", "a100-sxm", "--json"]) == 0
    assert [row["ops"] for row in json.loads(capsys.readouterr().out)["figures"]] == ["gemm", "gemm"]
