"""Models that correct the product's own regressors of calls: they learn from answers that did not see the family."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.context_task import ContextTask
from stepsight.experiments.studies.context.edgeless_models import Answers, Fit, Fitted
from stepsight.training.kernels.host_calls import HostCalls
from stepsight.training.measured.host_costs import learn_host_calls
from stepsight.training.measured.host_steps import HostStep

PARTS = 3  # into which families that teach are split, to learn from answers on unseen ones
LEAST_S = 1e-7
MOST_KEPT = 8  # fitted regressors in memory


class ProductRegressors:
    """What ``stepsight train`` learns of the calls of a host, from any part of the task's steps.

    Args:
        steps, groups: Of all graphs, by their ``number``.
    """

    def __init__(self, steps: Sequence[HostStep], groups: Sequence[str]) -> None:
        self._steps, self._groups = steps, groups
        self._known: dict[tuple[int, ...], HostCalls] = {}

    def alone(self, task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        """The regressors as a model of the benchmark."""
        costs = self._fitted(graphs)

        def answer(asked: Sequence[HeteroData]) -> Answers:
            nodes = [self._seconds(costs, graph) for graph in asked]
            return nodes, np.array([each.sum() for each in nodes])

        return answer

    def corrected(self, model: Fit) -> Fit:
        """A model whose baseline is what the regressors say of families that did not teach them."""

        def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
            names = sorted({self._groups[int(graph.number)] for graph in graphs})
            order = np.random.default_rng(seed).permutation(names).tolist()
            part = {name: place % PARTS for place, name in enumerate(order)}
            turn = [part[self._groups[int(graph.number)]] for graph in graphs]
            taught = []
            for each in range(PARTS):
                costs = self._fitted([graph for graph, own in zip(graphs, turn, strict=True) if own != each])
                taught += [self._based(graph, costs) for graph, own in zip(graphs, turn, strict=True) if own == each]
            fitted, costs = model(task, taught, seed), self._fitted(graphs)
            return lambda asked: fitted([self._based(graph, costs) for graph in asked])

        return fit

    def _fitted(self, graphs: Sequence[HeteroData]) -> HostCalls:
        key = tuple(sorted(int(graph.number) for graph in graphs))
        if key not in self._known:
            if len(self._known) >= MOST_KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = learn_host_calls([self._steps[number] for number in key])
        return self._known[key]

    def _based(self, graph: HeteroData, costs: HostCalls) -> HeteroData:
        """The graph with the regressors' seconds as its baseline."""
        found, step = graph.clone(), self._steps[int(graph.number)]
        seconds = torch.from_numpy(self._seconds(costs, graph)).float()
        known = [float(costs.is_known(call, op)) for call, op in zip(step.calls, step.ops, strict=True)]
        found["op"].baseline = seconds
        found["op"].x = torch.cat([graph["op"].x, seconds.log()[:, None], torch.tensor(known)[:, None]], dim=1)
        return found

    def _seconds(self, costs: HostCalls, graph: HeteroData) -> NDArray[np.float64]:
        step = self._steps[int(graph.number)]
        return np.maximum(costs.seconds(step.calls, step.ops, step.phase.tolist()) / costs.scale, LEAST_S)
