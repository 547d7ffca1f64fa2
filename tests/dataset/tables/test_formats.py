"""Formats: what is refused, and what a summary and the command line say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import TableError, TraceError
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import (
    FORMATS,
    Measurements,
    check_table_output,
    read_table,
    summary,
    summary_text,
)
from stepsight.dataset.tables.formats import Format, read_collection_table
from stepsight.testing import TableReaderContract
from tests.dataset.kineto_files import KinetoFile
from tests.dataset.run_folders import write_events, write_run

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
    (tmp_path / "mine.csv").write_text(_TEXT.replace("x2,", ","))
    done = _run("csv", tmp_path / "mine.csv", "--out", tmp_path / "table.parquet")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "mine.csv, row 1: linear takes non-negative dims" in done.stderr
    assert not (tmp_path / "table.parquet").exists()


class TestOwnCsv(TableReaderContract):
    format = "csv"
    tells_software = False
    place = "mine.csv"
    text = (
        "op,dims,dtype,microseconds,device,num_bytes,group_size,ranks_per_node\n"
        "linear,4096x4096x1024,bf16,150.5,a100-sxm-80gb,,,\n"
        "attention,1x32x8x4096x4096x128x0,fp16,1500,a100-sxm-80gb,,,\n"
        "gelu,1048576,,,a100-sxm-80gb,,,\n"
        "all_reduce,,,73.25,a100-sxm-80gb,1048576,16,8\n"
    )

    def test_ops_and_collectives_stand_in_one_table(self, table: Measurements) -> None:
        assert table.works == (
            Op("linear", (4096, 4096, 1024), "bf16"),
            Op("attention", (1, 32, 8, 4096, 4096, 128, 0), "fp16"),
            Collective("all_reduce", 1048576, 16, 8),
        )
        assert table.seconds.tolist() == pytest.approx([150.5e-6, 1500e-6, 73.25e-6])
        assert table.skipped == {"no time": 1}


def test_a_column_stands_once(tmp_path: Path) -> None:
    """Which of two would count nobody could say."""
    path = tmp_path / "mine.csv"
    path.write_text("op,dims,microseconds, op,microseconds\nlinear,2x2x2,1,linear,2\n")
    with pytest.raises(TableError, match=r"mine\.csv: a table has a column once, got twice microseconds, op"):
        read_table("csv", path)
    path.write_text(",".join(f"c{number % 60000}" for number in range(120_000)) + "\n")  # quadratic: a minute
    with pytest.raises(TableError, match=r"got twice c0, c1, c10 and 59997 more$"):
        read_table("csv", path)


def test_usual_words_and_units(tmp_path: Path) -> None:
    """Sizes in columns of their own, milliseconds, semicolons, and the words of PyTorch and of benchmarks."""
    path = tmp_path / "mine.csv"
    path.write_text("kernel;m;n;k;dtype;latency_ms\ngemm;16;32;64;torch.bfloat16;0.5\naten::mm;16;32;64;half;0.25\n")
    table = read_table("csv", path)
    assert table.works == (Op("linear", (16, 32, 64), "bf16"), Op("linear", (16, 32, 64), "fp16"))
    assert table.seconds.tolist() == pytest.approx([0.5e-3, 0.25e-3])
    path.write_text("op,num_bytes,group_size,ranks_per_node,us\nAllReduce,1024,8,8,20\nall-gather,1024,8,8,20\n")
    assert [work.kind for work in read_table("csv", path).works] == ["all_reduce", "all_gather"]
    path.write_text('op,dims,microseconds\nlinear,"(4, 8, 16)",1\nlinear,4*8*32,1\n')
    assert [work.dims for work in read_table("csv", path).works if isinstance(work, Op)] == [(4, 8, 16), (4, 8, 32)]
    path.write_text("op,dims,cycles\nlinear,4x4x4,1\n")
    with pytest.raises(TableError, match=r"one column with the time .*, got none"):
        read_table("csv", path)
    path.write_text("op,dims,time_us,latency_ms\nlinear,4x4x4,1,2\n")
    with pytest.raises(TableError, match=r"one column with the time .*, got time_us and latency_ms: rename or remove"):
        read_table("csv", path)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("einsum,4x4x4,bf16,1", "op kind must be one of"),
        ("linear,4x4,bf16,1", "linear takes non-negative dims"),
        ("linear,4x4.5x4,bf16,1", "dims must be whole numbers joined by x"),
        ("linear,4x0x4,bf16,1", "dims must be >= 1"),
        ("linear,4x4x4,int8,1", "dtype must be one of"),
        ("linear,4x4x4,bf16,fast", "microseconds must be a number"),
        ("all_reduce,,,1", "all_reduce needs columns num_bytes"),
        ("linear,4x4x4", "a row must have 4 cells"),
    ],
)
def test_a_mistake_is_told_by_row_and_rule(tmp_path: Path, row: str, rule: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"op,dims,dtype,microseconds\n{row}\n")
    with pytest.raises(TableError, match=f"mine.csv, row 1: .*{rule}"):
        read_table("csv", path)
    path.write_text(f"op,dims,dtype,microseconds\nlinear,2x2x2,bf16,1\n{row}\n{row}\n")
    table = read_table("csv", path)
    ((reason, count),) = table.skipped.items()
    assert len(table) == 1 and count == 2 and re.search(rf"^{rule}.*\(the first in row 2\)$", reason)


def test_every_row_is_used_or_listed(tmp_path: Path) -> None:
    """In the JSON of the command: as many as the file has."""
    (tmp_path / "mine.csv").write_text(_TEXT + "einsum,8x8x2,bf16,5,\nlinear,8x8,bf16,5,\nlinear,8x8x2,bf16,5,\n\n")
    told = json.loads(_run("csv", tmp_path / "mine.csv", "--json").stdout)
    assert told["rows_used"] == 2 and sum(told["rows_left_out"].values()) == 5
    assert {"no time": 1, "equal in all to another row": 1}.items() <= told["rows_left_out"].items()


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("all_reduce,,1,1024,16,5", "row 1: ranks_per_node must divide group_size, got 16 % 5"),
        ("all_reduce,,1,1024,2,8", "row 1: ranks_per_node must divide group_size, got 2 % 8"),
        (f"all_reduce,,1,{2**63},8,8", "sizes must be <= 281474976710656 and a time from "),
        (f"linear,{10**30}x4x4,1,,,", "sizes must be <= 281474976710656"),
        (f"linear,{'9' * 5000}x4x4,1,,,", "row 1: "),
        ("linear,4x4x4,1e300,,,", r"a time from 1e-09 to 1e\+06 s"),
        ("linear,4x4x4,1e-30,,,", r"a time from 1e-09 to 1e\+06 s"),
        ("linear,4x4x4,,,,", r"must hold a row with a time, got none \(1 rows without\)"),
    ],
)
def test_what_nobody_measured_is_refused(tmp_path: Path, row: str, rule: str) -> None:
    """Sizes beyond all memories, groups that no node can hold, tables without a time."""
    path = tmp_path / "mine.csv"
    path.write_text(f"op,dims,microseconds,num_bytes,group_size,ranks_per_node\n{row}\n")
    with pytest.raises(TableError, match=f"mine.csv.*{rule}"):
        read_table("csv", path)


def test_products_without_a_name_are_told_which_column_to_add(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("m,n,k,dtype,latency_ms\n8,8,8,bf16,0.1\n", "utf-8")
    with pytest.raises(TableError, match="add a column op \\(gemm for products of m, n, k\\)"):
        read_table("csv", tmp_path / "mine.csv")


def test_versions_are_part_of_the_software(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("op,dims,microseconds,software,cuda,nccl\nlinear,2x2x2,1,torch 2.9,12.8,\nlinear,2x2x4,1,,,2.27\n")
    assert read_table("csv", path).software == ("torch 2.9 cuda 12.8", "nccl 2.27")


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    write_run(tmp_path, 2)
    write_events(tmp_path)
    return tmp_path


def test_events_and_traces_are_rows_of_one_table(collection: Path) -> None:
    table = read_collection_table(collection)
    alone = [i for i, source in enumerate(table.source) if source == "events/ops-1"]
    assert [table.works[i] for i in alone] == [Op("linear", (4, 6, 8), "fp32"), Collective("all_reduce", 96, 2, 2)]
    within = [source for source in table.source if source.startswith("runs/one/rank")]
    assert len(within) == 2 * 8 == len(table) - 2
    assert (table.seconds > 0).all()


def test_parquet_keeps_everything(collection: Path) -> None:
    table = read_collection_table(collection)
    table.to_parquet(collection / "ops.parquet")
    again = Measurements.from_parquet(collection / "ops.parquet")
    assert (again.works, again.source, again.files) == (table.works, table.source, table.files)


def test_the_digest_follows_the_measurements(collection: Path) -> None:
    """A table says which files it is of, as they were."""
    first = read_collection_table(collection).files
    assert read_collection_table(collection).files == first
    (collection / "events" / "ops-1.json").write_text((collection / "events" / "ops-1.json").read_text() + " ")
    assert read_collection_table(collection).files != first


def test_ops_of_unknown_size_are_skipped(tmp_path: Path) -> None:
    file = KinetoFile().segment("step", 0, 100).segment("forward", 0, 90)
    file.event("cpu_op", "aten::mm", 5, 10, 100, {}).call("aten::gelu", 20, 10, [8])
    write_run(tmp_path, files=[file])
    table = read_collection_table(tmp_path)
    assert [work.kind for work in table.works] == ["gelu"] and sum(table.skipped.values()) == 1


@pytest.mark.parametrize(
    "changes", [{"schema": 3}, {"records": None}, {"records": [{"seconds": 1.0}]}, {"records": [{"op": {}}]}]
)
def test_a_wrong_event_file_is_refused(collection: Path, changes: dict[str, object]) -> None:
    write_events(collection, **changes)
    with pytest.raises(TraceError, match=r"ops-1\.json"):
        read_collection_table(collection)


def test_a_collection_without_measurements_is_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    table = read_collection_table(tmp_path)
    table.to_parquet(tmp_path / "ops.parquet")
    assert len(table) == len(Measurements.from_parquet(tmp_path / "ops.parquet")) == 0
