"""A table of what a class of ops loses beside each class of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.edgeless_models import Answers, Fitted

if TYPE_CHECKING:
    from stepsight.experiments.studies.context.context_task import ContextTask

Array = NDArray[np.float64]
PRIOR = 0.05  # share of a class' weight by which its row is drawn to the row of all classes
ROUNDS, LEAST = 20, 1e-3


def neighbour_table(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
    """Seconds alone times 1 plus shares of time beside each class of neighbours (``mix``), by class of op."""
    key, mix, lost, weight = (np.concatenate(each) for each in zip(*map(_known, graphs), strict=True))
    everywhere = nonnegative_medians(mix, lost, weight)
    rows = {}
    for each in np.unique(key).tolist():
        own = key == each
        rows[each] = nonnegative_medians(mix[own], lost[own], weight[own], everywhere, PRIOR * weight[own].sum())

    def answer(asked: Sequence[HeteroData]) -> Answers:
        found = []
        for graph in asked:
            table = np.stack([rows.get(each, everywhere) for each in graph["op"].key.tolist()])
            slowdown = 1.0 + (table * graph["op"].mix.double().numpy()).sum(axis=1)
            found.append(graph["op"].baseline.double().numpy() * slowdown)
        return found, np.array([each.sum() for each in found])

    return answer


def nonnegative_medians(
    rows: Array, values: Array, weights: Array, prior: Array | None = None, strength: float = 0.0
) -> Array:
    """Constants of at least 0, ``(k,)``, with the least weighted absolute error of ``rows @ constants``.

    Least squares, weighted again and again with the inverse of the error.

    Args:
        rows: ``(n, k)``.
        values: ``(n,)``.
        weights: ``(n,)``.
        prior: ``(k,)``: values that constants are drawn to.
        strength: Weight of the prior.
    """
    size = rows.shape[1]
    aim = np.zeros(size) if prior is None else prior
    pull = np.sqrt(max(strength, 1e-6 * weights.sum())) * np.eye(size)
    found = aim
    for _ in range(ROUNDS):
        scale = np.sqrt(weights / np.maximum(np.abs(rows @ found - values), LEAST))
        found = nnls(np.concatenate([rows * scale[:, None], pull]), np.concatenate([values * scale, pull @ aim]))[0]
    return np.asarray(found)


def _known(graph: HeteroData) -> tuple[Array, Array, Array, Array]:
    nodes = graph["op"]
    seconds, alone = nodes.seconds.double().numpy(), nodes.baseline.double().numpy()
    known = np.isfinite(seconds)
    lost = seconds[known] / alone[known] - 1.0
    return nodes.key.numpy()[known], nodes.mix.double().numpy()[known], lost, nodes.weight.double().numpy()[known]
