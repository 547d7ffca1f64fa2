"""What the time is sensitive to."""

import pytest
from hypothesis import HealthCheck, given, settings

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
