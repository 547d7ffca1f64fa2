"""Learning from whole iterations: the simulator as a differentiable function.

The iteration time is ``T = sum_i n_i t_i`` over the nodes on the critical path, so ``dT / dt_i = n_i``: how often
node ``i`` lies on it.  That is all back-propagation needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepsight.dataset.job import Job
from stepsight.dataset.program import Program
from stepsight.simulator.clock.engine import add_path
from stepsight.simulator.latency_model import LatencyModel, dispatch_calls
from stepsight.simulator.lowering.distinct_pipelines import distinct_pipelines
from stepsight.simulator.lowering.lower import Lowered, lower
from stepsight.simulator.segment_timing import Timer, timer_of
from stepsight.simulator.simulate import Simulation, simulate_lowered

Array = NDArray[np.float64]


class _Given:
    """A latency model with given durations in context, by the identity of the program."""

    knows_context = True

    def __init__(self, alone: LatencyModel, inside: dict[int, Array]) -> None:
        self.hardware = alone.hardware
        self.dispatch_calls = dispatch_calls(alone)
        self.op_seconds = alone.op_seconds
        self.collective_seconds = alone.collective_seconds
        self._inside = inside

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Array]) -> Sequence[Array]:
        return [self._inside[id(program)] for program in programs]


@dataclass(frozen=True)
class Iteration:
    """A job as a function of the durations of its nodes.

    Attributes:
        job: What runs.
        lowered: Its segments.
        latency: What is known of their durations alone.
    """

    job: Job
    lowered: Lowered
    latency: LatencyModel

    @classmethod
    def of(cls, job: Job, latency: LatencyModel) -> Iteration:
        return cls(job, lower(job, latency.hardware), latency)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """Nodes of program ``i`` are ``bounds[i]:bounds[i + 1]``."""
        return np.cumsum([0, *(len(program) for program in self.lowered.programs)])

    @cached_property
    def alone(self) -> Array:
        """Seconds alone of every node of every program, ``(nodes,)``."""
        timer = timer_of(self.latency)
        segments = self.lowered.segments
        return np.concatenate([timer.work_seconds(s.works)[s.graph.work] * s.graph.share for s in segments])

    def seconds_and_counts(self, inside: Array) -> tuple[float, Array]:
        """Iteration time for given node durations, ``(nodes,)``, and ``n_i`` of every node, same shape."""
        parts = np.split(inside, self.bounds[1:-1])
        given = _Given(self.latency, {id(p): part for p, part in zip(self.lowered.programs, parts, strict=True)})
        hardware = self.latency.hardware
        pipelines = distinct_pipelines(self.job, given)
        simulation = simulate_lowered(self.job, self.lowered, Timer(given), hardware, pipelines)
        return simulation.iteration_time_s, node_counts(simulation, self.bounds)


def node_counts(simulation: Simulation, bounds: NDArray[np.int64]) -> Array:
    """How often each node of the job's programs lies on the critical path, ``(bounds[-1],)``."""
    counts = np.zeros(int(bounds[-1]))
    for segment, condition, uses in simulation.segment_uses():
        times, own = simulation.ops_of(segment, condition), counts[bounds[segment] : bounds[segment + 1]]
        every, one = np.arange(len(own), dtype=np.int32), np.ones(len(own))
        for to, since in np.argwhere(uses > 0).tolist():
            add_path(times.critical[since], int(times.last[to, since]), every, one, uses[to, since], own)
    return counts


class _Simulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seconds: Tensor, iteration: Iteration) -> Tensor:
        total, counts = iteration.seconds_and_counts(seconds.detach().double().numpy())
        ctx.save_for_backward(torch.from_numpy(counts).to(seconds.dtype))
        return seconds.new_tensor(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (counts,) = ctx.saved_tensors
        return grad * counts, None


def iteration_seconds(iteration: Iteration, inside: Tensor) -> Tensor:
    """Iteration time as a tensor whose backward uses ``n_i``; ``inside`` is ``(nodes,)`` seconds."""
    result: Tensor = _Simulate.apply(inside, iteration)  # type: ignore[no-untyped-call]
    return result
