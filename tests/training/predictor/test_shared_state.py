"""Predictors and threads share caches of pure functions, and never each other's results."""

import copy
import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from stepsight.dataset.base.caching import clear_caches
from stepsight.dataset.hardware.hardware import find_fabric, find_hardware
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.job.specs import Straggler
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.durations.segment_timing import MAX_PASSAGES, MAX_SEGMENTS, timer_of
from stepsight.simulator.iteration.simulate import simulate
from stepsight.training.prediction.prediction import ROOFLINE, predict
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import shipped_predictor
from tests.cache_entries import cache_entries

A100, H100 = "a100-sxm-80gb", "h100-sxm-80gb"


def _job(hardware: str = A100, devices: int = 8, **parallel: Any) -> Job:
    return Job(
        model=ModelSpec(family="gpt", layers=4, hidden=2048, heads=16, vocab=32000, seq_len=1024),
        parallel=ParallelSpec(**parallel),
        batch=BatchSpec(micro_batch=1, global_batch=64),
        cluster=ClusterSpec(hardware=hardware, devices_per_node=devices, fabric="dgx-a100"),
    )


STRATEGIES = (
    {"pp": 2, "tp": 2, "recompute": "selective"},
    {"pp": 4, "schedule": "zb-h1"},
    {"zero_stage": 3},
)


def _answer(job: Job, predictor: Predictor | str) -> tuple[Any, ...]:
    found = predict(job, predictor)
    return found.iteration_time_s, found.low_s, found.breakdown, found.memory.to_dict(), found.unsupported


def _questions() -> list[tuple[Job, Predictor | str]]:
    """The same jobs to two predictors for one hardware, to one for another, and to hardware facts."""
    own, other = shipped_predictor(A100), shipped_predictor(H100)
    assert own is not None and other is not None
    faster = replace(own, hardware=replace(own.hardware, compute_spread=0.2))
    jobs = [_job(**strategy) for strategy in STRATEGIES]
    asked: list[tuple[Job, Predictor | str]] = [(job, who) for job in jobs for who in (own, faster)]
    elsewhere = replace(jobs[0], cluster=replace(jobs[0].cluster, hardware=H100))
    return [*asked, (jobs[0], ROOFLINE), (elsewhere, other)]


def test_threads_that_ask_two_predictors_get_what_one_thread_gets() -> None:
    """Bit for bit, while caches fill and are emptied."""
    questions = _questions()
    clear_caches()
    alone = [_answer(*question) for question in questions]
    assert len({answer[0] for answer in alone}) == len(alone)

    def ask(seed: int) -> list[tuple[int, tuple[Any, ...]]]:
        order = random.Random(seed).sample(range(len(questions)), len(questions))
        answers = []
        for turn, number in enumerate(order):
            answers.append((number, _answer(*questions[number])))
            if turn == 2 * seed:
                clear_caches()
        return answers

    clear_caches()
    with ThreadPoolExecutor(4) as pool:
        for answers in pool.map(ask, range(4)):
            for number, answer in answers:
                assert answer == alone[number]


def test_a_prediction_outlives_the_caches() -> None:
    job = _job(pp=2, tp=2)
    found = predict(job, A100)
    clear_caches()
    assert found.breakdown == predict(job, A100).breakdown
    assert found.timeline("op") == predict(job, A100).timeline("op")


def test_caches_stay_bounded_over_5000_distinct_jobs() -> None:
    """All but the newest entries are dropped, and one call drops the rest."""
    clear_caches()
    job, hardware = _job(devices=1), find_hardware(A100)
    assert hardware is not None
    job, latency = replace(job, batch=replace(job.batch, global_batch=2)), RooflineLatency(hardware, job.fabric)
    most = 0
    for number in range(5000):
        slower = (Straggler(rank=0, slowdown=1.0 + number / 5000),)
        simulate(replace(job, cluster=replace(job.cluster, stragglers=slower)), latency)
        if number % 500 == 499:
            entries = cache_entries()
            assert entries["timer: segments"] <= MAX_SEGMENTS and entries["timer: passages"] <= MAX_PASSAGES
            most = max(most, sum(entries.values()))
    assert most < 3 * MAX_SEGMENTS + MAX_PASSAGES
    clear_caches()
    assert not any(cache_entries().values())


def test_a_timer_is_freed_with_its_latency_model() -> None:
    hardware = find_hardware(A100)
    assert hardware is not None
    latency = RooflineLatency(hardware, find_fabric("dgx-a100"))
    timer = weakref.ref(timer_of(latency))
    assert timer() is timer_of(latency)
    copied = copy.copy(latency)
    assert timer_of(copied) is not timer()
    del latency, copied
    gc.collect()
    assert timer() is None


def test_a_latency_model_with_slots_has_a_timer() -> None:
    class Slotted(RooflineLatency):
        __slots__ = ()

    class Bare:
        __slots__ = ("hardware", "knows_context")

    hardware = find_hardware(A100)
    assert hardware is not None
    slotted = Slotted(hardware, find_fabric("dgx-a100"))
    assert timer_of(slotted) is timer_of(slotted)
    bare: Any = Bare()
    bare.hardware, bare.knows_context = hardware, False
    assert timer_of(bare).latency is bare


@pytest.mark.parametrize("devices", [1, 2])
def test_a_predictor_remembers_a_latency_model_per_fabric(devices: int) -> None:
    predictor = shipped_predictor(A100)
    assert predictor is not None
    job = _job(devices=devices)
    assert predictor.latency(job) is predictor.latency(replace(job, batch=replace(job.batch, global_batch=128)))
