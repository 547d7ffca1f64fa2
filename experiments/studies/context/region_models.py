"""Models of compiled regions: physics of what their code does, and what corrects it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.harness.regions.nest_work import TERMS
from stepsight.experiments.studies.context.context_task import ContextTask
from stepsight.experiments.studies.context.edgeless_models import Answers, Fit, Fitted
from stepsight.features.nest_features import (
    LEVEL_SECONDS,
    LEVELLED,
    LEVELS,
    PARTS,
    TERM_SECONDS,
)
from stepsight.training.regression.fitted_physics import Bounds, fit_physics

Array = NDArray[np.float64]
NEST, REUSE, STATEMENT = "nest", "reuse", "statement"
LAUNCHING = ("calls", "inputs", "written", "regions")  # of a region's launch, besides its nests
LAUNCH_SECONDS = np.array([5e-7, 3e-7, 4e-7, 5e-7])  # of one, before a machine said what they are
NOISE = 0.15  # log units
PRIOR_STDS = (0.2, 0.4, 0.7)  # log units that constants may be off their prior; held-back families choose
SHRUNK = (0.0, 0.25, 0.5, 0.75, 1.0)  # parts of a correction that may be believed
_KEPT = [place for place, name in enumerate(TERMS) if name not in LEVELLED]
_PART_OF = {term: place for place, terms in enumerate(PARTS.values()) for term in terms}


def physics(*, reuse: bool) -> Fit:
    """Constants of a machine, fitted to whole regions; ``reuse``: bytes count by reuse distance."""
    return over_physics(_as_based, reuse=reuse)


def over_physics(model: Fit, *, reuse: bool = True, told: bool = False, nests: bool = False) -> Fit:
    """A model whose baseline is the physics that the same regions taught.

    Args:
        model: What corrects.
        reuse: Whether bytes count by reuse distance.
        told: Whether nests have the bytes by reuse distance as features.
        nests: Whether statements have the features of their nest, too.
    """

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        constants = _chosen_constants(task, graphs, seed, reuse=reuse)

        def based(graph: HeteroData) -> HeteroData:
            return _based(graph, constants, reuse=reuse, told=told, nests=nests)

        fitted = model(task, [based(graph) for graph in graphs], seed)
        return lambda asked: fitted([based(graph) for graph in asked])

    return fit


def shrunk(model: Fit) -> Fit:
    """A model's correction, shrunk by what explains families that it did not see."""

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        teaching, asked = task.halves(graphs, seed)
        part = model(task, teaching, seed)
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


def _as_based(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
    def answer(asked: Sequence[HeteroData]) -> Answers:
        nodes = [graph[NEST].baseline.double().numpy() for graph in asked]
        return nodes, np.array([each.sum() for each in nodes])

    return answer


def _sums(graphs: Sequence[HeteroData]) -> Array:
    return np.array([float(graph[NEST].baseline.double().sum()) for graph in graphs])


def _amounts(nodes: Any, *, reuse: bool) -> Array:
    terms: Array = nodes.terms.double().numpy()
    if not reuse:
        return terms
    return np.concatenate([terms[:, _KEPT], nodes.levels.double().numpy()], axis=1)


def _chosen_constants(task: ContextTask, graphs: Sequence[HeteroData], seed: int, *, reuse: bool) -> Array:
    """Constants whose prior is as strong as families that are held back of the teaching part want it."""
    rows = np.array([[*_amounts(g[NEST], reuse=reuse).sum(0), *g.launching[0].tolist()] for g in graphs])
    seconds = np.array([float(graph.total) for graph in graphs])
    back = {int(graph.number) for graph in task.halves(graphs, seed)[1]}
    held = np.array([int(graph.number) in back for graph in graphs])

    def error(std: float) -> float:
        constants = _constants(rows[~held], seconds[~held], std, reuse=reuse)
        return float(np.abs(np.log(rows[held] @ constants / seconds[held])).mean())

    return _constants(rows, seconds, min(PRIOR_STDS, key=error), reuse=reuse)


def _constants(rows: Array, seconds: Array, std: float, *, reuse: bool) -> Array:
    first = np.concatenate([TERM_SECONDS[_KEPT], LEVEL_SECONDS]) if reuse else TERM_SECONDS
    prior = np.concatenate([first, LAUNCH_SECONDS])
    bounds = Bounds(prior, prior / 100, prior * 30)
    fitted = fit_physics(rows, np.ones(len(rows)), seconds, bounds, noise=NOISE, prior_std=std)
    return np.exp(fitted.log_constants)


def _based(graph: HeteroData, constants: Array, *, reuse: bool, told: bool, nests: bool) -> HeteroData:
    found = graph.clone()
    each, launch = constants[: -len(LAUNCHING)], constants[-len(LAUNCHING) :]
    overhead = float(graph.launching[0].double().numpy() @ launch)
    for kind in (NEST, STATEMENT):
        seconds = _amounts(graph[kind], reuse=reuse) * each
        parts = _nest_parts(seconds, reuse=reuse) if kind == NEST else _statement_parts(seconds, reuse=reuse)
        parts[:, -1] += overhead / len(parts)
        found[kind].parts = torch.from_numpy(parts).float()
        found[kind].baseline = found[kind].parts.sum(dim=1)
        del found[kind].terms, found[kind].levels
    of = graph[STATEMENT, "in", NEST].edge_index[1]
    own = found[STATEMENT].baseline
    shares = found[STATEMENT].parts / own[:, None]
    about = [graph[STATEMENT].x, own.log()[:, None], shares, *([graph[NEST].x[of]] if nests else [])]
    found[STATEMENT].x = torch.cat(about, dim=1)
    found[STATEMENT, "in", NEST].edge_attr = torch.stack([own.log(), own / found[NEST].baseline[of]], dim=1)
    if told:
        found[NEST].x = torch.cat([graph[NEST].x, graph[NEST].levels.log1p().float()], dim=1)
    return found


def _nest_parts(seconds: Array, *, reuse: bool) -> Array:
    """Seconds of nests by ``PARTS``."""
    names = [*(TERMS[place] for place in _KEPT), *LEVELS] if reuse else list(TERMS)
    parts = np.zeros((len(seconds), len(PARTS)))
    for column, name in enumerate(names):
        place = _PART_OF[name] if name in _PART_OF else LEVELS.index(name) // 3
        parts[:, place] += seconds[:, column]
    return parts


def _statement_parts(seconds: Array, *, reuse: bool) -> Array:
    """Seconds of statements: computing, near, middle, and far bytes, strides, and what starts a nest."""
    count = seconds.shape[1] - len(LEVELS) if reuse else len(TERMS)
    start = (_KEPT if reuse else list(range(count))).index(TERMS.index("nests"))
    own = seconds[:, :count].sum(axis=1) - seconds[:, start]
    levels = seconds[:, count:].reshape(len(seconds), 3, 3) if reuse else np.zeros((len(seconds), 3, 3))
    moved = levels[:, :2].sum(axis=1)
    return np.column_stack([own, moved, levels[:, 2].sum(axis=1), seconds[:, start]])
