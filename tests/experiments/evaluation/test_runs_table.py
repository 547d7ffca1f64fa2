"""Tables of runs: usual names and units of columns, unknown cells, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.dataset.base.errors import TableError
from stepsight.experiments.evaluation.evaluate import evaluate
from stepsight.experiments.evaluation.runs_table import (
    RowError,
    columns,
    read_header,
    read_runs_table,
    template,
)
from tests.experiments.evaluation.run_tables import run_row, write_runs


def test_no_name_stands_for_two_columns() -> None:
    names = [name for column in columns() for name in (column.name, *column.others)]
    assert len(names) == len(set(names))


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
    with pytest.raises(TableError, match=r"got twice c0 \(c0, c0\)$"):
        read_header([f"c{number % 60000}" for number in range(120_000)])  # quadratic: a minute
    with pytest.raises(TableError, match=r"got twice c \(c, c, c\)$"):
        read_header(["c"] * 1000)
    assert read_header(["layers", "num_layers"]) == [("layers", 1.0), ("num_layers", 1.0)]  # the own name wins


def test_the_template_is_a_table_and_columns_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(template().replace("iteration_time_s", "step_time_ms").replace(",4.5", ",4500"))
    (row,) = read_runs_table(path)
    assert row.measured_s == pytest.approx(4.5) and row.gpus == 16
    told = CliRunner().invoke(app, ["evaluate", "--explain-columns"])
    assert told.exit_code == 0 and "num_hidden_layers" in told.stdout
    assert CliRunner().invoke(app, ["evaluate", "--template"]).stdout.strip() == template()


def test_packed_and_plain_tables(tmp_path: Path) -> None:
    """Whether a table is packed is seen from its content."""
    rows = [run_row(), run_row(row_id=2, gpus=32)]
    for name in ("runs.csv", "runs.csv.gz"):
        assert read_runs_table(write_runs(tmp_path / name, *rows)) == rows


BROKEN = gzip.compress(b"x" * 1000)[:10] + b"\xff" * 20


def test_cells() -> None:
    """Empty cells are unknown; numbers are numbers however they are written."""
    row = run_row(row_id="7.0", vocab="", tp="8", notes="SUSPECT: odd", quality="C", heads="many", layers=7.5)
    assert (row.row_id, row.whole("vocab"), row.whole("tp"), row.suspect, row.weak) == (7, None, 8, True, True)
    assert (row.flag("gated_mlp"), row.flag("tied_embeddings"), row.flag("experts")) == (False, True, None)
    with pytest.raises(RowError, match="vocab is unknown"):
        row.known("vocab")
    with pytest.raises(RowError, match="heads must be a whole number, got 'many'"):
        row.whole("heads")
    with pytest.raises(RowError, match="layers must be a whole number"):
        row.whole("layers")
    with pytest.raises(RowError, match="iteration_time_s is unknown"):
        _ = run_row(iteration_time_s="").measured_s
    for seconds in (0, -1, 1e-12, 1e17):
        with pytest.raises(RowError, match="iteration_time_s must lie within 1e-06 and 1e"):
            _ = run_row(iteration_time_s=seconds).measured_s
    with pytest.raises(RowError, match="gated_mlp must be yes or no, got '8x'"):
        run_row(gated_mlp="8x").flag("gated_mlp")
    assert run_row(row_id="²").row_id == "²"


def test_mistakes(tmp_path: Path) -> None:
    """The message names the file and the rule."""
    with pytest.raises(TableError, match=r"lacks source, hardware"):
        (tmp_path / "a.csv").write_text("row_id\n1\n")
        read_runs_table(tmp_path / "a.csv")
    with pytest.raises(TableError, match=r"e\.csv: a table has a column once, got twice row_id"):
        (tmp_path / "e.csv").write_text("row_id,row_id\n1,2\n")
        read_runs_table(tmp_path / "e.csv")
    for name, content in (
        ("c.csv.gz", gzip.compress(b"x" * 1000)[:20]),
        ("d.csv", b"\xff\xfe\x00"),
        ("f.csv.gz", BROKEN),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TableError, match=f"cannot read runs from .*{name}"):
            read_runs_table(tmp_path / name)
    with pytest.raises(TableError, match=r"cannot read runs from .*absent\.csv"):
        read_runs_table(tmp_path / "absent.csv")


def test_rows_without_a_number_have_that_of_their_line(tmp_path: Path) -> None:
    """Where there is no such column, and where its cell is empty; columns in capitals are the same ones."""
    path = write_runs(tmp_path / "runs.csv", run_row(row_id=""), run_row(row_id="mine"))
    assert [row.row_id for row in read_runs_table(path)] == [2, "mine"]
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.split(",", 1)[1] for line in [lines[0].upper(), *lines[1:]]))
    assert [row.row_id for row in read_runs_table(path)] == [2, 3]


@pytest.mark.parametrize(
    ("key", "cell", "told"),
    [
        ("layers", "thirty", "layers must be a whole number, got 'thirty'"),
        ("layers", "8.5", "layers must be a whole number, got 8.5"),
        ("layers", "1e300", "layers must lie within +-1e+18, got '1e300'"),
        ("gated_mlp", "perhaps", "gated_mlp must be yes or no, got 'perhaps'"),
        ("gated_mlp", "2", "gated_mlp must be yes or no, got '2'"),
        ("iteration_time_s", "-3.9", "iteration_time_s must lie within 1e-06 and 1e+07, got -3.9"),
        ("iteration_time_s", "soon", "iteration_time_s must be a number, got 'soon'"),
        ("iteration_time_s", "1_000", "iteration_time_s must be a number, got '1_000'"),
        ("layers", "\u0663", "layers must be "),
        ("gpus_per_node", "3", "gpus_per_node must be gpus, got 2 * 3 != 16"),
        ("dp", "3", "tp * pp * cp * dp must be gpus, got 8 * 3 != 16"),
        ("tp", "-2", "must be gpus, got -4 * 2 != 16"),
        ("micro_batch", "-2", "got -2"),
    ],
)
def test_a_wrong_cell_is_told_with_its_rule_and_value(key: str, cell: str, told: str, tmp_path: Path) -> None:
    rows = [run_row(), run_row(row_id=2, **{key: cell})]
    table = write_runs(tmp_path / "runs.csv", *rows)
    (why,) = evaluate(table, "roofline").skipped
    assert told in why
    (shared,) = evaluate(write_runs(table, *rows, run_row(row_id=3, **{key: f"{cell}5"})), "roofline").skipped
    assert shared == f"{why} and others"


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("")
    with pytest.raises(TableError, match=r"runs\.csv: .*but the file is empty$"):
        read_runs_table(tmp_path / "runs.csv")
