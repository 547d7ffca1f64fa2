"""What the time is sensitive to."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.iteration.simulate_many import explain
from tests.simulator.any_job import FABRIC, devices, jobs
from tests.simulator.conftest import JobMaker


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(job=jobs(uneven_cluster=True), hardware=devices())
def test_halving_brings_at_most_half_of_the_share(job: Job, hardware: Hardware) -> None:
    """T is convex in every duration: what halving saves is between nothing and half of n_i * t_i."""
    result = simulate(job, RooflineLatency(hardware, FABRIC))
    found = explain(result, 5)
    shares = [one.share for one in found]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 1 + 1e-9
    for one in found:
        assert -1e-9 <= one.halved_s / result.iteration_time_s <= one.share / 2 + 1e-9


def test_one_rank_depends_on_each_of_its_ops(make_job: JobMaker, gpu: Hardware) -> None:
    """Nothing hides: shares add up to all, and halving saves half."""
    result = simulate(make_job(), RooflineLatency(gpu, FABRIC))
    found = explain(result, 1000)
    assert sum(one.share for one in found) == pytest.approx(1.0)
    for one in found:
        assert one.halved_s == pytest.approx(one.count * one.seconds / 2)
        assert one.to_dict()["work"] == str(one.work)


class Twice(RooflineLatency):
    """Everything takes twice as long in context."""

    knows_context = True

    def in_context(self, programs: Sequence[Program], seconds: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return [2 * each for each in seconds]


def test_context_changes_how_long_an_op_takes_and_not_how_often_it_runs(make_job: JobMaker, gpu: Hardware) -> None:
    plain, slow = (simulate(make_job(), kind(gpu, FABRIC)) for kind in (RooflineLatency, Twice))
    usual = {one.work: one for one in explain(plain, 1000)}
    found = explain(slow, 1000)
    assert {one.work for one in found} == set(usual)
    for one in found:
        assert one.count == pytest.approx(usual[one.work].count)
        assert one.seconds == pytest.approx(2 * usual[one.work].seconds)
    assert sum(one.count * one.seconds for one in found) == pytest.approx(slow.iteration_time_s)
