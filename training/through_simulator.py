"""Learning from whole iterations: the simulator as one differentiable function.

The iteration time is ``T = sum_i n_i t_i`` over the nodes on the critical path, so ``dT / dt_i = n_i``: how often
node ``i`` lies on it.  That is all back-propagation needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepsight.dataset.hardware import Hardware
from stepsight.dataset.job import Job
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.program import Program
from stepsight.simulator.engine import add_path, walk_schedule
from stepsight.simulator.latency import LatencyModel
from stepsight.simulator.lowering import Lowered, lower
from stepsight.simulator.simulate import Simulation, simulate_seconds

Array = NDArray[np.float64]


class _Given:
    """A latency model whose durations in context are given."""

    def __init__(self, hardware: Hardware, inside: Sequence[Array]) -> None:
        self.hardware = hardware
        self._inside = inside

    def op_seconds(self, ops: Sequence[Op]) -> Array:
        raise NotImplementedError

    def collective_seconds(self, collectives: Sequence[Collective]) -> Array:
        raise NotImplementedError

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Array]) -> Sequence[Array]:
        return self._inside


@dataclass(frozen=True)
class Iteration:
    """A job as a function of the durations of its nodes.

    Attributes:
        job: What runs.
        lowered: Its programs.
        hardware: What it runs on.
        work_seconds: Of every signature alone, as in ``lowered.all_works``.
    """

    job: Job
    lowered: Lowered
    hardware: Hardware
    work_seconds: Array

    @classmethod
    def of(cls, job: Job, latency: LatencyModel) -> Iteration:
        lowered = lower(job, latency.hardware)
        ops, collectives = lowered.works
        seconds = np.concatenate([latency.op_seconds(ops), latency.collective_seconds(collectives)])
        return cls(job, lowered, latency.hardware, seconds)

    @property
    def alone(self) -> Array:
        """Seconds alone of every node of every program, ``(nodes,)``."""
        graph = self.lowered.graph
        return np.asarray(self.work_seconds[graph.work] * graph.share)

    def seconds_and_counts(self, inside: Array) -> tuple[float, Array]:
        """Iteration time for given node durations, ``(nodes,)``, and ``n_i`` of every node, same shape."""
        parts = np.split(inside, self.lowered.graph.bounds[1:-1])
        simulation = simulate_seconds(self.job, self.lowered, _Given(self.hardware, parts), self.work_seconds)
        return simulation.iteration_time_s, node_counts(simulation)


def node_counts(simulation: Simulation) -> Array:
    """How often each node of the job's programs lies on the critical path, ``(nodes,)``."""
    low, times = simulation.lowered, simulation.segments
    at, clock = divmod(int(np.argmax(simulation.finish[-low.num_stages :])), 2)
    uses = np.zeros((len(low.programs), 2, 2))
    action = len(low.stage) - low.num_stages + at
    messages = np.zeros(len(low.messages))
    walk_schedule(action, clock, low.segment, low.message, low.previous, simulation.cause, uses, messages)
    counts = np.zeros(len(times.seconds))
    every, one = np.arange(len(counts), dtype=np.int32), np.ones(len(counts))
    for program, to, start in np.argwhere(uses > 0).tolist():
        last = int(times.last[program, to, start])
        add_path(times.critical[start], last, every, one, uses[program, to, start], counts)
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
    """Iteration time as a tensor that remembers ``n_i``; ``inside`` is ``(nodes,)`` seconds."""
    result: Tensor = _Simulate.apply(inside, iteration)  # type: ignore[no-untyped-call]
    return result
