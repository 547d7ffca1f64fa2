import random
from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.job.specs import Straggler
from stepsight.experiments.search.strategies import strategies
from stepsight.training.prediction.ask_many import Answers, ask_many, predict_many
from stepsight.training.prediction.prediction import predict


@pytest.fixture(scope="module")
def legal() -> list[Job]:
    """Strategies of a model on two nodes, and one of them with a straggler."""
    job = Job(
        model=ModelSpec(family="llama", layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, seq_len=4096),
        parallel=ParallelSpec(),
        batch=BatchSpec(micro_batch=1, global_batch=64),
        cluster=ClusterSpec(hardware="h100-sxm-80gb", nodes=2, devices_per_node=8),
    )
    some = random.Random(0).sample(list(strategies(job)), 24)
    slow = replace(some[0], cluster=replace(job.cluster, stragglers=(Straggler(rank=3, slowdown=1.5),)))
    return [*some, slow]


@pytest.mark.parametrize("predictor", [None, "roofline", "latency:tests.simulator.durations.test_given_latency:_Slow"])
def test_asking_for_many_is_asking_for_each(legal: list[Job], predictor: str | None) -> None:
    """Time, interval, what lies outside, and memory."""
    answers, many = ask_many(legal, predictor), predict_many(legal, predictor)
    for job, together, *numbers in zip(legal, many, *answers, strict=True):
        alone = predict(job, predictor)
        memory = alone.memory
        assert [numbers[0], *numbers[3:]] == pytest.approx(
            [alone.iteration_time_s, memory.peak_bytes, memory.capacity_bytes], rel=1e-12
        )
        for ends in (numbers[1:3], together.interval()):  # shares of the path are differences of two iteration times
            assert ends == pytest.approx(alone.interval(), rel=1e-8)
        assert together.iteration_time_s == pytest.approx(alone.iteration_time_s, rel=1e-12)
        assert (together.source, together.software) == (alone.source, alone.software)
    assert many[0].unsupported == predict(legal[0], predictor).unsupported
    assert sum(many[0].breakdown.values()) == pytest.approx(many[0].iteration_time_s)


def test_answers_do_not_depend_on_the_order(legal: list[Job]) -> None:
    """Nor on what else is asked."""
    one, other, few = ask_many(legal), ask_many(legal[::-1]), ask_many(legal[:12])
    for forth, back, some in zip(one, other, few, strict=True):
        assert forth == pytest.approx(back[::-1], rel=1e-12)
        assert forth[:12] == pytest.approx(some, rel=1e-12)


def test_what_does_not_fit_is_not_timed_where_it_need_not_be(legal: list[Job]) -> None:
    """Its memory is told all the same."""
    every, fitting = ask_many(legal), ask_many(legal, only_fitting=True)
    assert every.fits.any() and not every.fits.all()
    assert np.array_equal(every.peak_bytes, fitting.peak_bytes)
    assert np.array_equal(np.isnan(fitting.seconds), ~every.fits)
    assert np.array_equal(fitting.seconds[every.fits], every.seconds[every.fits])
    assert np.array_equal(np.isnan(fitting.low_s), ~every.fits)


def test_hardware_that_nobody_knows_is_refused(legal: list[Job]) -> None:
    """As ``predict`` does."""
    unknown = replace(legal[0], cluster=replace(legal[0].cluster, hardware="abacus", fabric="dgx-h100"))
    with pytest.raises(JobError, match="abacus"):
        ask_many([*legal, unknown])


def test_nothing_is_asked() -> None:
    """No jobs, no answers."""
    assert isinstance(ask_many([]), Answers) and len(ask_many([]).seconds) == 0 and predict_many([]) == []
