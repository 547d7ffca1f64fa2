"""Formats: what is refused, and what a summary and the command line say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.tables import (
    FORMATS,
    Measurements,
    check_table_output,
    read_table,
    summary,
    summary_text,
)
from stepsight.dataset.tables.formats import Format

_TEXT = "op,dims,dtype,microseconds,device\nlinear,4x8x2,bf16,3,a100-sxm-80gb\nlinear,8x8x2,bf16,5,\nadd,64,,,\n"


def test_an_unknown_format_is_told_the_known(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=", ".join(FORMATS)):
        read_table("excel", tmp_path)


@pytest.mark.parametrize(
    ("read", "names", "licence", "message"),
    [
        (None, ".csv$", "MIT", "read of a table format must be a function of rows, got None"),
        (lambda: None, ".csv$", "MIT", r"read of a table format must take 1 \(rows\), got \(\)"),
        (print, "*.csv", "MIT", r"names of a table format must be a regular expression, got '\*.csv'"),
        (print, ".csv$", "", 'licence of a table format must be a text such as "unknown", got'),
    ],
)
def test_a_format_with_a_mistake_is_refused(read: Any, names: str, licence: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        Format(read, names, licence)


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("nothing")
    with pytest.raises(TableError, match="must hold files of format vidur"):
        read_table("vidur", tmp_path)


def test_a_summary_counts(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(_TEXT)
    told = summary(read_table("csv", tmp_path))
    assert told["rows"] == 2 and told["skipped"] == {"no time": 1}
    assert told["kinds"]["linear"] == {"rows": 2, "min_us": pytest.approx(3), "max_us": pytest.approx(5)}
    assert told["devices"] == {"": 1, "a100-sxm-80gb": 1}
    assert told["files"]["csv/mine.csv"]["licence"] == "unknown"
    text = summary_text(told)
    assert "2 measurements from 1 files" in text and "1  no time" in text


def test_nothing_is_written_over_what_is_read(tmp_path: Path) -> None:
    """Nor over a table of another form; a second time into the folder that was read is allowed."""
    for name in ("gemm_perf.parquet", "mine.csv", "table.parquet"):
        (tmp_path / name).write_text("x")
    own = tmp_path / "gemm_perf.parquet"
    for path, out in ((own, own), (tmp_path, own), (tmp_path / "mine.csv", tmp_path / "mine.csv"), (own, "a.csv")):
        with pytest.raises(TableError, match=r"not written over what they|are written to a \.parquet file"):
            check_table_output("aiconfigurator", path, Path(out))
    check_table_output("aiconfigurator", own, tmp_path / "new.parquet")
    check_table_output("csv", tmp_path, tmp_path / "table.parquet")


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepsight", "import", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_import_writes_the_table(tmp_path: Path) -> None:
    """``import`` prints what it found and writes what ``Measurements.from_parquet`` reads."""
    (tmp_path / "mine.csv").write_text(_TEXT)
    done = _run("csv", tmp_path / "mine.csv", "--out", tmp_path / "table.parquet", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 2 == len(Measurements.from_parquet(tmp_path / "table.parquet"))


def test_import_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(_TEXT.replace("4x8x2", "4x8"))
    done = _run("csv", tmp_path / "mine.csv", "--out", tmp_path / "table.parquet")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "mine.csv, row 1: linear takes non-negative dims" in done.stderr
    assert not (tmp_path / "table.parquet").exists()
