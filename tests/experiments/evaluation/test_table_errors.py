"""Errors on tables of ops and collectives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.dataset.base.errors import TableError
from stepsight.dataset.hardware.hardware import alpha_beta_seconds, find_fabric, find_hardware, roofline_seconds
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, SourceFile
from stepsight.experiments.evaluation.table_errors import COMPILED, judge_collection, judge_table, table_errors_text
from stepsight.training.fitting.own_table import pack_shapes, shape_of
from stepsight.training.shipped.catalogue import shipped_predictor
from tests.dataset.run_folders import write_run

FABRIC, GPU = find_fabric("dgx-a100"), find_hardware("a100-sxm-80gb")
assert GPU is not None
SUM = Collective("all_reduce", 1 << 26, 16, 8)
WORKS = (SUM, Collective("all_reduce", 1 << 26, 512, 8), Collective("all_reduce", 8, 8, 8), Op("add", (1 << 30,)))


def _table(fabrics: tuple[str, ...] = ("dgx-a100",) * 3, slower: float = 1.25) -> Measurements:
    """Everything takes ``slower`` times what hardware facts say."""
    facts = [roofline_seconds(w, GPU) if isinstance(w, Op) else alpha_beta_seconds(w, FABRIC) for w in WORKS]
    names = (GPU.name,) * len(WORKS)
    text = ("",) * len(WORKS)
    files = {"a": SourceFile("MIT", "0")}
    seconds = slower * np.array(facts)
    return Measurements(WORKS, seconds, names, (*fabrics, ""), text, ("a",) * len(WORKS), files)


def test_rows_are_grouped_by_kind_size_and_ranks() -> None:
    result = judge_table(_table(), lambda device: None)
    assert [group[:3] for group in result.groups] == [
        ("add", ">= 1 ms", ""),
        ("all_reduce", "< 32 KiB", "within a node"),
        ("all_reduce", "32 MiB to 1 GiB", "<= 64 ranks"),
        ("all_reduce", "32 MiB to 1 GiB", "> 256 ranks"),
    ]
    assert all(group[3].mape == pytest.approx(20) for group in result.groups)
    assert result.overall.used == 4 and result.overall.bias == pytest.approx(-20)
    assert "within a node" in table_errors_text(result)


def test_stated_links_replace_those_of_the_rows() -> None:
    """Without them, rows on a fabric that nobody knows are left out and counted."""
    table = _table(("somewhere",) * 3)
    result = judge_table(table, lambda device: None)
    assert result.overall.used == 1
    assert result.skipped == {"no facts of the fabric 'somewhere': state its links with --fabric": 3}
    assert judge_table(table, lambda device: None, FABRIC).overall.used == 4
    with pytest.raises(TableError, match=r"none \(3: no facts of the fabric 'somewhere'"):
        judge_table(table.take([0, 1, 2]), lambda device: None)


def test_the_verb_takes_a_table(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    _table().to_parquet(path)
    done = CliRunner().invoke(app, ["evaluate", str(path), "--predictor", "roofline", "--fabric", "dgx-a100", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["overall"]["mape"] == pytest.approx(20)


def test_each_row_is_asked_with_the_software_that_ran_it() -> None:
    """Rows of software that the recipe of a shipped predictor does not name are left out, unless all are."""
    predictor = shipped_predictor("h100-sxm-80gb")
    assert predictor is not None
    op, ran = (
        Op("linear", (4096, 4096, 4096), "bf16"),
        ("SGLang 0.5 sglang_torch_linear", "TRTLLM 1.3 torch_flow", "own"),
    )
    truth = predictor.kernel.seconds([op] * 2, 1, [0, 1])
    device, none = ("h100-sxm-80gb",) * 3, ("",) * 3
    table = Measurements(
        (op,) * 3, np.array([*truth, 1.0]), device, none, ran, ("a",) * 3, {"a": SourceFile("MIT", "0")}
    )
    result = judge_table(table, lambda _: predictor)
    assert truth[0] != truth[1] and result.overall.used == 2 and result.overall.max == pytest.approx(0)
    assert result.skipped == {"software that the predictor does not know: own": 1} and set(result.software) == set(
        ran[:2]
    )
    alone = judge_table(table, lambda _: predictor, software="OWN")
    assert alone.overall.used == 1 and alone.doubts[0].startswith("h100-sxm knows the software of no row")
    assert alone.to_dict()["warnings"] == list(alone.doubts)
    with pytest.raises(TableError, match="--software must be a part"):
        judge_table(table, lambda _: predictor, software="cudnn")


def test_rows_that_calibrated_the_network_do_not_judge(tmp_path: Path) -> None:
    """Those of the fitted file and shape alone."""
    predictor = shipped_predictor("a100-sxm-80gb")
    assert predictor is not None
    record = {"fitted_shapes": pack_shapes([shape_of(SUM)]), "files": ["0"]}
    own = replace(predictor, manifest={**predictor.manifest, "calibrated_links": record})
    assert judge_table(_table(), lambda _: own).skipped == {"the predictor was calibrated on it": 1}
    record["files"] = ["1"]
    assert judge_table(_table(), lambda _: own).skipped == {}


def test_a_collection_judges_a_predictor(tmp_path: Path) -> None:
    runs = tmp_path / "c"
    write_run(runs)
    told = judge_collection(runs, "roofline")
    assert len(told["runs"]) == told["overall"]["used"] == 1 and told["warnings"] == []
    assert told["interval_score"] > 0 and "mean error" in told["text"]
    assert told["runs"][0]["outside_percent"] == told["overall"]["outside_percent"] and "outside %" in told["text"]
    done = CliRunner().invoke(app, ["evaluate", str(runs), "--predictor", "roofline", "--json"])
    assert json.loads(done.stdout)["overall"]["mape"] == told["overall"]["mape"]


def test_compiled_runs_are_figures_of_their_own(tmp_path: Path) -> None:
    """A predictor that was taught no compiled kernels is not blamed for them in the mean of the others."""
    told = judge_collection(Path(__file__).parents[3] / "examples/collection", "roofline")
    compiled = [row for row in told["runs"] if row["role"] == "compiled"]
    (figures,) = told["apart"].values()
    assert figures["used"] == len(compiled) == 2 and told["overall"]["used"] == len(told["runs"]) - 2
    assert {row["apart"] for row in compiled} == set(told["apart"]) == {COMPILED}
    assert figures["mape"] == pytest.approx(np.mean([abs(row["error_percent"]) for row in compiled]))
    assert f"apart, {COMPILED} (2 runs): mean error" in told["text"]


def test_rows_of_devices_that_the_predictor_is_not_for_are_left_out() -> None:
    """Of several devices; the rows of an only one are predicted, with a doubt."""
    predictor, table = shipped_predictor("a100-sxm-80gb"), _table()
    assert predictor is not None
    some = replace(table, device=("t4-pcie-16gb",) + (predictor.hardware.name,) * (len(table) - 1))
    result = judge_table(some, lambda _: predictor)
    assert result.skipped == {"the predictor is for a100-sxm-80gb: t4-pcie-16gb": 1}
    assert result.overall.used == len(table) - 1
    alone = judge_table(replace(table, device=("t4-pcie-16gb",) * len(table)), lambda _: predictor)
    assert alone.doubts[0] == "the rows are of t4-pcie-16gb, the predictor is for a100-sxm-80gb"
    with pytest.raises(TableError, match=r"got none.*t4-pcie-16gb"):
        judge_table(replace(table, device=("t4-pcie-16gb", *("p4-pcie-8gb",) * (len(table) - 1))), lambda _: predictor)
