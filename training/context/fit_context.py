"""Training the context network: on nodes of traces, and on whole iterations through the simulator.

Whole iterations teach through the simulator, which is a differentiable function: the iteration time is ``T = sum_i n_i
t_i`` over the nodes on the critical path, so ``dT / dt_i = n_i``: how often node ``i`` lies on it, and how much slower
its rank or link is.  That is all back-propagation needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import find_fabric, usual_fabric
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.features import node_features as graph_features
from stepsight.gnn.context_model import BOUND, ContextModel, iteration_loss, node_loss
from stepsight.gnn.contexts import Context
from stepsight.simulator.clock.engine import add_path
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.durations.segment_timing import Timer, launch_calls, timer_of
from stepsight.simulator.iteration.simulate import distinct_pipelines, simulate, simulate_lowered
from stepsight.simulator.programs.lower import Lowered, lower
from stepsight.training.measured.imported_ops import ImportedSegments
from stepsight.training.measured.measured import MeasuredRun, average
from stepsight.training.measured.planning import StandInLatency, run_latency
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

EPOCHS = 150
LEARNING_RATE = 0.01
WEIGHT_DECAY = 0.02
ITERATION_WEIGHT = 0.5  # weight of the loss on whole iterations, relative to the loss on nodes
SIMULATED_EVERY = 5  # epochs; between them the critical paths stay, and with them how often a node counts
UNIFORM_SHARE = 0.1  # share of the weight that every node gets regardless of its time


@dataclass(frozen=True)
class Example:
    """One distinct segment of one run."""

    graph: graph_features.SegmentGraph  # its nodes, and where they ran
    alone: Array  # seconds of each node on its own, (n,)
    inside: Array  # measured seconds of each node within the segment, (n,), NaN where unknown
    run: str  # name of the run
    repeats: int = 1  # over how many executions inside is averaged

    @property
    def known(self) -> NDArray[np.bool_]:
        """``(n,)``: measured nodes, which train and judge."""
        return np.isfinite(self.inside)

    @property
    def target(self) -> Array:
        """Log of seconds in context over seconds alone, ``(n,)``, clipped to the model's range."""
        return np.clip(np.log(np.maximum(self.inside, 1e-9) / self.alone), -BOUND, BOUND)


