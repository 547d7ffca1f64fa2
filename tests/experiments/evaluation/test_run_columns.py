"""Usual names and units of columns."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.dataset.base.errors import TableError
from stepsight.experiments.evaluation.run_columns import COLUMNS, read_header, template
from stepsight.experiments.evaluation.runs_table import NEEDED, read_runs_table


def test_no_name_stands_for_two_columns() -> None:
    names = [name for column in COLUMNS for name in (column.name, *column.others)]
    assert len(names) == len(set(names)) and set(NEEDED) <= set(names)


@pytest.mark.parametrize(
    ("written", "name", "factor"),
    [
        ("num_layers", "layers", 1.0),
        (" N_GPUs ", "gpus", 1.0),
        ("step_time_ms", "iteration_time_s", 1e-3),
        ("Step Time (ms)", "iteration_time_s", 1e-3),
        ("elapsed_time_per_iteration [ms]", "iteration_time_s", 1e-3),
        ("iteration_time_s", "iteration_time_s", 1.0),
        ("peak_memory_gib", "memory_gb", 1.073741824),
        ("my_column", "my_column", 1.0),
    ],
)
def test_usual_names_and_units(written: str, name: str, factor: float) -> None:
    assert read_header([written]) == [(name, factor)]


def test_a_units_mistake_and_a_column_twice() -> None:
    with pytest.raises(TableError, match=r"unit of 'step_time \(kg\)' must be one of s, sec"):
        read_header(["step_time (kg)"])
    with pytest.raises(TableError, match=r"got twice layers \(num_layers, n_layers\)"):
        read_header(["num_layers", "n_layers"])
    assert read_header(["layers", "num_layers"]) == [("layers", 1.0), ("num_layers", 1.0)]  # the own name wins


def test_the_template_is_a_table_and_columns_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(template().replace("iteration_time_s", "step_time_ms").replace(",4.5", ",4500"))
    (row,) = read_runs_table(path)
    assert row.measured_s == pytest.approx(4.5) and row.gpus == 16
    told = CliRunner().invoke(app, ["evaluate", "--explain-columns"])
    assert told.exit_code == 0 and "num_hidden_layers" in told.stdout
    assert CliRunner().invoke(app, ["evaluate", "--template"]).stdout.strip() == template()
