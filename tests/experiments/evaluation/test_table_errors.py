"""Errors on tables of ops and collectives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.dataset.base.errors import TableError
from stepsight.dataset.hardware.hardware import alpha_beta_seconds, find_fabric, find_hardware, roofline_seconds
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, SourceFile
from stepsight.experiments.evaluation.table_errors import judge_table, table_errors_text

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