def fit_context(
    examples: Sequence[Example],
    wholes: Sequence[Iteration],
    *,
    seed: int = 0,
    epochs: int = EPOCHS,
    relations: Sequence[str] = graph_features.HEARD,
) -> ContextModel:
    """Train the context network on distinct segments, and on whole iterations through the simulator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = ContextModel(relations=relations)
        batch = Batch(examples, wholes)
        model.set_range(batch.features)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=epochs, pct_start=0.2)
        for epoch in range(epochs):
            optimizer.zero_grad()
            batch.loss(model, again=epoch % SIMULATED_EVERY == 0).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return model
    finally:
        torch.set_num_threads(threads)


class Batch:
    """Segments and iterations as one graph; a program that occurs in a trace and in a lowered job is stored once."""

    def __init__(self, examples: Sequence[Example], wholes: Sequence[Iteration]) -> None:
        numbers: dict[tuple[object, ...], Ints] = {}  # of the nodes of each distinct program
        features, graphs, count = [np.zeros((0, len(graph_features.node_feature_names())))], [], 0

        def add(graph: graph_features.SegmentGraph, alone: Array) -> Ints:
            nonlocal count
            key = (graph.program.digest_key, graph.busy, alone.round(12).tobytes())
            if key not in numbers:
                numbers[key] = np.arange(count, count + len(alone))
                count += len(alone)
                features.append(graph_features.node_features(graph, alone))
                graphs.append(graph_features.topology(graph.program))
            return numbers[key]

        index = [np.zeros(0, np.int64), *(add(each.graph, each.alone)[each.known] for each in examples)]
        self.wholes: list[tuple[Iteration, Tensor, Tensor]] = []  # each with its nodes' numbers and seconds alone
        for whole in wholes:
            alone, bounds = whole.alone, whole.bounds
            parts = zip(whole.lowered.programs, np.split(alone, bounds[1:-1]), strict=True)
            hardware = whole.latency.hardware
            own = [add(graph_features.SegmentGraph(program, hardware, whole.busy), part) for program, part in parts]
            self.wholes.append((whole, torch.from_numpy(np.concatenate(own)), torch.from_numpy(alone)))
        self.features = torch.from_numpy(np.concatenate(features)).float()
        self.graph = graph_features.join(graphs)
        self.index = torch.from_numpy(np.concatenate(index))  # of the nodes that have a target
        target = [np.zeros(0), *(each.target[each.known] for each in examples)]
        self.target = torch.from_numpy(np.concatenate(target)).float()
        self.weight = torch.from_numpy(node_weights(examples)).float()
        self.measured = torch.tensor([whole.measured_s for whole in wholes], dtype=torch.float64)
        self.paths: dict[tuple[int, int], tuple[float, Tensor]] = {}  # by number of whole and level

    def loss(self, model: ContextModel, again: bool = True) -> Tensor:
        """The losses of all levels of the network; ``again``: simulate, else take the critical paths of before."""
        corrections: Tensor = model(self.features, self.graph)
        loss = corrections.new_zeros(())
        if len(self.target):
            loss = loss + node_loss(corrections[:, self.index], self.target, self.weight)
        if self.wholes:
            seconds = []
            for number, (whole, own, alone) in enumerate(self.wholes):
                for level, inside in enumerate(alone * corrections[:, own].double().exp()):
                    if again or (number, level) not in self.paths:
                        self.paths[number, level] = critical_path(whole, inside)
                    constant, counts = self.paths[number, level]
                    seconds.append(counts @ inside + constant)  # whose backward is n_i
            levels = torch.stack(seconds).reshape(len(self.wholes), -1).T
            loss = loss + ITERATION_WEIGHT * iteration_loss(levels, self.measured).float()
        return loss


def node_weights(examples: Sequence[Example]) -> Array:
    """Weight of every measured node: its share of its run's time plus a constant; all runs weigh the same."""
    totals: dict[str, float] = {}
    counts: dict[str, int] = {}
    for example in examples:
        totals[example.run] = totals.get(example.run, 0.0) + example.repeats * float(np.nansum(example.inside))
        counts[example.run] = counts.get(example.run, 0) + int(example.known.sum())
    parts = [
        (1 - UNIFORM_SHARE) * e.repeats * e.inside[e.known] / totals[e.run] + UNIFORM_SHARE / counts[e.run]
        for e in examples
        if e.known.any()
    ]
    return np.concatenate(parts or [np.zeros(0)])


def op_error(examples: Sequence[Example], context: Context | None) -> float:
    """Time-weighted mean absolute log-error of ops in context, in percent; without ``context``, that of alone."""
    total = weights = 0.0
    for example in examples:
        ops = np.array([isinstance(node.work, Op) for node in example.graph.program.nodes])
        seconds = example.alone if context is None else context(example.graph, example.alone)
        off = np.log(seconds / np.maximum(example.inside, 1e-9))
        weight = example.repeats * np.nan_to_num(example.inside) * ops
        total += float(weight @ np.nan_to_num(np.abs(off)))
        weights += float(weight.sum())
    return 100.0 * float(np.expm1(total / weights)) if weights > 0 else 0.0


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
        given = [(*self._inside[id(program)], slowed) for program, slowed in zip(programs, seconds, strict=True)]
        return [inside * _ratio(slowed, alone) for inside, alone, slowed in given]


