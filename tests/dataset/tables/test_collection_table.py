"""A collection becomes a table of measurements like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables.collection_table import read_collection_table
from stepsight.dataset.tables.measurements import Measurements
from tests.dataset.kineto_files import KinetoFile
from tests.dataset.run_folders import write_events, write_run


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
