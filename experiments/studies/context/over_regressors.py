"""Models that correct the product's own regressors of calls: they learn from answers that did not see the family."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.context_task import ContextTask
from stepsight.experiments.studies.context.edgeless_models import Answers, Fit, Fitted
from stepsight.training.kernels.host_calls import HostCalls
from stepsight.training.measured.host_costs import learn_host_calls
from stepsight.training.measured.host_steps import HostStep

PARTS = 4  # into which families that teach are split, to learn from answers on unseen ones
LEAST_S = 1e-7


def regressors(steps: Sequence[HostStep]) -> Fit:
    """What ``stepsight train`` learns of calls; ``steps`` by the graphs' ``number``."""

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        costs = learn_host_calls([steps[int(graph.number)] for graph in graphs], seed=seed)

        def answer(asked: Sequence[HeteroData]) -> Answers:
            nodes = [_seconds(costs, steps[int(graph.number)]) for graph in asked]
            return nodes, np.array([each.sum() for each in nodes])

        return answer

    return fit


def over_regressors(steps: Sequence[HostStep], groups: Sequence[str], model: Fit) -> Fit:
    """A model whose baseline is what the regressors say of families that did not teach them.

    Args:
        steps, groups: By the graphs' ``number``.
        model: What corrects.
    """

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        names = sorted({groups[int(graph.number)] for graph in graphs})
        part = {
            name: place % PARTS for place, name in enumerate(np.random.default_rng(seed).permutation(names).tolist())
        }
        taught = []
        for each in range(PARTS):
            others = [g for g in graphs if part[groups[int(g.number)]] != each]
            costs = learn_host_calls([steps[int(graph.number)] for graph in others], seed=seed)
            taught += [_based(g, costs, steps) for g in graphs if part[groups[int(g.number)]] == each]
        fitted = model(task, taught, seed)
        costs = learn_host_calls([steps[int(graph.number)] for graph in graphs], seed=seed)
        return lambda asked: fitted([_based(graph, costs, steps) for graph in asked])

    return fit


def _based(graph: HeteroData, costs: HostCalls, steps: Sequence[HostStep]) -> HeteroData:
    """The graph with the regressors' seconds as its baseline."""
    found = graph.clone()
    step = steps[int(graph.number)]
    seconds = torch.from_numpy(_seconds(costs, step)).float()
    known = torch.tensor([costs.is_known(call, op) for call, op in zip(step.calls, step.ops, strict=True)]).float()
    found["op"].baseline = seconds
    found["op"].x = torch.cat([graph["op"].x, seconds.log()[:, None], known[:, None]], dim=1)
    return found


def _seconds(costs: HostCalls, step: HostStep) -> np.ndarray:
    return np.maximum(costs.seconds(step.calls, step.ops, step.phase.tolist()) / costs.scale, LEAST_S)
