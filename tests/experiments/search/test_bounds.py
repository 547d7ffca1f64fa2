"""Bounds hold for every strategy, and pruning by them never loses the best one."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.bounds import grid_bounds, least_factor
from stepsight.experiments.search.search import search
from stepsight.experiments.search.settings import Space
from stepsight.experiments.search.strategies import Grid
from stepsight.simulator.iteration.lower_bounds import in_flight
from stepsight.simulator.schedules import find_schedule
from stepsight.training.prediction.prediction import predict
from tests.experiments.search.random_jobs import random_job

MANY_AXES = Space(
    micro_batches=(1, 3),
    schedules=("1f1b", ("1f1b", 2), "gpipe", "zb-h1", "zbv", ("looped-bfs", 2)),
    zero_stages=(0, 1, 2, 3),
    recompute_every=(1, 2),
    dp_shard=(0, 2),
    offload_activations=(False, True),
    orders=("tp-cp-dp-pp", "tp-cp-pp-dp"),
    max_tp=4,
)


def answerable(random: Random) -> Job:
    """A random job whose hardware has a peak for its precision, and a legal strategy."""
    while True:
        job = random_job(random, most_nodes=2)
        try:
            predict(job)
            Grid(job, Space())
        except JobError:
            continue
        return job


@pytest.mark.parametrize("seed", range(4))
def test_bounds_hold(seed: int) -> None:
    """No strategy of any axis is predicted to take less time or memory than its bounds."""
    random = Random(seed)
    job = answerable(random)
    given, grid = predict(job), Grid(job, MANY_AXES)
    bounds = grid_bounds(grid, given)
    assert len(bounds.seconds) == len(bounds.peak_bytes) == len(grid)
    for index in random.sample(range(len(grid)), 6):
        prediction = predict(grid.strategy(index))
        assert 0 < bounds.seconds[index] <= prediction.iteration_time_s
        assert 0 < bounds.peak_bytes[index] <= prediction.memory.peak_bytes


@pytest.mark.parametrize("seed", range(100, 102))
def test_pruning_loses_nothing(seed: int) -> None:
    """The search by bounds finds the time of the full enumeration, with fewer strategies asked about."""
    random = Random(seed)
    job = answerable(random)
    space = Space(
        micro_batches=(1, 4),
        schedules=random.choice([("1f1b", "zb-h1"), ("gpipe", ("1f1b", 2))]),
        zero_stages=random.choice([(0, 1), (1, 3)]),
        recompute=("none", "full"),
        sequence_parallel=(True,),
        cp=(1,),
        max_tp=2,
    )
    found, all_of_them = search(job, space=space), search(job, space=space, sampler="enumerate")
    assert all_of_them.evaluated == found.legal
    times = [[choice.timed for choice in one.choices if choice.fits][:1] for one in (found, all_of_them)]
    assert times[0] == [pytest.approx(time) for time in times[1]]
    assert found.gap_percent in (0, None)


def mixed_job(random: Random) -> Job:
    """A random job on nodes of two kinds, with a legal strategy."""
    while True:
        tables = random_job(random, most_nodes=1).to_dict()
        main, other = random.sample(["a100-sxm-80gb", "h100-sxm-80gb", "v100-sxm-32gb", "b200-sxm-180gb"], 2)
        tables["cluster"] |= {"hardware": main, "nodes": 2, "fabric": "dgx-a100", "stragglers": [], "slow_links": []}
        tables["cluster"]["mixed"] = [{"hardware": other, "nodes": [random.randrange(2)]}]
        tables["parallel"] |= {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 2 * tables["cluster"]["devices_per_node"]}
        try:
            job = Job.from_dict(tables)
            predict(job)
        except JobError:
            continue
        return job


@pytest.mark.parametrize("seed", range(2))
def test_bounds_hold_on_mixed_nodes(seed: int) -> None:
    """On nodes of two kinds too, nothing is predicted faster than its bound, and what fits is not excluded."""
    random = Random(seed)
    job = mixed_job(random)
    given, grid = predict(job), Grid(job, MANY_AXES)
    bounds = grid_bounds(grid, given)
    for index in random.sample(range(len(grid)), 6):
        prediction = predict(grid.strategy(index))
        assert 0 < bounds.seconds[index] <= prediction.iteration_time_s
        assert bounds.may_fit[index] or not prediction.memory.fits


def test_pruning_loses_nothing_on_mixed_nodes() -> None:
    """The search by bounds finds the time of the full enumeration on nodes of two kinds."""
    space = Space(micro_batches=(1, 4), schedules=("1f1b",), zero_stages=(1, 3), cp=(1,), recompute=("none", "full"))
    saved = 0
    for seed in (11, 12):
        job = mixed_job(Random(seed))
        found, all_of_them = search(job, space=space), search(job, space=space, sampler="enumerate")
        times = [[choice.timed for choice in one.choices if choice.fits][:1] for one in (found, all_of_them)]
        assert times[0] == [pytest.approx(time) for time in times[1]]
        assert found.gap_percent in (0, None)
        saved += all_of_them.evaluated - found.evaluated
    assert saved > 0


def test_a_correction_widens_bounds() -> None:
    """What a predictor may multiply times by, at least, is part of the bound."""
    given = predict("examples/gpt3-175b-1024.toml", "physics")
    job, predictor = given.job, given.predictor
    assert predictor is not None and least_factor(None, job) == least_factor(predictor, job) == 1.0
    scaled = replace(predictor, calibration=replace(predictor.calibration, scale=0.9))
    assert least_factor(scaled, job) == 0.9


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("looped-bfs", 2), ("zb-h1", 1),
                             ("interleaved-zb", 2), ("zbv", 2)]
)  # fmt: skip
def test_so_many_are_in_flight(schedule: str, chunks: int) -> None:
    """The schedule itself keeps these micro-batches before a stage's first backward."""
    least = in_flight(schedule, 4, 8, chunks)
    for stage, rows in enumerate(find_schedule(schedule, 4, 8, chunks).actions):
        first = int(np.argmax(rows[:, 0] > 0))
        forwards = np.bincount(rows[:first, 2], minlength=chunks)
        assert (least[stage] <= forwards).all(), stage
        assert schedule == "zbv" or (least[stage] == forwards).all()
