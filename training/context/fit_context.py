"""Training the context network: on nodes of traces, and on whole iterations through the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepsight.dataset.kinds.op import Op
from stepsight.features.graph_features import (
    HEARD,
    SegmentGraph,
    Topology,
    join,
    node_feature_names,
    node_features,
    topology,
)
from stepsight.gnn.context_model import BOUND, ContextModel, iteration_loss, node_loss
from stepsight.training.context.through_simulator import Iteration, critical_path, iteration_seconds
from stepsight.training.predictor.own_context import Context

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
    """One distinct segment of one run.

    Attributes:
        graph: Its nodes, and where they ran.
        alone: Seconds of each node on its own, ``(n,)``.
        inside: Measured seconds of each node within the segment, ``(n,)``, NaN where unknown.
        run: Name of the run.
        repeats: Over how many executions ``inside`` is averaged.
    """

    graph: SegmentGraph
    alone: Array
    inside: Array
    run: str
    repeats: int = 1

    @property
    def known(self) -> NDArray[np.bool_]:
        """``(n,)``: measured nodes, which train and judge."""
        return np.isfinite(self.inside)

    @property
    def target(self) -> Array:
        """Log of seconds in context over seconds alone, ``(n,)``, clipped to the model's range."""
        return np.clip(np.log(np.maximum(self.inside, 1e-9) / self.alone), -BOUND, BOUND)


@dataclass(frozen=True)
class Whole:
    """A run's iteration: the job as a function of its nodes, and the measured time."""

    iteration: Iteration
    measured_s: float
    busy: int
    run: str


def fit_context(
    examples: Sequence[Example],
    wholes: Sequence[Whole],
    *,
    seed: int = 0,
    epochs: int = EPOCHS,
    relations: Sequence[str] = HEARD,
) -> ContextModel:
    """Train the context network on distinct segments, and on whole iterations through the simulator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = ContextModel(relations=relations)
        batch = Batch.of(examples, wholes)
        model.set_range(batch.features)
        _train(model, batch, epochs)
        return model
    finally:
        torch.random.set_rng_state(state)
        torch.set_num_threads(threads)


def _train(model: ContextModel, batch: Batch, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=epochs, pct_start=0.2)
    for epoch in range(epochs):
        optimizer.zero_grad()
        batch.loss(model, again=epoch % SIMULATED_EVERY == 0).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


class _Nodes:
    """Nodes of distinct programs; a program that occurs in a trace and in a lowered job is stored once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Ints] = {}
        self._count = 0
        self.features: list[Array] = []
        self.graphs: list[Topology] = []

    def add(self, graph: SegmentGraph, alone: Array) -> Ints:
        """Numbers of the segment's nodes, ``(n,)``."""
        key = (graph.program.digest_key, graph.busy, alone.round(12).tobytes())
        if key not in self._known:
            self._known[key] = np.arange(self._count, self._count + len(alone))
            self._count += len(alone)
            self.features.append(node_features(graph, alone))
            self.graphs.append(topology(graph.program))
        return self._known[key]


@dataclass(frozen=True)
class Batch:
    """Segments and iterations as one graph."""

    features: Tensor
    graph: Topology
    index: Tensor  # (example nodes,), numbers of the nodes that have a target
    target: Tensor  # (example nodes,)
    weight: Tensor  # (example nodes,)
    wholes: tuple[tuple[Whole, Tensor, Tensor], ...]  # with the numbers of its nodes and their seconds alone
    measured: Tensor  # (wholes,)
    paths: dict[tuple[int, int], tuple[float, Tensor]] = field(default_factory=dict)  # by number of whole and level

    @classmethod
    def of(cls, examples: Sequence[Example], wholes: Sequence[Whole]) -> Batch:
        """Of some examples and iterations."""
        nodes = _Nodes()
        index = [nodes.add(each.graph, each.alone)[each.known] for each in examples]
        placed = []
        for whole in wholes:
            alone, bounds = whole.iteration.alone, whole.iteration.bounds
            parts = zip(whole.iteration.lowered.programs, np.split(alone, bounds[1:-1]), strict=True)
            hardware = whole.iteration.latency.hardware
            own = [nodes.add(SegmentGraph(program, hardware, whole.busy), part) for program, part in parts]
            placed.append((whole, torch.from_numpy(np.concatenate(own)), torch.from_numpy(alone)))
        return cls(
            torch.from_numpy(np.concatenate([np.zeros((0, len(node_feature_names()))), *nodes.features])).float(),
            join(nodes.graphs),
            torch.from_numpy(np.concatenate(index or [np.zeros(0, np.int64)])),
            torch.from_numpy(np.concatenate([e.target[e.known] for e in examples] or [np.zeros(0)])).float(),
            torch.from_numpy(node_weights(examples)).float(),
            tuple(placed),
            torch.tensor([whole.measured_s for whole in wholes], dtype=torch.float64),
        )

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
                        self.paths[number, level] = critical_path(whole.iteration, inside)
                    seconds.append(iteration_seconds(self.paths[number, level], inside))
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
