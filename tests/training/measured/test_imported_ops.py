"""What calls lose while other ranks compute on the same host, learned from scripts that ran both ways."""

from __future__ import annotations

import numpy as np
import pytest

from stepsight.dataset.kinds.op import Op
from stepsight.training.kernels.host_calls import HostCalls
from stepsight.training.measured.imported_ops import HostStep, learn_contention, learn_host_calls

PRODUCT, SUM = Op("linear", (64, 256, 256), "fp32"), Op("elementwise", (1 << 20,), "fp32")
NOISE = 0.02


def _step(product: float, other: float, ranks: int, seed: int = 0) -> HostStep:
    """A product of 2 ms and an elementwise call of 1 ms, times the factors."""
    noise = np.exp(NOISE * np.random.default_rng(seed).standard_normal(2))
    seconds = np.array([2e-3 * product, 1e-3 * other]) * noise
    phases = np.zeros(2, dtype=np.int64)
    return HostStep(f"r{seed}", (PRODUCT, SUM), ("aten::mm", "aten::add"), phases, seconds, 4e-3, ranks=ranks)


@pytest.fixture(scope="module")
def alone() -> HostCalls:
    return learn_host_calls([_step(1.0, 1.0, 1, seed) for seed in range(3)])


def test_runs_of_one_rank_alone_teach_no_contention(alone: HostCalls) -> None:
    assert not alone.contention.factors and alone.shared_by(8) is alone


def test_calls_that_lose_nothing_have_no_factor(alone: HostCalls) -> None:
    """The simplest model that is as good as the best: none."""
    assert not learn_contention([_step(1.0, 1.0, 2, 10 + seed) for seed in range(5)], alone)


def test_equal_losses_are_one_factor(alone: HostCalls) -> None:
    found = learn_contention([_step(1.3, 1.3, 2, 10 + seed) for seed in range(5)], alone)
    assert set(found) == {""} and found[""] == pytest.approx(1.3, rel=0.03)


def test_few_runs_teach_one_factor(alone: HostCalls) -> None:
    found = learn_contention([_step(1.0, 2.0, 2)], alone)
    assert found == {"": pytest.approx(4 / 3, rel=0.05)}


def test_families_differ_where_runs_show_it(alone: HostCalls) -> None:
    """Runs whose shares of products differ tell that only elementwise calls lose."""
    runs = []
    for seed in range(6):
        step = _step(1.0, 2.0, 2, 20 + seed)
        many = 1 + 5 * (seed % 2)
        ops, calls = step.ops[:1] * many + step.ops[1:], step.calls[:1] * many + step.calls[1:]
        seconds = np.array([*[step.op_s[0]] * many, step.op_s[1]])
        runs.append(HostStep("r", ops, calls, np.zeros(many + 1, dtype=np.int64), seconds, 4e-3, ranks=2))
    found = learn_contention(runs, alone)
    assert found[SUM.family] > 1.4 > 1.2 > found[PRODUCT.family] >= 1.0


def test_only_calls_of_a_shared_host_take_longer(alone: HostCalls) -> None:
    """Steps of two ranks change nothing of the times of one rank."""
    steps = [_step(1.0, 1.0, 1, seed) for seed in range(3)]
    both = learn_host_calls([*steps, *(_step(1.5, 1.5, 2, 10 + seed) for seed in range(4))])
    asked = (["aten::mm", "aten::add"], [PRODUCT, SUM], [0, 0])
    assert both.shared_by(1).seconds(*asked) == pytest.approx(alone.seconds(*asked))
    assert both.shared_by(2).seconds(*asked) == pytest.approx(1.5 * alone.seconds(*asked), rel=0.05)
    assert HostCalls.from_dict(both.to_dict(), trees=both.trees).contention == both.contention
