from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.sharding import host_bytes, loads_of, placements_of
from stepsight.dataset.job.sharding_plans import plan_tables, read_plan

TABLES = [{"rows": 10_000, "dim": 64, "pooling": 4.0, "name": "users"}, {"rows": 500, "dim": 64, "name": "items"}]


def tables_of_job(tables: list[dict[str, Any]] | str = "", **more: Any) -> dict[str, Any]:
    return {
        "model": {"family": "dlrm", "tables": tables or TABLES},
        "batch": {"micro_batch": 64, "global_batch": 256, "precision": "fp32"},
        "cluster": {"hardware": "v100-sxm-32gb", "devices_per_node": 4},
        **more,
    }


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    for rule in ("table-wise", "row-wise", "column-wise", "data-parallel"):
        job = Job.from_dict(tables_of_job(sharding={"rule": rule}))
        places = placements_of(job.model.tables, job.sharding, job.table_ranks)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan_tables(job.model.tables, places, job.table_ranks)))
        assert read_plan(path) == places
        again = Job.from_dict(tables_of_job(sharding={"plan": str(path)}))
        assert placements_of(again.model.tables, again.sharding, again.table_ranks) == places


def test_job_files_round_trip() -> None:
    """With tables, placements and sizes that were left open."""
    job = Job.from_dict(tables_of_job(sharding={"tables": [{"name": "items", "kind": "data-parallel"}]}))
    assert Job.from_dict(job.to_dict()) == job and job.model.bottom_mlp == (512, 256, 64)


def test_other_jobs_have_no_keys_of_tables() -> None:
    model = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 16}
    tables = Job.from_dict({**tables_of_job(), "model": model}).to_dict()
    assert "sharding" not in tables and "tables" not in tables["model"]


def test_tables_come_from_the_catalogue_and_from_files(tmp_path: Path) -> None:
    assert len(Job.from_dict(tables_of_job("criteo-multihot-dcnv2", sharding={"rule": "row-wise"})).model.tables) == 26
    path = tmp_path / "tables.csv"
    path.write_text("name,rows,dim,pooling\nusers,10000,64,4\nitems,500,64,1\n")
    assert Job.from_dict(tables_of_job(str(path))).model == Job.from_dict(tables_of_job()).model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"family": "dlrm", "tables": [{"rows": 3, "dim": 64, "pooling": 4.0}]}},
         r"'t_cat_0' \(3 x 64\).*<= rows, got 4"),
        ({"model": {"family": "dlrm", "tables": [{"rows": 10**9, "dim": 64}]}, "sharding": {"rule": "table-wise"}},
         r"'t_cat_0' \(1000000000 x 64, 260000000000 bytes.*fits no device"),
        ({"sharding": {"tables": [{"name": "users", "kind": "table-wise", "ranks": [4]}]}},
         "ranks must lie from 0 to 3"),
        ({"sharding": {"tables": [{"name": "others", "kind": "table-wise", "ranks": [0]}]}}, "got others"),
        ({"sharding": {"tables": [{"name": "users", "kind": "column-wise", "ranks": [0, 1] * 40}]}},
         r"'users' \(10000 x 64.*each column shard must have a column, got 80 shards"),
        ({"sharding": {"tables": [{"name": "users", "kind": "table-wise", "ranks": [rank]} for rank in (0, 1)]}},
         r"places each table once, got 2 times table 'users'"),
        ({"parallel": {"tp": 2}}, "dlrm is data-parallel beside its tables"),
        ({"sharding": {"rule": "by-hand"}}, "sharding.rule must be one of auto"),
    ],
)  # fmt: skip
def test_broken_rules_name_the_table(change: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        Job.from_dict({**tables_of_job(), **change})


def test_a_plan_of_several_modules_places_each_table_once(tmp_path: Path) -> None:
    path, own = tmp_path / "plan.json", {"sharding_type": "table_wise", "ranks": [1]}
    path.write_text(json.dumps({"a": {"users": own, "items": own}, "b": {"users": own}}))
    with pytest.raises(JobError, match="got 2 times table 'users'"):
        Job.from_dict(tables_of_job(sharding={"plan": str(path)}))


def test_a_plan_has_every_table(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"ebc": {"users": {"sharding_type": "table_wise", "ranks": [1]}}}))
    with pytest.raises(JobError, match=r"misses table 'items' \(500 x 64, 130000 bytes"):
        Job.from_dict(tables_of_job(sharding={"plan": str(path)}))
    path.write_text("{}")
    with pytest.raises(JobError, match="has no table"):
        Job.from_dict(tables_of_job(sharding={"plan": str(path)}))


