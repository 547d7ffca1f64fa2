"""Experts are placed by their loads, and a search counts what is left of the imbalance."""

from dataclasses import replace
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.expert_loads import ExpertLoads
from stepsight.experiments.search.search import search
from stepsight.experiments.search.settings import Space

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
