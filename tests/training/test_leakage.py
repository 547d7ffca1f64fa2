"""What trains and what judges stay apart: shipped predictors know public kernel and collective tables, and no run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from stepsight.dataset.base.files import digest_files
from stepsight.dataset.tables import read_table
from stepsight.training.predictor.predictor import SHIPPED, shipped_names
from stepsight.training.shipped import catalogue
from stepsight.training.shipped.catalogue import TableSource

DATA = Path(os.environ.get("STEPSIGHT_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.parametrize("name", shipped_names())
def test_no_run_was_fitted(name: str) -> None:
    """Neither by the manifest nor by what was saved: no constant, no residual, no scale."""
    manifest = json.loads((SHIPPED / name / "manifest.json").read_text())
    assert manifest["fitted_rows"] == [] and "calibration" not in manifest
    assert json.loads((SHIPPED / name / "intervals.json").read_text())["calibration"] == {"scale": 1.0}


@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the public data in {DATA}")
@pytest.mark.parametrize("name", shipped_names())
def test_every_source_is_a_table_of_kernels_or_collectives(name: str) -> None:
    """By content: each digest of the manifest is that of a file there, and none that of a table of runs."""
    sources = json.loads((SHIPPED / name / "manifest.json").read_text())["sources"]
    tables = {
        digest_files([path])
        for folder in ("kernels", "collectives")
        for path in (DATA / folder).rglob("*")
        if path.is_file()
    }
    assert {source["digest"] for source in sources.values()} <= tables
    runs = {digest_files([path]) for path in (DATA / "e2e").rglob("*") if path.is_file()}
    assert not runs & {source["digest"] for source in sources.values()}


@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the public data in {DATA}")
def test_retraining_records_every_file_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels, of other devices' kernels and of collectives, each with its licence."""
    own = TableSource("vidur", "kernels/vidur/compute/a100/microsoft", ("norm", "elementwise"))
    others = TableSource("simumax", "kernels/simumax/configs/system/a100_pcie.json")
    links = TableSource("vtrain", "collectives/vtrain/trace/a100")
    recipe = replace(catalogue.RECIPES["a100-sxm"], own=(own,), others=(others,), collectives=(links,))
    monkeypatch.setattr(catalogue, "RECIPES", {"small": recipe})
    catalogue.retrain("small", DATA, tmp_path / "small")
    found = json.loads((tmp_path / "small" / "manifest.json").read_text())
    read = {
        file: licensed.digest
        for source in (own, others, links)
        for file, licensed in read_table(source.format, DATA / source.path).files.items()
    }
    assert {file: source["digest"] for file, source in found["sources"].items()} == read
    assert all(source["licence"] for source in found["sources"].values()) and found["fitted_rows"] == []
