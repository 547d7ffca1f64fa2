"""Tables of measurements: rows, subsets, and files."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, SourceFile

GEMM, NORM = Op("linear", (8, 16, 32)), Op("layer_norm", (8, 16), "fp16")
ALL_REDUCE = Collective("all_reduce", 1024, 8, 4)


def table() -> Measurements:
    return Measurements(
        works=(GEMM, NORM, ALL_REDUCE),
        seconds=np.array([1e-6, 2e-6, 3e-6]),
        device=("a100-sxm-80gb", "h100-sxm-80gb", "a100-sxm-80gb"),
        fabric=("", "", "dgx-a100"),
        software=("cublas 12", "torch 2", "nccl 2"),
        source=("x/a", "x/a", "x/b"),
        files={"x/a": SourceFile("MIT", "00"), "x/b": SourceFile("Apache-2.0", "01")},
        skipped={"no time": 2},
    )


def same(one: Measurements, other: Measurements) -> bool:
    names = ("works", "device", "fabric", "software", "source", "files", "skipped")
    return np.array_equal(one.seconds, other.seconds) and all(getattr(one, n) == getattr(other, n) for n in names)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    table().to_parquet(tmp_path / "table.parquet")
    assert same(Measurements.from_parquet(tmp_path / "table.parquet"), table())


def test_an_empty_table_has_a_file_too(tmp_path: Path) -> None:
    empty = Measurements.concat([])
    empty.to_parquet(tmp_path / "table.parquet")
    assert len(Measurements.from_parquet(tmp_path / "table.parquet")) == 0


def test_rows_are_chosen_by_kind_and_device() -> None:
    """Of what is left, only its own files are told."""
    left = table().where(kind=("linear", "all_reduce"), device="a100-sxm-80gb")
    assert left.works == (GEMM, ALL_REDUCE) and set(left.files) == {"x/a", "x/b"}
    assert set(table().where(kind="all_reduce").files) == {"x/b"}
    assert table().take([2, 0]).works == (*table().take(np.array([False, True, True])).works[1:], GEMM)


def test_tables_add_up() -> None:
    both = Measurements.concat([table(), table()])
    assert len(both) == 6 and both.works == table().works * 2 and both.skipped == {"no time": 4}


@pytest.mark.parametrize("seconds", [0.0, -1.0, np.nan, np.inf, 1e303])
def test_a_time_is_positive_and_finite(seconds: float) -> None:
    with pytest.raises(TableError, match="seconds of a measurement must be from"):
        Measurements((GEMM,), np.array([seconds]), ("",), ("",), ("",), ("x",), {"x": SourceFile("MIT", "")})


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    pq.write_table(pa.table({"kind": ["linear"]}), tmp_path / "other")
    for name in ("text", "other", "absent"):
        with pytest.raises(TableError, match=name):
            Measurements.from_parquet(tmp_path / name)
