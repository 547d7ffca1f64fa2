from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.dataset.errors import TraceError
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.store import COLUMNS, op_table, read_op_table, works, write_op_table
from tests.dataset.kineto_files import KinetoFile
from tests.dataset.run_folders import write_events, write_run


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    write_run(tmp_path, 2)
    write_events(tmp_path)
    return tmp_path


def test_events_and_traces_are_rows_of_one_table(collection: Path) -> None:
    frame = op_table(collection)
    assert list(frame.columns) == list(COLUMNS)
    alone, within = frame[~frame.in_context], frame[frame.in_context]
    assert list(alone.kind) == ["linear", "all_reduce"] and set(alone.role) == {"event"}
    assert list(alone.source) == ["events/ops-1"] * 2
    assert len(within) == 2 * 8 and set(within.run) == {"one"} and set(within.busy) == {2}
    assert (frame.seconds > 0).all()


def test_rows_become_signatures_again(collection: Path) -> None:
    frame = op_table(collection)
    found = works(frame)
    assert found[0] == Op("linear", (4, 6, 8), "fp32") and found[1] == Collective("all_reduce", 96, 2, 2)
    linears = [work for work in found if work.kind == "linear"]
    assert len(linears) == 3 and len({id(work) for work in linears}) == 1


def test_parquet_keeps_everything(collection: Path, tmp_path: Path) -> None:
    frame = op_table(collection)
    path = tmp_path / "tables" / "ops.parquet"
    write_op_table(frame, path)
    again = read_op_table(path)
    assert again.equals(frame) and again.attrs["digest"] == frame.attrs["digest"] != ""
    assert works(again) == works(frame)
    assert [entry.name for entry in path.parent.iterdir()] == ["ops.parquet"], "no temporary file is left"


def test_the_digest_follows_the_measurements(collection: Path) -> None:
    """A table is of the collection as it was."""
    first = op_table(collection)
    assert op_table(collection).attrs == first.attrs
    write_events(collection, "ops-2")
    assert op_table(collection).attrs != first.attrs


def test_ops_of_unknown_size_are_left_out(tmp_path: Path) -> None:
    file = KinetoFile().segment("step", 0, 100).segment("forward", 0, 90)
    file.event("cpu_op", "aten::mm", 5, 10, 100, {}).call("aten::gelu", 20, 10, [8])
    write_run(tmp_path, files=[file])
    assert list(op_table(tmp_path).kind) == ["gelu"]


@pytest.mark.parametrize(
    "changes", [{"schema": 3}, {"records": None}, {"records": [{"seconds": 1.0}]}, {"records": [{"op": {}}]}]
)
def test_a_wrong_event_file_is_refused(collection: Path, changes: dict[str, object]) -> None:
    write_events(collection, **changes)
    with pytest.raises(TraceError, match=r"ops-1\.json"):
        op_table(collection)


def test_a_file_that_is_no_op_table_is_refused(tmp_path: Path) -> None:
    import pandas as pd

    path = tmp_path / "ops.parquet"
    with pytest.raises(TraceError, match="must be a Parquet file"):
        read_op_table(path)
    path.write_text("seconds\n1\n")
    with pytest.raises(TraceError, match="must be a Parquet file"):
        read_op_table(path)
    pd.DataFrame({"seconds": [1.0]}).to_parquet(path)
    with pytest.raises(TraceError, match="must have columns"):
        read_op_table(path)


def test_a_collection_without_measurements_is_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    frame = op_table(tmp_path)
    assert len(frame) == 0 and works(frame) == []
    write_op_table(frame, tmp_path / "ops.parquet")
    assert len(read_op_table(tmp_path / "ops.parquet")) == 0
