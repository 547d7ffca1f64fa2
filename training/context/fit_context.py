"""Fitting the context model: on nodes of traces, and on whole iterations through the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.kinds.op import Op
from stepsight.features.graph_features import Topology, join, node_features, topology
from stepsight.gnn.context_model import BOUND, LAYERS, ContextModel
from stepsight.gnn.context_table import Cell, Context, ContextTable
from stepsight.gnn.inference import ContextWeights
from stepsight.gnn.loss import ITERATION_DELTA, NODE_DELTA, iteration_loss, node_loss
from stepsight.training.context.through_simulator import Iteration, iteration_seconds

Array = NDArray[np.float64]

EPOCHS = 150
LEARNING_RATE = 0.01
WEIGHT_DECAY = 0.02
ITERATION_WEIGHT = 0.5  # weight of the loss on whole iterations, relative to the loss on nodes
UNIFORM_SHARE = 0.1  # share of the weight that every node gets regardless of its time


@dataclass(frozen=True)
class Example:
    """One distinct segment of one run.

    Attributes:
        program: Its nodes.
        alone: Seconds of each node on its own, ``(n,)``.
        inside: Measured seconds of each node within the segment, ``(n,)``, NaN where unknown.
        busy: Devices of the node that compute at the same time.
        run: Name of the run.
        repeats: Over how many executions ``inside`` is averaged.
    """

    program: Program
    alone: Array
    inside: Array
    busy: int
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
    hardware: Hardware,
    *,
    seed: int = 0,
    layers: int = LAYERS,
    epochs: int = EPOCHS,
    on_epoch: Callable[[int, float], None] | None = None,
) -> ContextWeights:
    """Train the context model.

    Args:
        examples: Distinct segments of traces.
        wholes: Whole iterations, which train through the simulator.
        hardware: What was measured.
        seed: Of the weights.
        layers: Rounds of messages; 0: a network without edges.
        epochs: Full-batch steps.
        on_epoch: Called with the number of the epoch and its loss.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = ContextModel(num_layers=layers)
        batch = _Batch.of(examples, wholes, hardware)
        model.set_range(batch.features)
        _train(model, batch, epochs, on_epoch)
        return model.weights()
    finally:
        torch.random.set_rng_state(state)
        torch.set_num_threads(threads)


