"""Errors on published runs as a preset, and that no interval depends on the source it is judged by."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.experiments.evaluation.evaluate import evaluate
from stepsight.training.corrections import intervals
from stepsight.training.corrections.intervals import FACTS_PRESET, Widths, published_widths
from tests.experiments.evaluation.run_tables import run_row, write_runs
from tools.shipped_data import main, widths_of


def test_a_table_becomes_a_preset(tmp_path: Path) -> None:
    """A line for every run whose hardware has a shipped predictor; others, and weak rows, are not in it."""
    rows = [run_row(), run_row(row_id=2, source="other", micro_batch=1), run_row(row_id=3, quality="C")]
    rows.append(run_row(row_id=4, hardware="MI300X", gpu_mem_gb=192))
    runs = write_runs(tmp_path / "runs.csv", *rows)
    assert main(["widths", str(runs), "--out", str(tmp_path / "widths.json")]) == 0
    found = widths_of(evaluate(runs).scored)
    assert {name: len(own) for name, own in found.sources.items()} == {"lab": 1, "other": 1}
    for name in ("widths.json", FACTS_PRESET):
        assert (tmp_path / name).read_text().count("\n") == 2


def test_a_missing_table_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["widths", str(tmp_path / "none.csv"), "--out", str(tmp_path / "widths.json")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "widths.json").exists()


def test_no_interval_depends_on_its_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset's errors of a source made a thousand times larger change no interval of that source's rows."""
    name = max(published_widths().sources, key=lambda name: len(published_widths().sources[name]))
    runs = write_runs(tmp_path / "runs.csv", run_row(source=name), run_row(source="new"))
    before = [(row.low_s, row.high_s) for row in evaluate(runs).scored]
    value = published_widths().to_dict()
    value["sources"][name] = [[*row[:-1], 9.0] for row in value["sources"][name]]
    changed = Widths.from_dict(value)
    monkeypatch.setattr(intervals, "published_widths", lambda **_: changed)
    after = [(row.low_s, row.high_s) for row in evaluate(runs).scored]
    assert after[0] == before[0]
    assert after[1] != before[1]
