"""Models of compiled regions: physics of what their code does, and what corrects it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.harness.regions.nest_work import TERMS
from stepsight.experiments.studies.context.context_task import ContextTask
from stepsight.experiments.studies.context.edgeless_models import Answers, Fit, Fitted
from stepsight.features.nest_features import (
    EDGE_NUMBERS,
    LEVEL_SECONDS,
    LEVELLED,
    LEVELS,
    PARTS,
    TERM_SECONDS,
    edge_levels,
)
from stepsight.training.regression.fitted_physics import Bounds, fit_physics

Array = NDArray[np.float64]
NEST, REUSE = "nest", "reuse"
CALL_S, REGION_S = 1e-6, 1e-6  # of a call of a compiled function and of a region, before a machine said what they are
NOISE, PRIOR_STD = 0.15, 1.0  # log units
SHRUNK = (0.0, 0.25, 0.5, 0.75, 1.0)  # parts of a correction that may be believed
_KEPT = [place for place, name in enumerate(TERMS) if name not in LEVELLED]
_PART_OF = {term: place for place, terms in enumerate(PARTS.values()) for term in terms}
Based = Callable[[HeteroData], HeteroData]


def physics(*, reuse: bool) -> Fit:
    """Constants of a machine, fitted to whole regions; ``reuse``: bytes count by reuse distance."""
    return over_physics(_as_based, reuse=reuse)


def over_physics(model: Fit, *, reuse: bool, told: bool = False, on_edges: bool = False) -> Fit:
    """A model whose baseline is the physics that the same regions taught.

    Args:
        model: What corrects.
        reuse: Whether bytes count by reuse distance.
        told: Whether nodes have the bytes by reuse distance as features.
        on_edges: Whether edges carry the seconds of reading and writing, in place of nodes.
    """

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        constants = _constants(graphs, reuse=reuse)

        def based(graph: HeteroData) -> HeteroData:
            return _based(graph, constants, reuse=reuse, told=told, on_edges=on_edges)

        fitted = model(task, [based(graph) for graph in graphs], seed)
        return lambda asked: fitted([based(graph) for graph in asked])

    return fit


def shrunk(model: Fit, families: Sequence[str]) -> Fit:
    """A model's correction, shrunk by what explains families that it did not see.

    Args:
        model: What corrects.
        families: By the graphs' ``number``.
    """

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        names = sorted({families[int(graph.number)] for graph in graphs} - set(task.always))
        half = set(np.random.default_rng(seed).permutation(names)[::2].tolist())
        asked = [graph for graph in graphs if families[int(graph.number)] in half]
        part = model(task, [graph for graph in graphs if families[int(graph.number)] not in half], seed)
        base = _sums(asked)
        off, said = np.log([float(graph.total) for graph in asked]) - np.log(base), np.log(part(asked)[1] / base)
        errors = [float(np.abs(off - share * said).mean()) for share in SHRUNK]
        share = SHRUNK[int(np.argmin(errors))]
        fitted = model(task, graphs, seed)

        def answer(asked: Sequence[HeteroData]) -> Answers:
            base = _sums(asked)
            return [np.zeros(0)] * len(asked), base * (fitted(asked)[1] / base) ** share

        return answer

    return fit


def averaged(model: Fit, count: int) -> Fit:
    """Geometric mean of trainings from several starts."""

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        fitted = [model(task, graphs, 100 * seed + number) for number in range(count)]

        def answer(asked: Sequence[HeteroData]) -> Answers:
            totals = np.exp(np.mean([np.log(each(asked)[1]) for each in fitted], axis=0))
            return [np.zeros(0)] * len(asked), totals

        return answer

    return fit


def _as_based(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
    def answer(asked: Sequence[HeteroData]) -> Answers:
        nodes = [graph[NEST].baseline.double().numpy() for graph in asked]
        return nodes, np.array([each.sum() for each in nodes])

    return answer


def _sums(graphs: Sequence[HeteroData]) -> Array:
    return np.array([float(graph[NEST].baseline.double().sum()) for graph in graphs])


def _amounts(graph: HeteroData, *, reuse: bool) -> Array:
    terms = graph[NEST].terms.numpy()
    return np.concatenate([terms[:, _KEPT], graph[NEST].levels.numpy()], axis=1) if reuse else terms


def _constants(graphs: Sequence[HeteroData], *, reuse: bool) -> Array:
    rows = np.array([[*_amounts(graph, reuse=reuse).sum(0), float(graph.calls), 1.0] for graph in graphs])
    first = np.concatenate([TERM_SECONDS[_KEPT], LEVEL_SECONDS]) if reuse else TERM_SECONDS
    prior = np.array([*first, CALL_S, REGION_S])
    seconds = np.array([float(graph.total) for graph in graphs])
    bounds = Bounds(prior, prior / 100, prior * 30)
    fitted = fit_physics(rows, np.ones(len(rows)), seconds, bounds, noise=NOISE, prior_std=PRIOR_STD)
    return np.exp(fitted.log_constants)


def _based(graph: HeteroData, constants: Array, *, reuse: bool, told: bool, on_edges: bool) -> HeteroData:
    found = graph.clone()
    seconds = _amounts(graph, reuse=reuse) * constants[:-2]
    names = [*(TERMS[place] for place in _KEPT), *LEVELS] if reuse else list(TERMS)
    parts = np.zeros((len(seconds), len(PARTS)))
    for column, name in enumerate(names):
        place = _PART_OF[name] if name in _PART_OF else LEVELS.index(name) // 3
        parts[:, place] += seconds[:, column]
    parts[:, -1] += (constants[-2] * float(graph.calls) + constants[-1]) / len(parts)
    found[NEST].baseline = torch.from_numpy(parts.sum(axis=1)).float()
    if on_edges:
        about = graph[NEST, REUSE, NEST].edge_attr.double().numpy()
        place = edge_levels(about) + 3 * (about[:, EDGE_NUMBERS.index("writes")] > 0)
        each = constants[len(_KEPT) :][place] if reuse else np.full(len(about), LEVEL_SECONDS[0])
        found[NEST, REUSE, NEST].seconds = torch.from_numpy(np.expm1(about[:, 0]) * each).float()
        parts[:, :2] = 0.0
    found[NEST].parts = torch.from_numpy(parts).float()
    if told:
        found[NEST].x = torch.cat([graph[NEST].x, graph[NEST].levels.log1p().float()], dim=1)
    return found
