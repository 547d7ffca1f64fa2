"""Learning from whole iterations: the simulator as a differentiable function.

The iteration time is ``T = sum_i n_i t_i`` over the nodes on the critical path, so ``dT / dt_i = n_i``: how often
node ``i`` lies on it, and how much slower its rank or link is.  That is all back-propagation needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepsight.dataset.graph.program import Program
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.clock.engine import add_path
from stepsight.simulator.durations.latency_model import LatencyModel, launch_calls
from stepsight.simulator.durations.segment_timing import Timer, timer_of
from stepsight.simulator.iteration.simulate import Simulation, simulate_lowered
from stepsight.simulator.iteration.simulated_iteration import distinct_pipelines
from stepsight.simulator.programs.lower import Lowered, lower
from stepsight.training.measured.planning import StandInLatency

Array = NDArray[np.float64]


class _Given:
    """A latency model with given durations in context, and durations alone, by the identity of the program.

    Slow ranks and links multiply the durations in context by as much as those alone.
    """

    knows_context = True

    def __init__(self, alone: LatencyModel, inside: dict[int, tuple[Array, Array]]) -> None:
        self.hardware = alone.hardware
        self.calls = launch_calls(alone)
        self.op_seconds = alone.op_seconds
        self.collective_seconds = alone.collective_seconds
        self._inside = inside

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Array]) -> Sequence[Array]:
        found = []
        for program, slowed in zip(programs, seconds, strict=True):
            given, own = self._inside[id(program)]
            found.append(given * _ratio(slowed, own))
        return found


@dataclass(frozen=True)
class Iteration:
    """A job, its segments and their durations alone, as a function of the durations of its nodes in context."""

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

    @cached_property
    def fixed(self) -> NDArray[np.bool_]:
        """``(nodes,)``: collectives of an emulated rank, which take what its table says in any context."""
        emulated = isinstance(self.latency, StandInLatency)
        nodes = [node for program in self.lowered.programs for node in program.nodes]
        return np.array([emulated and isinstance(node.work, Collective) for node in nodes], dtype=np.bool_)

    def seconds_and_counts(self, inside: Array) -> tuple[float, Array]:
        """Iteration time for given node durations, ``(nodes,)``, and ``n_i`` of every node, same shape."""
        inside = np.where(self.fixed, self.alone, inside)
        parts = (np.split(values, self.bounds[1:-1]) for values in (inside, self.alone))
        given = _Given(self.latency, dict(zip(map(id, self.lowered.programs), zip(*parts, strict=True), strict=True)))
        hardware = self.latency.hardware
        pipelines = distinct_pipelines(self.job, given)
        simulation = simulate_lowered(self.job, self.lowered, Timer(given), hardware, pipelines)
        return simulation.iteration_time_s, np.where(self.fixed, 0.0, _node_counts(simulation, self.bounds, inside))


def _ratio(slowed: Array, seconds: Array) -> Array:
    """How much slower each node is, 1 where it takes no time."""
    ratio: Array = np.divide(slowed, seconds, out=np.ones(len(seconds)), where=seconds > 0)
    return ratio


def _node_counts(simulation: Simulation, bounds: NDArray[np.int64], inside: Array) -> Array:
    """Derivative by each node's seconds, ``(bounds[-1],)``: how often it is on the path, times its slowdown."""
    counts = np.zeros(int(bounds[-1]))
    for segment, condition, uses in simulation.segment_uses():
        part = slice(bounds[segment], bounds[segment + 1])
        times, own = simulation.ops_of(segment, condition), counts[part]
        every, slower = np.arange(len(own), dtype=np.int32), _ratio(times.seconds, inside[part])
        for to, since in np.argwhere(uses > 0).tolist():
            add_path(times.critical[since], int(times.last[to, since]), every, slower, uses[to, since], own)
    return counts


def critical_path(iteration: Iteration, inside: Tensor) -> tuple[float, Tensor]:
    """The constant and ``n_i``, ``(nodes,)``, of the time as a linear function of durations near ``inside``."""
    seconds = inside.detach().double().numpy()
    total, counts = iteration.seconds_and_counts(seconds)
    return total - float(counts @ seconds), torch.from_numpy(counts).to(inside.dtype)


def iteration_seconds(path: tuple[float, Tensor], inside: Tensor) -> Tensor:
    """Iteration time along a critical path, whose backward is ``n_i``; ``inside`` is ``(nodes,)`` seconds."""
    constant, counts = path
    return counts @ inside + constant
