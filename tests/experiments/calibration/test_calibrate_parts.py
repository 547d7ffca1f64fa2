"""Calibrating on a cluster's own collectives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.dataset.base.errors import TableError
from stepsight.dataset.hardware.hardware import Link, find_fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.tables import Measurements, SourceFile
from stepsight.experiments.calibration.calibrate_parts import LARGER, LEFT_OUT, calibrate_links
from stepsight.experiments.questions.predictor_summary import predictor_text
from stepsight.training.collectives.between_nodes import BetweenNodes
from stepsight.training.predictor.predictor import Predictor

FABRIC = find_fabric("dgx-h100")
TRUTH = BetweenNodes({"all_reduce": np.array([2.0, 3.0, 4.0, 1.3, 1.3])}, {}, {})


def _table(path: Path, nodes: tuple[int, ...], truth: BetweenNodes = TRUTH, bandwidth: float = 50e9) -> Path:
    works = tuple(Collective("all_reduce", 1 << power, 8 * n, 8) for power in range(10, 33, 2) for n in nodes)
    seconds = truth.seconds(works, replace(FABRIC, inter_node=Link(bandwidth, 10e-6)))
    text = ("",) * len(works)
    device = ("h100-sxm-80gb",) * len(works)
    table = Measurements(works, seconds, device, text, text, ("a",) * len(works), {"a": SourceFile("MIT", "0")})
    table.to_parquet(path)
    return path


def test_small_groups_teach_and_larger_ones_judge(tmp_path: Path) -> None:
    report = calibrate_links(_table(tmp_path / "t.parquet", (2, 4, 8, 64)), "h100-sxm", FABRIC, tmp_path / "out")
    assert report.released and (report.values["fitted"], report.values["evidence"]["by"]) == (36, LARGER)
    evidence = report.values["evidence"]
    assert evidence["before"]["mape"] > 30 and evidence["after"]["mape"] < 10
    again = Predictor.load(tmp_path / "out")
    work = Collective("all_reduce", 1 << 24, 512, 8)
    assert again.collective.seconds([work], FABRIC)[0] == pytest.approx(TRUTH.seconds([work], FABRIC)[0], rel=0.15)
    assert again.manifest["calibrated_links"]["fabric"] == "dgx-h100"
    assert "calibrated on 36 collectives of unknown software in t.parquet" in predictor_text(tmp_path / "out", again)
    assert "wrote" in report.text


def test_another_version_or_environment_of_nccl_is_not_mixed_in(tmp_path: Path) -> None:
    """The software of most rows is taken, in and out of place; another one if it is asked for."""
    slow = BetweenNodes({"all_reduce": np.array([8.0, 9.0, 9.0, 2.0, 2.0])}, {}, {})
    one, other = (Measurements.from_parquet(_table(tmp_path / "a.parquet", (2, 4, 64), t)) for t in (TRUTH, slow))
    places = [f"nccl-tests nccl 2.27.3 {place}-place" for place in ("in", "out-of")]
    tables = [replace(one, software=(place,) * len(one)) for place in places]
    tables.append(replace(other, software=("nccl-tests nccl 2.18.3 NCCL_PROTO=Simple in-place",) * len(other)))
    Measurements.concat(
        replace(t, source=(str(i),) * len(t), files={str(i): t.files["a"]}) for i, t in enumerate(tables)
    ).to_parquet(tmp_path / "t.parquet")
    report = calibrate_links(tmp_path / "t.parquet", "h100-sxm", FABRIC, tmp_path / "out")
    told = report.values
    assert told["software"] == "nccl-tests nccl 2.27.3" and told["evidence"]["after"]["mape"] < 10
    assert told["left_out"] == {"nccl-tests nccl 2.18.3 NCCL_PROTO=Simple": 36}
    assert "left out 36 rows of other software" in report.text
    asked = calibrate_links(tmp_path / "t.parquet", "h100-sxm", FABRIC, tmp_path / "o", software="NCCL_PROTO=Simple")
    assert asked.values["software"].endswith("NCCL_PROTO=Simple") and asked.values["fitted"] == 24
    with pytest.raises(TableError, match="the software must contain 'rccl'"):
        calibrate_links(tmp_path / "t.parquet", "h100-sxm", FABRIC, tmp_path / "o", software="rccl")


def test_without_larger_groups_layouts_judge(tmp_path: Path) -> None:
    report = calibrate_links(_table(tmp_path / "t.parquet", (2, 4)), "h100-sxm", FABRIC, tmp_path / "out")
    evidence = report.values["evidence"]
    assert evidence["by"] == LEFT_OUT.format("layout") and evidence["after"]["used"] == report.values["fitted"] == 24


def test_a_site_with_one_layout_gains_by_what_its_sizes_say(tmp_path: Path) -> None:
    report = calibrate_links(_table(tmp_path / "t.parquet", (2,)), "h100-sxm", FABRIC, tmp_path / "out")
    evidence = report.values["evidence"]
    assert report.released and "size" in evidence["by"]
    assert evidence["after"]["mape"] < 0.5 * evidence["before"]["mape"]


def test_nothing_is_written_where_the_links_are_not_as_stated(tmp_path: Path) -> None:
    """The verb names what is wrong and exits with 2."""
    table = _table(tmp_path / "t.parquet", (2, 4, 8, 64), bandwidth=2e9)
    options = ["--predictor", "h100-sxm", "--fabric", "dgx-h100", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["calibrate", str(table), *options, "--json"])
    assert done.exit_code == 2 and not (tmp_path / "out").exists()
    answer = json.loads(done.stdout)
    assert not answer["released"] and "sockets transport" in answer["doubts"][0]


def test_a_table_needs_collectives_between_nodes(tmp_path: Path) -> None:
    table = _table(tmp_path / "t.parquet", (1,))
    with pytest.raises(TableError, match="at least 8 collectives between nodes, got 0"):
        calibrate_links(table, "h100-sxm", FABRIC, tmp_path / "out")
