"""Fitting a table of corrections by kind and phase: on nodes of traces, and through the simulator on iterations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Program
from stepsight.gnn.context_model import BOUND
from stepsight.gnn.context_table import Cell, ContextTable
from stepsight.gnn.loss import ITERATION_DELTA, NODE_DELTA
from stepsight.training.context.fit_context import ITERATION_WEIGHT, Example, Whole, node_weights

Array = NDArray[np.float64]
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
