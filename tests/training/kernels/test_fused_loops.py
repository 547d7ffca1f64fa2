"""Seconds of loops that a compiler fused."""

from __future__ import annotations

import numpy as np

from stepsight.dataset.kinds.op import Op
from stepsight.training.kernels.fused_loops import USUAL_S, fit_loops, loop_seconds, loop_terms, usual_loops
from stepsight.training.kernels.host_calls import HostCalls, fit_host_calls
from stepsight.training.measured.host_costs import learn_host_calls
from stepsight.training.measured.host_steps import HostStep


def _ops(count: int) -> list[Op]:
    random = np.random.default_rng(0)
    dims = np.exp(random.uniform(0, 14, (count, len(USUAL_S) - 1))).astype(int)
    return [Op("fused_loops", tuple(row), "fp32") for row in dims.tolist()]


def test_constants_are_found_again() -> None:
    """Seconds of a machine that is twice as slow are learned from its calls."""
    taught, asked = _ops(200)[:150], _ops(200)[150:]
    seconds = 2 * loop_seconds(usual_loops(), taught)
    learned = fit_loops(loop_terms(taught), seconds)
    assert np.abs(np.log(loop_seconds(learned, asked) / loop_seconds(usual_loops(), asked) / 2)).mean() < 0.05


def test_a_host_takes_its_loops_by_their_own_physics() -> None:
    """Fused loops need no call of their kind in the traces, and a saved host keeps their constants."""
    fitted = fit_host_calls([("aten::add", Op("add", (10**k,), "fp32"), 0, 1e-9 * 10**k) for k in range(3, 8)])
    (op,) = _ops(1)
    host = HostCalls(fitted.everything, fitted.families, fitted.labels, loops=fit_loops(loop_terms([op]), np.ones(1)))
    again = HostCalls.from_dict(host.to_dict(), {})
    for each in (host, again):
        assert np.isclose(each.seconds(["cpp_fused_0"], [op], [0])[0], loop_seconds(host.loops, [op])[0])


def test_steps_with_fused_loops_teach_their_constants() -> None:
    """A machine whose fused loops take twice as long is learned from its steps, also for loops that it never ran."""
    taught, (asked,) = _ops(40)[:39], _ops(41)[40:]
    seconds = 2 * loop_seconds(usual_loops(), taught)
    add = Op("add", (4096,), "fp32")
    ops, calls = (*taught, add), (*(f"cpp_fused_{k}" for k in range(39)), "aten::add")
    phases = np.zeros(40, dtype=np.int64)
    step = HostStep("s", ops, calls, phases, np.append(seconds, 1e-5), float(seconds.sum() + 2e-5))
    host = learn_host_calls([step])
    assert 1.5 < loop_seconds(host.loops, [asked])[0] / loop_seconds(usual_loops(), [asked])[0] < 2.5
