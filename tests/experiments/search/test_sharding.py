from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.configs.documents import job_toml
from stepsight.dataset.configs.formats import write_config
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.model_spec import TableSpec
from stepsight.dataset.job.sharding import add_shards, placements_of
from stepsight.experiments.search.search import progress_words, search
from stepsight.experiments.search.search_report import search_report
from stepsight.experiments.search.settings import Scenarios, Space
from stepsight.experiments.search.sharding import (
    BASELINES,
    ExpertLoads,
    PlacementCosts,
    baseline_places,
    has_torchrec,
    placed,
    search_places,
    torchrec_plan,
)
from stepsight.simulator.durations.latency_model import preset_latency

RANDOM = np.random.default_rng(3)
TABLES: list[dict[str, Any]] = [
    {"rows": int(10 ** RANDOM.uniform(3, 6)), "dim": 64, "pooling": float(RANDOM.integers(1, 30)), "zipf": 1.0}
    for _ in range(16)
]


def some_job(**sharding: Any) -> Job:
    return Job.from_dict(
        {
            "model": {"family": "dlrm", "tables": TABLES},
            "sharding": {"rule": "table-wise", **sharding},
            "batch": {"micro_batch": 1024, "global_batch": 8192, "precision": "fp32"},
            "cluster": {"hardware": "a100-sxm-80gb", "devices_per_node": 8},
        }
    )


@pytest.fixture
def costs() -> PlacementCosts:
    job = some_job()
    latency = preset_latency(job.cluster.hardware, job.fabric)
    assert latency is not None
    return PlacementCosts(job, latency)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": "sqlite:////no/where/k.db", "study_name": "s"}, "storage, study"),
        ({"sampler": "random", "gap": 3}, "sampler, gap"),
        ({"map_fn": map, "space": "wide"}, "workers, space"),
    ],
)
def test_what_a_search_of_placements_does_not_use_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(StepsightError, match=f"without a study or a space of strategies: leave out {words}$"):
        search(some_job(), "roofline", trials=20, **options)


def test_amounts_are_sums_over_tables(costs: PlacementCosts) -> None:
    """What is added and removed again leaves nothing."""
    places = baseline_places(costs.job, "size-greedy")
    total = costs.loads(places)
    for table, place in zip(costs.tables, places, strict=True):
        add_shards(total, -costs.amounts(table, place.kind, place.shards, place.location), place.ranks)
    assert np.allclose(total, 0.0, atol=1e-6)


def test_the_search_beats_its_baselines(costs: PlacementCosts) -> None:
    found, judged = search_places(costs, trials=2000)
    best = costs.seconds(costs.loads(found[0]))
    others = [costs.seconds(costs.loads(baseline_places(costs.job, name))) for name in BASELINES]
    assert judged == 2000 and best < 0.985 * min(others)


def test_best_sharding_is_a_job_and_a_plan(tmp_path: Path) -> None:
    """What the search finds is told, written as a job file and as torchrec's plan, and read again."""
    result = search(some_job(), "roofline", trials=300)
    told = result.to_dict()
    assert told["best"]["iteration_time_s"] <= min(s for s in told["baselines"].values() if s is not None)
    sharding = told["best"]["sharding"]
    assert [table["name"] for table in sharding["tables"]] == [f"t_cat_{at}" for at in range(16)]
    best = result.best.job
    (tmp_path / "best.toml").write_text(job_toml(best))
    assert Job.from_file(tmp_path / "best.toml") == best
    (tmp_path / "plan.json").write_text(write_config(best, "torchrec").text)
    again = some_job(plan=str(tmp_path / "plan.json"))
    places = [placements_of(job.model.tables, job.sharding, job.table_ranks) for job in (best, again)]
    assert places[0] == places[1]


def test_a_search_is_told_in_words_of_placements() -> None:
    """Rows say how tables are sharded and none is there twice; nothing is called a strategy or a token."""
    result = search(some_job(), "roofline", trials=300)
    rows = [(row["placement"], row["iteration_time_s"]) for row in result.to_dict()["choices"]]
    assert len(set(rows)) == len(rows) > 1 and "16 table-wise" in dict(rows)
    text = search_report(some_job(), result, 5)["text"] + repr(result)
    assert "300 placements judged" in text and "legal strateg" not in text
    several = search(some_job(), "roofline", trials=20, scenarios=Scenarios(nodes=(1, 2)))
    text = search_report(some_job(), several, 5)["text"]
    assert "samples/s/device" in text and "tokens" not in text and progress_words(some_job(), None)[0] == "placements"


def test_torchrec_loads_a_plan() -> None:
    """Every table of a plan of each kind becomes a sharding with shards that cover the table."""
    if not has_torchrec():
        pytest.skip("torchrec is not installed")
    for rule in ("table-wise", "column-wise", "row-wise", "data-parallel"):
        job = some_job(rule=rule)
        plan = torchrec_plan(json.loads(write_config(job, "torchrec").text), device="cpu")
        (tables,) = plan.plan.values()
        for name, table in zip(tables, job.model.tables, strict=True):
            spec = tables[name].sharding_spec
            assert tables[name].sharding_type == rule.replace("-", "_")
            covered = sum(np.prod(shard.shard_sizes) for shard in spec.shards) if spec else table.rows * table.dim
            assert covered == table.rows * table.dim
            assert all(str(shard.placement).endswith("/cpu") for shard in (spec.shards if spec else ()))