@pytest.mark.parametrize("sizes", [[9_993, 1, 3, 3], [-5, 5_005, 5_000, 0], [2_500, 5_000, 2_500, 0], ["x", 1, 1, 1]])
def test_shards_that_torchrec_would_not_cut_are_refused(sizes: list[Any], tmp_path: Path) -> None:
    job = Job.from_dict(tables_of_job(sharding={"rule": "row-wise"}))
    places = placements_of(job.model.tables, job.sharding, job.table_ranks)
    plan = plan_tables(job.model.tables, places, job.table_ranks)
    path = tmp_path / "plan.json"
    for size, shard in zip(sizes, plan[""]["users"]["sharding_spec"]["shards"], strict=True):
        shard["shard_sizes"] = [size, 64]
    path.write_text(json.dumps(plan))
    with pytest.raises(JobError, match="table 'users': shards must be of one size"):
        read_plan(path)


def test_ranks_that_contradict_the_shards_are_refused(tmp_path: Path) -> None:
    job = Job.from_dict(tables_of_job(sharding={"rule": "row-wise"}))
    places = placements_of(job.model.tables, job.sharding, job.table_ranks)
    plan = plan_tables(job.model.tables, places, job.table_ranks)
    plan[""]["users"]["ranks"] = [0, 0, [], "x"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    with pytest.raises(JobError, match="table 'users': ranks and places of shards must agree"):
        read_plan(path)


@pytest.mark.parametrize("tables", [3, True, {"a": 1}])
def test_tables_are_a_list(tables: Any) -> None:
    with pytest.raises(JobError, match=r"tables"):
        Job.from_dict({**tables_of_job(), "model": {"family": "dlrm", "tables": tables}})


def _large(kind: str, location: str, tables: int = 1) -> dict[str, Any]:
    """Tables of 1.03 TB each, placed by a rule on 4 devices of a node."""
    model = {"family": "dlrm", "tables": [{"rows": 2 * 10**9, "dim": 128} for _ in range(tables)]}
    return {**tables_of_job(sharding={"rule": kind, "location": location}), "model": model}


@pytest.mark.parametrize("kind", ["table-wise", "row-wise", "column-wise"])
@pytest.mark.parametrize("location", ["host", "uvm"])
def test_a_table_counts_once_in_the_memory_of_its_host(kind: str, location: str) -> None:
    cache: dict[str, Any] = {"cache": 0.001} if location == "uvm" else {}
    tables = _large(kind, location)
    job = Job.from_dict({**tables, "sharding": {**tables["sharding"], **cache}})
    ranks = job.table_ranks
    loads = loads_of(job.model.tables, placements_of(job.model.tables, job.sharding, ranks), ranks, job.sharding)
    assert host_bytes(loads, ranks) == pytest.approx(1.032e12 * (1 - job.sharding.cache * bool(cache)))


def test_tables_together_must_fit_a_host() -> None:
    with pytest.raises(JobError, match="tables fit no host: 4128000000000 bytes lie in the fullest one"):
        Job.from_dict(_large("table-wise", "host", tables=4))
    with pytest.raises(JobError, match="tables fit no host: 4128000000000 bytes"):
        Job.from_dict(_large("data-parallel", "host"))


@pytest.mark.parametrize(
    ("kind", "told"),
    [("table-wise", "has [0-9]+; shard it by rows or columns over more ranks, or put it in uvm"),
     ("row-wise", "has [0-9]+; put it in uvm")],
)  # fmt: skip
def test_a_table_that_fits_no_device_is_told_what_is_left(kind: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        Job.from_dict(_large(kind, "hbm"))


def test_a_table_without_rows_breaks_one_rule() -> None:
    with pytest.raises(JobError) as found:
        Job.from_dict({**tables_of_job(), "model": {"family": "dlrm", "tables": [{"rows": 0, "dim": 64}]}})
    assert "rows must" in str(found.value) and "pooling" not in str(found.value)


@pytest.mark.parametrize("key", ["model.layers", "model.hidden"])
def test_a_size_that_follows_from_the_tables_is_not_set(key: str) -> None:
    with pytest.raises(JobError, match=f"{key} of a dlrm follows from its tables"):
        Job.of(Path(__file__).parents[3] / "examples" / "dlrm-dcnv2-64h100.toml", {key: 7})
