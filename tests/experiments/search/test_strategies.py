"""Every strategy has a number; all axes that a job has can be varied."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.settings import Space
from stepsight.experiments.search.strategies import Grid, strategies


@pytest.fixture(scope="module")
def job() -> Job:
    return Job.from_file("examples/mixtral-8x22b-ep-256.toml")


def test_numbers_and_strategies_agree(job: Job) -> None:
    """A number gives a job, whose choices and whose trial give the number back; every job is legal and another one."""
    grid = Grid(job, Space.of("wide"))
    numbers = Random(0).sample(range(len(grid)), 300)
    jobs = [grid.strategy(number) for number in numbers]
    assert [grid.find(found) for found in jobs] == [grid.index(grid.params(number)) for number in numbers] == numbers
    assert len(set(jobs)) == len(jobs)


def test_a_grid_is_what_strategies_lists(job: Job) -> None:
    space = Space(micro_batches=(1,), cp=(1,), max_tp=2)
    grid = Grid(job, space)
    assert [grid.strategy(number) for number in range(len(grid))] == list(strategies(job, space))


def test_all_axes_are_varied(job: Job) -> None:
    """Hybrid sharding, every n-th layer, offloading and the order of ranks are axes of the wide space."""
    grid = Grid(job, Space.of("wide"))
    jobs = [grid.strategy(number).parallel for number in Random(1).sample(range(len(grid)), 1000)]
    assert {p.dp_shard for p in jobs} >= {0, 2, 8} and all(p.dp % p.shards == 0 for p in jobs)
    assert {p.recompute_every for p in jobs if p.recompute == "full"} == {1, 2, 4}
    assert {(p.offload_activations, p.recompute) for p in jobs} == {
        (True, "none"), (False, "none"), (False, "full"),
    }  # fmt: skip
    assert {p.order for p in jobs} == {"tp-cp-dp-pp", "tp-cp-pp-dp"}  # the third differs with context parallelism alone


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedules": ("1F1B",)}, "did you mean '1f1b'"),
        ({"schedules": (("1f1b", 2, 3),)}, "names with virtual stages"),
        ({"schedules": (("gpipe", 2),)}, "virtual_stages = 1, got 2"),
        ({"schedules": "1f1b"}, "list of values"),
        ({"micro_batches": (0,)}, ">= 1, got 0"),
        ({"micro_batches": (True,)}, "got True"),
        ({"micro_batches": ()}, "one value at least"),
        ({"zero_stages": (4,)}, "0, 1, 2, 3, got 4"),
        ({"zero_stages": (False,)}, "got False"),
        ({"recompute": ("some",)}, "none, selective, full, got 'some'"),
        ({"sequence_parallel": (1,)}, "got 1"),
        ({"orders": ("tp-pp",)}, "once each"),
        ({"dp_shard": (-1,)}, ">= 0, got -1"),
        ({"max_tp": -1}, "max_tp"),
        ({"zero_stage": (1,)}, "did you mean 'zero_stages'"),
    ],
)
def test_bad_choices_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(StepsightError, match=message):
        Space.of(values)


def test_spaces_from_names_and_files(tmp_path: Path) -> None:
    """Plain names of schedules stand for as few virtual stages as they allow."""
    assert Space(schedules=("1f1b", "zbv")).pipelines == (("1f1b", 1), ("zbv", 2))
    path = tmp_path / "space.toml"
    path.write_text('schedules = ["1f1b", ["1f1b", 2]]\nmicro_batches = [1]\n')
    assert Space.of(path) == Space.of(str(path)) == Space(schedules=("1f1b", ("1f1b", 2)), micro_batches=(1,))
    assert Space.of("usual") == Space.of(None) == Space()
    with pytest.raises(StepsightError, match="usual, wide or the path"):
        Space.of("huge")
    with pytest.raises(StepsightError, match="cannot read the space"):
        Space.of(tmp_path / "none.toml")
    path.write_text("x")
    with pytest.raises(StepsightError, match=r"cannot read the space .*space\.toml: Expected '='"):
        Space.of(path)
    path.write_text("unknown = 1")
    with pytest.raises(StepsightError, match=r"space\.toml: a space has .*got 'unknown'"):
        Space.of(path)


def test_strategies_leave_nothing_open(job: Job) -> None:
    """Each states its virtual stages, also where the job that is searched leaves them open to its framework."""
    tables = {**job.to_dict(), "framework": "nemo"}
    for key in ("virtual_stages", "schedule"):
        tables["parallel"].pop(key)
    silent = Job.from_dict(tables)
    assert silent.open_stages
    grid = Grid(silent, Space(micro_batches=(1,), cp=(1,), max_tp=2))
    assert not any(grid.strategy(number).open_stages for number in range(0, len(grid), 7))