@dataclass(frozen=True)
class Iteration:
    """A job, its segments and their durations alone, as a function of the durations of its nodes in context."""

    job: Job
    latency: LatencyModel
    measured_s: float = math.nan  # of a run's iteration
    busy: int = 1  # devices of a node that compute at once
    run: str = ""  # name of the run

    @cached_property
    def lowered(self) -> Lowered:
        return lower(self.job, self.latency.hardware)

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
        counts = np.zeros(len(inside))  # how often each node is on the path, times its slowdown
        for segment, condition, uses in simulation.segment_uses():
            part = slice(self.bounds[segment], self.bounds[segment + 1])
            times, own = simulation.ops_of(segment, condition), counts[part]
            every, slower = np.arange(len(own), dtype=np.int32), _ratio(times.seconds, inside[part])
            for to, since in np.argwhere(uses > 0).tolist():
                add_path(times.critical[since], int(times.last[to, since]), every, slower, uses[to, since], own)
        return simulation.iteration_time_s, np.where(self.fixed, 0.0, counts)


def _ratio(slowed: Array, seconds: Array) -> Array:
    """How much slower each node is, 1 where it takes no time."""
    ratio: Array = np.divide(slowed, seconds, out=np.ones(len(seconds)), where=seconds > 0)
    return ratio


def critical_path(iteration: Iteration, inside: Tensor) -> tuple[float, Tensor]:
    """The constant and ``n_i``, ``(nodes,)``, of the time as a linear function of durations near ``inside``."""
    seconds = inside.detach().double().numpy()
    total, counts = iteration.seconds_and_counts(seconds)
    return total - float(counts @ seconds), torch.from_numpy(counts).to(inside.dtype)


_UNKNOWN_LINKS = "loopback"  # of hardware without usual links: they are features of collectives, and teach nothing

Taught = MeasuredRun | ImportedSegments  # a run with segments
Measured = tuple[list[Example], list[Iteration]]  # segments of a run, and its iteration if that was timed


def make_examples(runs: Sequence[Taught], predictor: Predictor) -> list[Example]:
    """Distinct segments of the runs' traces, with the predictor's seconds alone.

    Nodes of imported runs that no predictor predicts are left out: opaque kernels, and what has unknown sizes.
    """
    examples = []
    for run in runs:
        latency: LatencyModel
        if isinstance(run, MeasuredRun):
            latency = run_latency(run.manifest, predictor)
        elif run.job is not None and run.job.hardware_name == predictor.hardware.name:
            latency = predictor.latency(run.job)
        else:  # it ran on one device with the hardware's usual links
            links = usual_fabric(predictor.hardware.name, _UNKNOWN_LINKS)
            latency = predictor.latency_on(find_fabric(links), 1, 1)
        timer = timer_of(latency)
        for mean, repeats in average(run.segments):
            works, inside = [node.work for node in mean.program.nodes], mean.slot_s
            if works:
                if isinstance(run, ImportedSegments):
                    inside = np.where([work.sized for work in works], inside, np.nan)
                alone = timer.work_seconds(works) * [node.share for node in mean.program.nodes]
                graph = graph_features.SegmentGraph(mean.program, predictor.hardware, mean.busy)
                examples.append(Example(graph, alone, inside, mean.run, repeats))
    return examples


def make_wholes(runs: Sequence[Taught], predictor: Predictor) -> list[Iteration]:
    """The whole runs as functions of their nodes, with their measured iteration times."""
    manifests = [run.manifest for run in runs if isinstance(run, MeasuredRun) and run.whole]
    return [
        Iteration(run.job, run_latency(run, predictor), run.iteration_time_s, run.busy, run.name) for run in manifests
    ]


def measured_runs(runs: Sequence[Taught], predictor: Predictor) -> list[Measured]:
    """What each run teaches, with a predictor's seconds alone."""
    return [(make_examples([run], predictor), make_wholes([run], predictor)) for run in runs]


def joined(runs: Iterable[Measured]) -> Measured:
    """What some runs teach together."""
    parts = list(runs)
    return [each for examples, _ in parts for each in examples], [each for _, wholes in parts for each in wholes]


def iteration_times(runs: Sequence[MeasuredRun], predictor: Predictor) -> Array:
    """Predicted seconds of each run's job, before calibration, ``(runs,)``."""
    latencies = [(run.manifest.job, run_latency(run.manifest, predictor)) for run in runs]
    return np.array([simulate(job, latency).iteration_time_s for job, latency in latencies])
