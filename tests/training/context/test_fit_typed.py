"""Fitting a network on typed graphs."""

from __future__ import annotations

import numpy as np
import torch
from torch_geometric.data import HeteroData

from stepsight.training.context.fit_typed import TypedFit, fit_typed


def _graph(seed: int) -> HeteroData:
    """Ten ops; each takes twice as long where the one before it is marked, which only edges tell."""
    draw = torch.Generator().manual_seed(seed)
    marked = (torch.rand(10, generator=draw) > 0.5).float()
    graph = HeteroData()
    graph["op"].x = torch.stack([marked, torch.rand(10, generator=draw)], dim=1)
    graph["op"].baseline = torch.ones(10)
    after = torch.cat([torch.zeros(1), marked[:-1]])
    graph["op"].seconds = 1.0 + after
    graph["op"].weight = torch.ones(10)
    graph.total = graph["op"].seconds.sum()[None]
    graph["op", "order", "op"].edge_index = torch.stack([torch.arange(9), torch.arange(1, 10)])
    graph["op", "order", "op"].edge_attr = torch.zeros(9, 1)
    return graph


def _error(fit: TypedFit) -> float:
    fitted = fit_typed([_graph(seed) for seed in range(40)], fit)
    judged = [_graph(seed) for seed in range(100, 110)]
    nodes, _ = fitted.seconds(judged)
    off = [np.log(s / g["op"].seconds.numpy()) for s, g in zip(nodes, judged, strict=True)]
    return float(np.abs(np.concatenate(off)).mean())


def test_what_neighbours_do_is_learned_by_edges_alone() -> None:
    """With edges the effect is learned; without them it cannot be."""
    assert _error(TypedFit(epochs=60, layers=1, channels=16)) < 0.1
    assert _error(TypedFit(epochs=60, layers=1, channels=16, relations=())) > 0.25


def test_totals_alone_teach() -> None:
    """Seconds of whole graphs are enough to learn seconds of whole graphs."""
    fitted = fit_typed(
        [_graph(seed) for seed in range(40)],
        TypedFit(epochs=40, layers=1, channels=16, node_weight=0.0, total_weight=1.0),
    )
    judged = [_graph(seed) for seed in range(100, 110)]
    _, totals = fitted.seconds(judged)
    assert np.abs(np.log(totals / [float(graph.total) for graph in judged])).mean() < 0.08


def test_the_seed_decides() -> None:
    """The same seed gives the same answers."""
    graphs = [_graph(seed) for seed in range(8)]
    fit = TypedFit(epochs=3)
    first, again = (fit_typed(graphs, fit, seed=3).seconds(graphs)[1] for _ in range(2))
    assert np.array_equal(first, again)
