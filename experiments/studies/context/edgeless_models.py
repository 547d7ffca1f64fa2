"""Models that hear no messages: roofline, regressors, a table, and trees on own or neighbours' features."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.context_task import ContextTask
from stepsight.experiments.studies.context.neighbour_features import bag_of, neighbour_features, own_features
from stepsight.training.regression.trees import fit_trees

Array = NDArray[np.float64]
Answers = tuple[list[Array], Array]  # seconds of the nodes of each graph, and of each graph
Fitted = Callable[[Sequence[HeteroData]], Answers]
Fit = Callable[[ContextTask, Sequence[HeteroData], int], Fitted]
Features = Callable[[HeteroData, str], Array]
PRIOR = 5.0  # nodes of the overall median that a kind's own is mixed with
MOST_LOG = 6.0


def given(name: str) -> Fit:
    """What the graphs hold already: ``roofline`` or ``baseline``."""

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        return lambda asked: _summed([graph[task.readout][name].double().numpy() for graph in asked])

    return fit


def _summed(nodes: list[Array]) -> Answers:
    return nodes, np.array([each.sum() for each in nodes])


def table(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
    """A factor for each kind and phase: a median weighted by time, or what explains whole graphs best."""
    factors, rest = _factors_of_graphs(task, graphs) if task.whole else (_medians(task, graphs), 0.0)

    def answer(asked: Sequence[HeteroData]) -> Answers:
        usual = factors[-1]
        nodes, totals = _summed(
            [
                g[task.readout].baseline.double().numpy()
                * np.exp([factors.get(key, usual) for key in g[task.readout].key.tolist()])
                for g in asked
            ]
        )
        return nodes, totals + rest

    return answer


def _medians(task: ContextTask, graphs: Sequence[HeteroData]) -> dict[int, float]:
    key, off, weight = (np.concatenate(each) for each in zip(*(_known(task, g) for g in graphs), strict=True))
    usual = _median(off, weight)
    found = {-1: usual}
    for each in np.unique(key).tolist():
        own = key == each
        count = own.sum()
        found[each] = (count * _median(off[own], weight[own]) + PRIOR * usual) / (count + PRIOR)
    return found


def _median(values: Array, weights: Array) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def _known(task: ContextTask, graph: HeteroData) -> tuple[Array, Array, Array]:
    """Key, log of seconds over baseline, and weight of measured nodes."""
    nodes = graph[task.readout]
    seconds = nodes.seconds.double().numpy()
    known = np.isfinite(seconds)
    off = np.log(seconds[known] / nodes.baseline.double().numpy()[known])
    return nodes.key.numpy()[known], off, nodes.weight.double().numpy()[known] + 1e-12


def _factors_of_graphs(task: ContextTask, graphs: Sequence[HeteroData]) -> tuple[dict[int, float], float]:
    """Factors, and seconds of each graph's own, by gradient steps on log errors of the totals."""
    keys = sorted({int(key) for graph in graphs for key in graph[task.readout].key.tolist()})
    place = {key: number for number, key in enumerate(keys)}
    spent = np.zeros((len(graphs), len(keys)))
    for row, graph in zip(spent, graphs, strict=True):
        nodes = graph[task.readout]
        np.add.at(row, [place[key] for key in nodes.key.tolist()], nodes.baseline.double().numpy())
    measured = np.array([float(graph.total) for graph in graphs])
    theta = np.full(len(keys), np.log(np.median(measured / spent.sum(1))))
    rest = -np.inf if task.rest is False else np.log(measured.min() / 2)
    first = theta.copy()
    for step in range(400):
        parts = spent * np.exp(theta)
        total = parts.sum(1) + np.exp(rest)
        slope = np.tanh(np.log(total / measured) / 0.3) / total / len(graphs)
        rate = 2.0 * (1 - step / 400)
        theta -= rate * (slope @ parts + 2e-3 * (theta - first))
        rest -= rate * float(slope.sum() * np.exp(rest))  # -inf stays
    found = {key: float(theta[place[key]]) for key in keys}
    return {**found, -1: float(theta.mean())}, float(np.exp(rest))


def trees(features: Features) -> Fit:
    """LightGBM: on nodes, or on one row for a graph where whole graphs are judged."""

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        rows = [_rows(task, graph, features) for graph in graphs]
        if task.whole:
            target = np.log([float(g.total) / b for g, (_, b) in zip(graphs, rows, strict=True)])
            table, weight = np.stack([row for row, _ in rows]), None
        else:
            known = [_known(task, graph) for graph in graphs]
            target, weight = (np.concatenate(each) for each in list(zip(*known, strict=True))[1:])
            mask = [np.isfinite(graph[task.readout].seconds.numpy()) for graph in graphs]
            table = np.concatenate([row[m] for (row, _), m in zip(rows, mask, strict=True)])
            weight = weight / weight.mean()
        middle = float(np.median(target))
        names = tuple(f"f{number}" for number in range(table.shape[1]))
        grown = fit_trees(table, np.clip(target - middle, -MOST_LOG, MOST_LOG), names, seed, weight)

        def answer(asked: Sequence[HeteroData]) -> Answers:
            rows = [_rows(task, graph, features) for graph in asked]
            if task.whole:
                log = grown.predict(np.stack([row for row, _ in rows]), names) + middle
                totals = np.array([b for _, b in rows]) * np.exp(log)
                return [np.zeros(0)] * len(asked), totals
            return _summed(
                [
                    g[task.readout].baseline.double().numpy() * np.exp(grown.predict(row, names) + middle)
                    for g, (row, _) in zip(asked, rows, strict=True)
                ]
            )

        return answer

    return fit


def _rows(task: ContextTask, graph: HeteroData, features: Features) -> tuple[Array, float]:
    """Rows for trees, and the seconds that they correct where whole graphs are judged."""
    if not task.whole:
        return features(graph, task.readout), 0.0
    own = features is own_features
    node = task.simple if own else task.readout
    baseline = graph[node].baseline.double().numpy()
    return bag_of(features(graph, node), baseline), float(baseline.sum())


MODELS: dict[str, Fit] = {
    "roofline": given("roofline"),
    "regressors": given("baseline"),
    "table by kind and phase": table,
    "trees, own features": trees(own_features),
    "trees, neighbours' features": trees(neighbour_features),
}
