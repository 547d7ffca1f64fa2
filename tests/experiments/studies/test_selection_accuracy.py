"""Orders in which products are measured, on a made-up device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.reports.plots import plot_error_curves
from stepsight.experiments.studies import selection_accuracy as study
from stepsight.training.predictor.predictor import teacher_of
from stepsight.training.transfer.transferred import Transfer

GPU = find_hardware("l40s-pcie-48gb")
assert GPU is not None
OPS = [Op("linear", (m, n, k)) for m in (256, 1024, 4096) for n in (512, 2048, 8192) for k in (1024, 4096)]


@pytest.mark.parametrize("name", list(study.ORDERS))
def test_an_order_holds_every_product_once(name: str) -> None:
    transfer = Transfer(GPU, (teacher_of("a100-sxm"),))
    for wanted in ({}, {OPS[4]: 0.75, OPS[9]: 0.25}):
        assert sorted(study.ORDERS[name](transfer, OPS, 0, wanted).tolist()) == list(range(len(OPS)))


def test_plan_profile_begins_where_the_jobs_spend_their_time() -> None:
    """A product that takes nearly all of the time is measured first."""
    transfer = Transfer(GPU, (teacher_of("a100-sxm"),))
    assert study.chosen_order(transfer, OPS, 0, {OPS[4]: 0.99, OPS[9]: 0.01})[0] == 4


def test_a_grid_begins_with_one_product_of_each_corner() -> None:
    first = study.grid_order(Transfer(GPU, ()), OPS, 0, {})[:8]
    assert len({tuple(np.array(OPS[place].dims) >= (1024, 2048, 2048)) for place in first.tolist()}) == 8


def test_enough_is_the_least_part_that_is_as_good_as_all() -> None:
    rows = [("plan-profile", 0.1, 9.0), ("plan-profile", 0.3, 8.1), ("random", 0.3, 9.0), (study.FULL, 1.0, 8.0)]
    points = [study.Point("gpu", name, part, 1.0, error, 0.0) for name, part, error in rows]
    assert study.needed(points) == {"gpu": {name: 0.3 if name == "plan-profile" else None for name in study.ORDERS}}


def test_missing_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["--data", str(tmp_path), "--only", "l40s-pcie-48gb"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_curves_are_drawn_for_each_device(tmp_path: Path) -> None:
    """The full profile is a level, every order a line."""
    rows = [("gpu", "random", minutes, 10 / minutes) for minutes in (1.0, 2.0)] + [("gpu", study.FULL, 4.0, 3.0)]
    plot_error_curves(rows, tmp_path / "curves.svg", "minutes")
    assert (tmp_path / "curves.svg").read_text().count("<svg") == 1
