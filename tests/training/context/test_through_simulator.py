import numpy as np
import pytest
import torch

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.job.specs import SlowLink, Straggler
from stepsight.dataset.runs.run_manifest import read_box
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.training.context.fit_context import Iteration, critical_path


def _job(cluster: ClusterSpec | None = None, **parallel: int) -> Job:
    return Job(
        model=ModelSpec(family="gpt", layers=4, hidden=128, heads=4, vocab=512, seq_len=64),
        parallel=ParallelSpec(**parallel),
        batch=BatchSpec(micro_batch=1, global_batch=4, precision="fp32"),
        cluster=cluster or ClusterSpec(hardware="local-cpu", devices_per_node=2, fabric="loopback"),
    )


@pytest.mark.parametrize("parallel", [{"dp": 2}, {"pp": 2}, {"tp": 2}, {"dp": 2, "zero_stage": 3}])
def test_counts_are_the_gradient_of_the_iteration_time(parallel: dict[str, int]) -> None:
    hardware, job = find_hardware("local-cpu"), _job(**parallel)
    assert hardware is not None
    latency = RooflineLatency(hardware, job.fabric)
    iteration = Iteration(job, latency)
    alone = iteration.alone
    total, counts = iteration.seconds_and_counts(alone)
    assert total == pytest.approx(simulate(job, latency).iteration_time_s, rel=1e-12)
    for node in np.random.default_rng(0).choice(len(alone), 12, replace=False):
        step = np.zeros(len(alone))
        step[node] = 1e-9
        more, _ = iteration.seconds_and_counts(alone + step)
        assert (more - total) / 1e-9 == pytest.approx(counts[node], abs=1e-3)


@pytest.mark.parametrize("parallel", [{"dp": 4}, {"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}, {"dp": 4, "zero_stage": 3}])
def test_slow_ranks_and_links_slow_the_iteration_as_they_slow_its_nodes(parallel: dict[str, int]) -> None:
    """The time is the simulator's, and its derivative tells slowdowns; given durations are slowed likewise."""
    cluster = ClusterSpec(
        hardware="local-cpu", nodes=4, devices_per_node=1, fabric=read_box("4x1@100mbit").fabric,
        stragglers=(Straggler(rank=3, slowdown=1.5),), slow_links=(SlowLink(node=1, slowdown=4.0),),
    )  # fmt: skip
    hardware, job = find_hardware("local-cpu"), _job(cluster, **parallel)
    assert hardware is not None
    latency = RooflineLatency(hardware, job.fabric)
    iteration = Iteration(job, latency)
    total, counts = iteration.seconds_and_counts(iteration.alone)
    assert total == pytest.approx(simulate(job, latency).iteration_time_s, rel=1e-9)
    step = 1e-6 * iteration.alone
    more, _ = iteration.seconds_and_counts(iteration.alone + step)
    assert more - total == pytest.approx(counts @ step, rel=1e-3)


def test_gradient_flows_through_the_simulator() -> None:
    hardware, job = find_hardware("local-cpu"), _job(pp=2)
    assert hardware is not None
    iteration = Iteration(job, RooflineLatency(hardware, job.fabric))
    log_scale = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    inside = torch.from_numpy(iteration.alone) * log_scale.exp()
    constant, counts = critical_path(iteration, inside)
    found = counts @ inside + constant
    found.backward()
    total, counts = iteration.seconds_and_counts(iteration.alone)
    assert float(found.detach()) == pytest.approx(total, rel=1e-12)
    assert log_scale.grad is not None
    assert float(log_scale.grad) == pytest.approx(float(counts @ iteration.alone), rel=1e-9)
