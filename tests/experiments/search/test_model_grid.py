"""The grid of placements holds every product of degrees, and names the best one beside the pure strategies."""

from __future__ import annotations

from pathlib import Path

import pytest

import stepsight
from stepsight.experiments.studies.distir import write_model

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq_len": 16, "batch": 8}


def test_every_placement_of_a_gpt2_is_predicted(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_model(tmp_path / "gpt2.pt2", SIZES)
    model = stepsight.TensorProgram.load(tmp_path / "gpt2.pt2", precision="bf16")
    grid = stepsight.model_grid(model, "h100-sxm-80gb", 4, micro_batches=(1, 2))
    degrees = {(each.data, each.tensor, each.pipeline) for each in grid.placements}
    assert degrees == {(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)}
    assert grid.best.seconds == min(each.seconds for each in grid.placements) and "best" in str(grid)
    assert grid.pure.keys() == {"data", "tensor", "pipeline"} and not grid.refused
    three = stepsight.model_grid(model, "h100-sxm-80gb", 3, micro_batches=(1,))
    assert {each.data for each in three.placements} == {1} and "multiple of 3" in three.refused[3, 1, 1, 1]