def test_a_placement_that_is_stated_is_kept(costs: PlacementCosts) -> None:
    places = baseline_places(costs.job, "random", seed=1)
    job = placed(costs.job, places)
    assert placements_of(job.model.tables, job.sharding, job.table_ranks) == places


def test_on_other_nodes_a_device_takes_its_whole_part_of_the_batch() -> None:
    """A step of a recommendation model has one batch: the job's micro-batch would not divide it on more devices."""
    job = some_job()
    found = search(job, scenarios=Scenarios(nodes=(2 * job.cluster.nodes,)), trials=20)
    assert found.best.job.batch.micro_batch * found.best.job.cluster.num_devices == job.batch.global_batch


LOADS = ExpertLoads(((8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0),))
SMALL = Space(micro_batches=(1,), schedules=(("1f1b", 1),), cp=(1,), zero_stages=(1,), recompute=("none",))


@pytest.fixture
def job() -> Job:
    return Job.from_dict(
        {
            "model": {
                "family": "llama", "layers": 4, "hidden": 1024, "heads": 8, "ffn": 2048, "vocab": 8000, "seq_len": 512,
                "experts": 8, "experts_per_token": 2,
            },
            "parallel": {"dp": 8, "ep": 4, "zero_stage": 1},
            "batch": {"micro_batch": 1, "global_batch": 32, "precision": "bf16"},
            "cluster": {"hardware": "a100-sxm-80gb", "nodes": 1, "devices_per_node": 8},
        }
    )  # fmt: skip


def test_the_heaviest_expert_goes_to_the_rank_with_the_least() -> None:
    assert LOADS.to_dict(4)["experts_of_ranks"] == [[[0, 7], [1, 6], [2, 5], [3, 4]]]
    assert LOADS.imbalance(4) == 1.0
    assert LOADS.imbalance(4, by_load=False) == pytest.approx(15 / 9)


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_every_rank_holds_as_many_experts_and_is_no_busier_than_in_their_order(ep: int) -> None:
    loads = ExpertLoads(((9.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0), LOADS.layers[0]))
    for layer in loads.to_dict(ep)["experts_of_ranks"]:
        assert sorted(expert for rank in layer for expert in rank) == list(range(8))
        assert {len(rank) for rank in layer} == {8 // ep}
    assert 1.0 <= loads.imbalance(ep) <= loads.imbalance(ep, by_load=False)


def test_a_search_by_bounds_finds_what_asking_about_all_finds(job: Job) -> None:
    """Strategies have the imbalance of their own expert-parallel degree, and the bounds count it."""
    skewed = ExpertLoads(((20.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),))
    found = search(job, space=SMALL, expert_loads=skewed)
    reference = search(job, space=SMALL, expert_loads=skewed, sampler="enumerate")
    assert found.best.seconds == pytest.approx(reference.best.seconds) and found.gap_percent == 0.0
    for choice in reference.choices:
        assert choice.job.model.imbalance == skewed.imbalance(choice.job.parallel.ep)
    assert reference.own is not None and reference.own.job.model.imbalance == skewed.imbalance(4)
    even = search(job, space=SMALL, sampler="enumerate")
    assert reference.best.seconds != even.best.seconds or reference.best.job.parallel.ep == 1


def test_the_answer_says_what_the_placement_gains(job: Job) -> None:
    told = search(job, space=replace(SMALL, max_tp=1), expert_loads=LOADS).to_dict()
    placed = told["expert_placement"]
    assert placed["iteration_time_in_order_s"] >= told["best"]["iteration_time_s"]
    assert len(placed["experts_of_ranks"][0]) == told["best"]["ep"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a line of loads"),
        ("1,x", "line 1: loads must be numbers"),
        ("1,2\n1,2,3", "one row, or one for each"),
        ("1,-2", "tokens >= 0"),
        ("0,0", "not all 0"),
        ("1,nan", "tokens >= 0"),
    ],
)
def test_files_that_hold_no_loads_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "loads.csv"
    path.write_text(text)
    with pytest.raises(StepsightError, match=message):
        ExpertLoads.read(path)


def test_loads_of_another_model_are_refused(job: Job) -> None:
    dense = replace(job, model=replace(job.model, experts=0), parallel=replace(job.parallel, ep=1))
    with pytest.raises(StepsightError, match="a model with experts"):
        search(dense, space=SMALL, expert_loads=LOADS)
    with pytest.raises(StepsightError, match="the model's 8 experts, got 2"):
        search(job, space=SMALL, expert_loads=ExpertLoads(((1.0, 2.0),)))
    with pytest.raises(StepsightError, match="one for each of the 4 layers"):
        search(job, space=SMALL, expert_loads=ExpertLoads((LOADS.layers[0],) * 3))


def test_a_search_is_never_slower_than_a_rule() -> None:
    """Its best is what the full prediction says of all: few large tables are best by rows, though a search that ends
    early finds others.
    """
    tables = [TableSpec(rows=10**7, dim=64, pooling=p, zipf=1.0) for p in (1, 40, 25)]
    job = some_job()
    job = replace(job, model=replace(job.model, tables=tuple(tables)))
    result = search(job, "roofline", trials=10, top=1)
    rules = {result.baselines[name] for name in ("row-wise", "column-wise", "table-row-wise", "size-greedy")}
    assert result.best.timed[0] <= min(seconds for seconds in rules if seconds is not None)
