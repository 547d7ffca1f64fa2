from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.hardware.hardware_facts import slowest_of, throttled
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Op
from stepsight.testing import LatencyModelContract
from stepsight.testing.latency_models import small_program
from stepsight.training.predictor.predictor import LearnedLatency, Predictor
from tests.gnn.random_networks import random_network


def _job() -> Job:
    return Job(
        model=ModelSpec(family="gpt", layers=2, hidden=128, heads=4, vocab=512, seq_len=64),
        parallel=ParallelSpec(),
        batch=BatchSpec(micro_batch=1, global_batch=2, precision="fp32"),
        cluster=ClusterSpec(hardware="toy", devices_per_node=2, fabric="loopback"),
    )


class TestLearnedLatency(LatencyModelContract):
    """With regressors and a context model of random weights."""

    @pytest.fixture
    def latency(self, predictor: Predictor) -> LearnedLatency:
        return replace(predictor, context=random_network(std=0.1)).latency(_job())


def test_a_program_is_worked_out_once(predictor: Predictor) -> None:
    calls = []
    latency = predictor.with_context(lambda graph, alone: calls.append(1) or alone).latency(_job())
    program = small_program()
    alone = np.full(len(program), 1e-4)
    for _ in range(3):
        latency.in_context([program], [alone.copy()])
    latency.in_context([program], [alone * 2])
    assert len(calls) == 2


def test_the_slowest_of_many_devices_lies_farther_from_their_mean() -> None:
    """Against the largest of so many normal deviates, drawn."""
    drawn = np.random.default_rng(0).normal(size=(20_000, 64))
    assert slowest_of(1) == 0.0
    for count in (2, 8, 64):
        assert slowest_of(count) == pytest.approx(drawn[:, :count].max(axis=1).mean(), abs=0.03)


def test_products_wait_for_the_slowest_device_and_what_streams_does_not(predictor: Predictor) -> None:
    uneven = replace(predictor, hardware=replace(predictor.hardware, compute_spread=0.02))
    works = [Op("linear", (64, 128, 128), "fp32"), Op("add", (4096,), "fp32")]
    even, spread = (one.latency(_job()).op_seconds(works) for one in (predictor, uneven))
    assert spread / even == pytest.approx([1 + 0.02 * slowest_of(2), 1.0])


def test_long_products_in_16_bits_were_measured_at_a_lower_clock(predictor: Predictor) -> None:
    """A limit that slows products by 1.2 does so to a short one; to a long one, by 1.2 over its table's 1.1."""
    assert throttled(np.array([1e-6, 0.8e-3, 1.6e-3, 1.0])) == pytest.approx([0.0, 0.0, 1.0, 1.0])
    assert throttled(np.array([0.8e-3 * 2**0.5])) == pytest.approx([0.5])
    limit = {"power_w": 100.0, "compute_spread": 0.0}
    free, tabled, drawn = ({}, {"bf16": 110.0 * 1.1**2}, {"bf16": 120.0 * 1.2**2})
    works = [
        Op("linear", (64, 128, 128), "fp32"),
        Op("linear", (10**5, 10**4, 10**4), "fp32"),
        Op("add", (10**9,), "fp32"),
    ]

    def asked(watts: dict[str, float], table: dict[str, float]) -> np.ndarray:
        kernel = replace(predictor.kernel, hardware=replace(predictor.kernel.hardware, **limit, product_power_w=table))
        hardware = replace(predictor.hardware, **limit, product_power_w=watts)
        return replace(predictor, hardware=hardware, kernel=kernel).latency(_job()).op_seconds(works)

    assert asked(drawn, free) / asked(free, free) == pytest.approx([1.2, 1.2, 1.0])
    assert asked(drawn, tabled) / asked(free, free) == pytest.approx([1.2, 1.2 / 1.1, 1.0])


def test_gpus_differ_by_a_stated_amount() -> None:
    gpu, cpu = find_hardware("h100-sxm-80gb"), find_hardware("local-cpu")
    assert gpu is not None and gpu.compute_spread == 0.015
    assert cpu is not None and cpu.compute_spread == 0.0
