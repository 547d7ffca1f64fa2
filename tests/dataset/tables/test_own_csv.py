"""A table of one's own."""

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, read_table
from stepsight.testing import TableReaderContract


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
        ("linear,4x4,bf16,1", "takes non-negative dims"),
        ("linear,4x4.5x4,bf16,1", "whole numbers joined by x"),
        ("linear,4x0x4,bf16,1", "dims must be >= 1"),
        ("linear,4x4x4,int8,1", "dtype must be one of"),
        ("linear,4x4x4,bf16,fast", "microseconds must be a number"),
        ("all_reduce,,,1", "needs columns num_bytes"),
        ("linear,4x4x4", "a row must have 4 cells"),
    ],
)
def test_a_mistake_is_told_by_row_and_rule(tmp_path: Path, row: str, rule: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"op,dims,dtype,microseconds\nlinear,2x2x2,bf16,1\n{row}\n")
    with pytest.raises(TableError, match=f"mine.csv, row 2: .*{rule}"):
        read_table("csv", path)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("all_reduce,,1,1024,16,5", "row 1: ranks_per_node must divide group_size, got 16 % 5"),
        ("all_reduce,,1,1024,2,8", "row 1: ranks_per_node must divide group_size, got 2 % 8"),
        (f"all_reduce,,1,{2**63},8,8", "sizes must be <= 281474976710656 and a time <= "),
        (f"linear,{10**30}x4x4,1,,,", "sizes must be <= 281474976710656"),
        (f"linear,{'9' * 5000}x4x4,1,,,", "row 1: "),
        ("linear,4x4x4,1e300,,,", "a time <= 1e"),
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
