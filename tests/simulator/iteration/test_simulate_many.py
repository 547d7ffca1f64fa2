from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.iteration.simulate_many import can_simulate_many, simulate_many
from stepsight.simulator.programs.block_pass import Work
from tests.simulator.any_job import FABRIC, devices, jobs

FAR = ("gemm", "all_gather", "all_reduce", "send_recv")  # kinds that count as outside of what was measured


def far(works: Sequence[Work]) -> list[bool]:
    return [work.kind in FAR for work in works]


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(some=st.lists(jobs(), min_size=1, max_size=6), hardware=devices())
def test_many_jobs_take_as_long_as_each_by_itself(some: list[Job], hardware: Hardware) -> None:
    """Any jobs in any order, several of them alike: the times of ``simulate``."""
    latency = RooflineLatency(hardware, FABRIC)
    alone = np.array([simulate(job, latency).iteration_time_s for job in some])
    together = simulate_many(some, latency)
    assert together.seconds == pytest.approx(alone, rel=1e-12)
    assert not together.outside.any()
    again = simulate_many([*some[::-1], *some], latency).seconds
    assert again == pytest.approx(np.concatenate([together.seconds[::-1], together.seconds]), rel=1e-12)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(some=st.lists(jobs(), min_size=1, max_size=4), hardware=devices())
def test_the_part_outside_is_that_of_the_critical_path(some: list[Job], hardware: Hardware) -> None:
    """What is not measured: as many seconds as its uses on the critical path take."""
    latency = RooflineLatency(hardware, FABRIC)
    together = simulate_many(some, latency, far)
    for job, seconds, outside in zip(some, *together, strict=True):
        simulation = simulate(job, latency)
        uses, works = simulation.count_works(), simulation.lowered.all_works
        expected = float((uses * simulation.work_seconds)[np.array(far(works), dtype=np.bool_)].sum())
        assert outside == pytest.approx(expected, rel=1e-9, abs=1e-9 * seconds)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(job=jobs(uneven_cluster=True), hardware=devices())
def test_jobs_whose_ranks_differ_are_not_simulated_together(job: Job, hardware: Hardware) -> None:
    """Ranks that differ need pipelines of their own."""
    cluster = job.cluster
    alike = not (cluster.stragglers or cluster.slow_links or cluster.mixed)
    assert can_simulate_many(job, RooflineLatency(hardware, FABRIC)) == alike
