"""Intervals of a task's models: doubts of nodes by kind, propagated to sums with correlation, and conformal after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.context_task import ContextTask
from stepsight.training.intervals.conformal import COVERAGE

Array = NDArray[np.float64]
PRIOR = 5.0  # nodes, or graphs, of the usual doubt that a kind's own is mixed with
LEAST = 1e-6  # log units; smaller doubts count as this one
ROUNDS = 60  # of fitting the doubts of kinds to errors of sums


@dataclass(frozen=True)
class Residuals:
    """What a model was off by.

    Attributes:
        nodes: ``log(predicted / measured)`` of the measured nodes of each graph; empty where whole graphs are judged.
        totals: The same of each graph, ``(graphs,)``: of the sum of these nodes, or of the whole.
    """

    nodes: list[Array]
    totals: Array


@dataclass(frozen=True)
class Covered:
    """Intervals on graphs that judge.

    Attributes:
        nodes: Share of each graph's time in nodes that lie in their interval, ``(graphs,)``; NaN without such nodes.
        node_widths: Half of the intervals' width, log units, mean weighted by time; NaN likewise.
        totals: 1 where the sum lies in its interval, else 0.
        total_widths: Half of the width, log units.
    """

    nodes: Array
    node_widths: Array
    totals: Array
    total_widths: Array

    @classmethod
    def empty(cls, graphs: int) -> Covered:
        """Nothing is known yet."""
        return cls(*(np.full(graphs, np.nan) for _ in range(4)))

    def put(self, places: Sequence[int], found: Covered) -> None:
        """Enter what was found of some graphs."""
        for own, other in zip(vars(self).values(), vars(found).values(), strict=True):
            own[list(places)] = other


def residuals_of(task: ContextTask, graphs: Sequence[HeteroData], answers: tuple[list[Array], Array]) -> Residuals:
    """What answers are off by."""
    nodes, totals = answers
    if task.whole:
        measured = np.array([float(graph.total) for graph in graphs])
        return Residuals([np.zeros(0)] * len(graphs), np.log(totals / measured))
    off, sums = [], np.zeros(len(graphs))
    for place, (graph, seconds) in enumerate(zip(graphs, nodes, strict=True)):
        truth = graph[task.readout].seconds.double().numpy()
        known = np.isfinite(truth)
        off.append(np.log(seconds[known] / truth[known]))
        if known.any():
            sums[place] = np.log(seconds[known].sum() / truth[known].sum())
    return Residuals(off, sums)


def errors_of(task: ContextTask, graphs: Sequence[HeteroData], off: Residuals) -> tuple[Array, Array]:
    """Mean |log| error, and mean relative error, of each graph."""
    if task.whole:
        return np.abs(off.totals), np.abs(np.expm1(off.totals))
    logs, relative = [], []
    for graph, own in zip(graphs, off.nodes, strict=True):
        nodes = graph[task.readout]
        weight = nodes.weight.double().numpy()[np.isfinite(nodes.seconds.numpy())] + 1e-15
        logs.append(float(np.average(np.abs(own), weights=weight)) if len(own) else 0.0)
        relative.append(float(np.average(np.abs(np.expm1(own)), weights=weight)) if len(own) else 0.0)
    return np.array(logs), np.array(relative)


class Doubt:
    """How far a model may be off, from its answers on groups that were held back.

    A kind of node has one doubt, and all nodes of a graph that are of one kind share their error.  Errors of two kinds
    have one correlation.  Half widths are these doubts times a factor that conformal prediction over groups finds
    (the pooled distribution of Dunn et al. 2022, arXiv:1809.07441).

    Args:
        task: Of the models.
        places: Graphs that were held back.
        off: What the model was off by on them.
        coverage: Part of what judges that the intervals are meant to hold.
    """

    def __init__(self, task: ContextTask, places: Sequence[int], off: Residuals, coverage: float = COVERAGE) -> None:
        self._task, self._correlation, self._node_factor = task, 1.0, 1.0
        graphs = [task.graphs[place] for place in places]
        groups, weights = _units(task, places), _weights(task, places)
        if task.whole:
            self._by_kind, self._usual = self._from_sums(graphs, off.totals)
            self._correlation = 0.0
        else:
            self._by_kind, self._usual = self._from_nodes(graphs, off, weights)
            self._correlation = self._shared(graphs, off.totals)
            scores = [np.abs(own) / self._of_nodes(graph) for own, graph in zip(off.nodes, graphs, strict=True)]
            spent = [weight * _spent(task, graph) for weight, graph in zip(weights, graphs, strict=True)]
            owner = np.repeat(np.arange(len(graphs)), [len(each) for each in scores])
            names = [groups[place] for place in owner.tolist()]
            self._node_factor = pooled_quantile(np.concatenate(scores), np.concatenate(spent), names, coverage)
        scores_of_sums = np.abs(off.totals) / [self._of_sum(graph) for graph in graphs]
        self._factor = pooled_quantile(scores_of_sums, np.ones(len(graphs)), groups, coverage)

    def covered(self, places: Sequence[int], off: Residuals) -> Covered:
        """Which answers on other graphs lie in their intervals."""
        found = Covered.empty(len(places))
        for row, (place, own, total) in enumerate(zip(places, off.nodes, off.totals, strict=True)):
            graph = self._task.graphs[place]
            half = self._factor * self._of_sum(graph)
            found.totals[row], found.total_widths[row] = float(abs(total) <= half), half
            if len(own):
                halves, spent = self._node_factor * self._of_nodes(graph), _spent(self._task, graph)
                found.nodes[row] = np.average(np.abs(own) <= halves, weights=spent)
                found.node_widths[row] = np.average(halves, weights=spent)
        return found

    def _of_nodes(self, graph: HeteroData) -> Array:
        keys = graph[self._task.readout].key.numpy()[_known(self._task, graph)]
        return np.array([self._by_kind.get(key, self._usual) for key in keys.tolist()])

    def _of_sum(self, graph: HeteroData) -> float:
        keys, shares = _shares(self._task, graph)
        parts = shares * [self._by_kind.get(key, self._usual) for key in keys]
        apart, together = float((parts**2).sum()), float(parts.sum()) ** 2
        return max(float(np.sqrt(apart + self._correlation * (together - apart))), LEAST)

    @staticmethod
    def _kinds(kinds: Sequence[int], doubts: Array) -> dict[int, float]:
        return dict(zip(kinds, np.maximum(doubts, LEAST).tolist(), strict=True))

    def _from_nodes(
        self, graphs: Sequence[HeteroData], off: Residuals, weights: Array
    ) -> tuple[dict[int, float], float]:
        """The mean |log| of each kind, weighted by time."""
        task = self._task
        keys = np.concatenate([graph[task.readout].key.numpy()[_known(task, graph)] for graph in graphs])
        spent = np.concatenate([weight * _spent(task, graph) for weight, graph in zip(weights, graphs, strict=True)])
        sizes = np.abs(np.concatenate(off.nodes))
        usual = float(np.average(sizes, weights=spent + 1e-15))
        kinds, at, counts = np.unique(keys, return_inverse=True, return_counts=True)
        own = np.bincount(at, sizes * spent) / (np.bincount(at, spent) + 1e-15)
        return self._kinds(kinds.tolist(), (counts * own + PRIOR * usual) / (counts + PRIOR)), max(usual, LEAST)

    def _from_sums(self, graphs: Sequence[HeteroData], totals: Array) -> tuple[dict[int, float], float]:
        """Variances of kinds that explain the squared errors of sums: maximum likelihood with a prior, by fixed point.

        The update is that of a Gaussian whose variance is a sum of non-negative parts.
        """
        shares = [dict(zip(*_shares(self._task, graph), strict=True)) for graph in graphs]
        kinds = sorted({key for each in shares for key in each})
        squares = np.array([[each.get(key, 0.0) ** 2 for key in kinds] for each in shares])
        errors = totals**2 + LEAST**2
        usual = float(errors.mean() / squares.sum(axis=1).mean())
        found = np.full(len(kinds), usual)
        for _ in range(ROUNDS):
            variance = squares @ found
            more = squares.T @ (errors / variance**2) + PRIOR * usual / found**2
            found *= np.sqrt(more / (squares.T @ (1 / variance) + PRIOR / found))
        return self._kinds(kinds, np.sqrt(found)), max(float(np.sqrt(usual)), LEAST)

    def _shared(self, graphs: Sequence[HeteroData], totals: Array) -> float:
        """The correlation between kinds that explains the squared errors of sums, 0 to 1."""
        apart, together = np.zeros(len(graphs)), np.zeros(len(graphs))
        for row, graph in enumerate(graphs):
            keys, shares = _shares(self._task, graph)
            parts = shares * [self._by_kind.get(key, self._usual) for key in keys]
            apart[row], together[row] = (parts**2).sum(), parts.sum() ** 2
        room = float((together - apart).mean())
        return float(np.clip((totals**2 - apart).mean() / room, 0.0, 1.0)) if room > 0 else 0.0


def pooled_quantile(scores: Array, weights: Array, groups: Sequence[str], coverage: float) -> float:
    """The score that a new group's exceed by a share of at most ``1 - coverage``; groups count alike.

    Args:
        scores: ``(n,)``.
        weights: Of the scores of a group among each other, same shape.
        groups: Of each score.
        coverage: 0 to 1.  Where there are too few groups for it, the largest score is stretched by the ratio.
    """
    names, at = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    share = weights / (np.bincount(at, weights, minlength=len(names))[at] + 1e-15) / len(names)
    level = coverage * (len(names) + 1) / len(names)
    order = np.argsort(scores)
    if level >= 1:
        return float(scores[order[-1]]) * level
    place = int(np.searchsorted(np.cumsum(share[order]), level))
    return float(scores[order[min(place, len(scores) - 1)]])


def _known(task: ContextTask, graph: HeteroData) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(graph[task.readout].seconds.numpy()))


def _spent(task: ContextTask, graph: HeteroData) -> Array:
    """Weights of the measured nodes of a graph."""
    return np.asarray(graph[task.readout].weight.double().numpy()[_known(task, graph)] + 1e-15)


def _shares(task: ContextTask, graph: HeteroData) -> tuple[list[int], Array]:
    """Kinds of a graph's nodes, and the share of each in the seconds that are given."""
    nodes = graph[task.readout]
    known = slice(None) if task.whole else _known(task, graph)
    keys, at = np.unique(nodes.key.numpy()[known], return_inverse=True)
    spent = np.bincount(at, nodes.baseline.double().numpy()[known], minlength=len(keys))
    return keys.tolist(), spent / max(float(spent.sum()), 1e-15)


def _units(task: ContextTask, places: Sequence[int]) -> list[str]:
    """Groups of graphs; graphs of teachers, which are one group, stand alone."""
    return [f"{task.groups[p]} {p}" if task.groups[p] in task.teachers else task.groups[p] for p in places]


def _weights(task: ContextTask, places: Sequence[int]) -> Array:
    """How much each graph counts."""
    weights = task.weights()[list(places)]
    return weights if weights.any() else np.ones(len(places))