def _train(model: ContextModel, batch: _Batch, epochs: int, on_epoch: Callable[[int, float], None] | None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=epochs, pct_start=0.2)
    for epoch in range(epochs):
        optimizer.zero_grad()
        loss = batch.loss(model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if on_epoch is not None:
            on_epoch(epoch, float(loss.detach()))


class _Nodes:
    """Nodes of distinct programs; a program that occurs in a trace and in a lowered job is stored once."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._known: dict[tuple[object, ...], NDArray[np.int64]] = {}
        self._count = 0
        self.features: list[Array] = []
        self.graphs: list[Topology] = []

    def add(self, program: Program, alone: Array, busy: int) -> NDArray[np.int64]:
        """Numbers of the program's nodes, ``(len(program),)``."""
        key = (program.digest_key, busy, alone.round(12).tobytes())
        if key not in self._known:
            self._known[key] = np.arange(self._count, self._count + len(program))
            self._count += len(program)
            self.features.append(node_features(program, alone, self._hardware, busy))
            self.graphs.append(topology(program))
        return self._known[key]


@dataclass(frozen=True)
class _Batch:
    """Everything to train on as one graph."""

    features: Tensor
    graph: Topology
    index: Tensor  # (example nodes,), numbers of the nodes that have a target
    target: Tensor  # (example nodes,)
    weight: Tensor  # (example nodes,)
    wholes: tuple[tuple[Whole, Tensor, Tensor], ...]  # with the numbers of its nodes and their seconds alone
    measured: Tensor  # (wholes,)

    @classmethod
    def of(cls, examples: Sequence[Example], wholes: Sequence[Whole], hardware: Hardware) -> _Batch:
        nodes = _Nodes(hardware)
        index = [nodes.add(each.program, each.alone, each.busy)[each.known] for each in examples]
        placed = []
        for whole in wholes:
            alone, bounds = whole.iteration.alone, whole.iteration.bounds
            parts = zip(whole.iteration.lowered.programs, np.split(alone, bounds[1:-1]), strict=True)
            own = np.concatenate([nodes.add(program, part, whole.busy) for program, part in parts])
            placed.append((whole, torch.from_numpy(own), torch.from_numpy(alone)))
        return cls(
            torch.from_numpy(np.concatenate(nodes.features)).float(),
            join(nodes.graphs),
            torch.from_numpy(np.concatenate(index or [np.zeros(0, np.int64)])),
            torch.from_numpy(np.concatenate([e.target[e.known] for e in examples] or [np.zeros(0)])).float(),
            torch.from_numpy(node_weights(examples)).float(),
            tuple(placed),
            torch.tensor([whole.measured_s for whole in wholes], dtype=torch.float64),
        )

    def loss(self, model: ContextModel) -> Tensor:
        correction: Tensor = model(self.features, self.graph)
        loss = correction.new_zeros(())
        if len(self.target):
            loss = loss + node_loss(correction[self.index], self.target, self.weight)
        if self.wholes:
            seconds = [
                iteration_seconds(whole.iteration, alone * correction[own].double().exp())
                for whole, own, alone in self.wholes
            ]
            loss = loss + ITERATION_WEIGHT * iteration_loss(torch.stack(seconds), self.measured).float()
        return loss


def node_weights(examples: Sequence[Example]) -> Array:
    """Weight of every measured node: its share of its run's time plus a constant; every run has the same total
    weight.
    """
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


def op_error(examples: Sequence[Example], context: Context | None, hardware: Hardware) -> float:
    """Time-weighted mean absolute log-error of ops in context, in percent; without ``context``, that of alone."""
    total = weights = 0.0
    for example in examples:
        ops = np.array([isinstance(node.work, Op) for node in example.program.nodes])
        off = np.log(example.alone / np.maximum(example.inside, 1e-9))
        if context is not None:
            off = off + context.log_correction(example.program, example.alone, hardware, example.busy)
        weight = example.repeats * np.nan_to_num(example.inside) * ops
        total += float(weight @ np.nan_to_num(np.abs(off)))
        weights += float(weight.sum())
    return 100.0 * float(np.expm1(total / weights)) if weights > 0 else 0.0


Ints = NDArray[np.int64]

STEPS = 12  # of reweighted least squares
PRECISION = 0.01  # of the prior that entries are 0; all nodes together have a weight of 1
_MOST_STEP = 0.5  # log units that an entry moves by in one step


def fit_table(examples: Sequence[Example], wholes: Sequence[Whole]) -> ContextTable:
    """Minimise the losses of the network (``gnn.loss``) over the entries of a table.

    Args:
        examples: Distinct segments of traces.
        wholes: Whole iterations.
    """
    cells = _Cells()
    index = [cells.of(each.program)[each.known] for each in examples if each.known.any()]
    target = np.concatenate([each.target[each.known] for each in examples] or [np.zeros(0)])
    weight = node_weights(examples)
    nodes = np.concatenate(index or [np.zeros((0, 3), np.int64)])
    placed = [(whole, np.concatenate([cells.of(p) for p in whole.iteration.lowered.programs])) for whole in wholes]
    logs = np.zeros(len(cells.names))
    for _ in range(STEPS if len(logs) else 0):
        normal, slope = PRECISION * np.eye(len(logs)), -PRECISION * logs
        normal[0, 0], slope[0] = normal[0, 0] * 1e-2, slope[0] * 1e-2  # what all nodes share is not shrunk
        if len(target):
            off = target - logs[nodes].sum(axis=1)
            _add(normal, slope, _one_hot(nodes, len(logs)), off, weight / weight.sum(), NODE_DELTA)
        if placed:
            rows, off = _whole_rows(placed, logs)
            _add(normal, slope, rows, off, np.full(len(off), ITERATION_WEIGHT / len(off)), ITERATION_DELTA)
        logs = logs + np.clip(np.linalg.solve(normal, slope), -_MOST_STEP, _MOST_STEP)
    return ContextTable(BOUND, {cell: float(value) for cell, value in zip(cells.names, logs, strict=True)})


class _Cells:
    """Numbers of the entries of a table."""

    def __init__(self) -> None:
        self.names: dict[Cell, int] = {("", ""): 0}

    def of(self, program: Program) -> Ints:
        """Entries of each node, ``(n, 3)``: all nodes, its kind, its kind in its phase."""
        names = self.names
        rows = [
            (0, names.setdefault((kind, ""), len(names)), names.setdefault((kind, program.label), len(names)))
            for kind in (node.work.kind for node in program.nodes)
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _one_hot(nodes: Ints, width: int) -> Array:
    rows = np.zeros((len(nodes), width))
    np.add.at(rows, (np.arange(len(nodes))[:, None], nodes), 1.0)
    return rows


def _whole_rows(placed: Sequence[tuple[Whole, Ints]], logs: Array) -> tuple[Array, Array]:
    """Slope of each log iteration time by the entries, ``(wholes, entries)``, and how far it is off, ``(wholes,)``."""
    rows, off = np.zeros((len(placed), len(logs))), np.zeros(len(placed))
    for place, (whole, cells) in enumerate(placed):
        inside = whole.iteration.alone * np.exp(np.clip(logs[cells].sum(axis=1), -BOUND, BOUND))
        seconds, counts = whole.iteration.seconds_and_counts(inside)
        np.add.at(rows[place], cells, (counts * inside / seconds)[:, None])
        off[place] = np.log(whole.measured_s / seconds)
    return rows, off


def _add(normal: Array, slope: Array, rows: Array, off: Array, weight: Array, delta: float) -> None:
    """Add the terms of a Huber loss, of weights that add up to its own, to the normal equations."""
    each = weight / np.maximum(np.abs(off), delta)
    normal += rows.T @ (each[:, None] * rows)
    slope += rows.T @ (each * off)
