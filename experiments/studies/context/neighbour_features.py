"""Hand-made features of neighbours, for models that hear no messages."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData
from torch_geometric.utils import scatter

Array = NDArray[np.float64]


def own_features(graph: HeteroData, node: str) -> Array:
    """Features of each node and the logarithm of its baseline, where it has one, ``(n, f + 1)``."""
    x = graph[node].x.double().numpy()
    if "baseline" not in graph[node]:
        return np.asarray(x)
    return np.concatenate([x, np.log(graph[node].baseline.double().numpy())[:, None]], axis=1)


def neighbour_features(graph: HeteroData, node: str) -> Array:
    """``own_features``, and by edge type and direction: the number of edges, and means and maxima of what they tell.

    That is features of the edges, and features and baseline of the nodes at the other end.  Graphs that bring hand-made
    features (``around``) have these instead.
    """
    if "around" in graph[node]:
        return np.concatenate([own_features(graph, node), graph[node].around.double().numpy()], axis=1)
    parts = [torch.from_numpy(own_features(graph, node))]
    for kind in graph.edge_types:
        for near, far in ((1, 0), (0, 1)):
            if kind[2 * near] == node:
                index = graph[kind].edge_index
                other = torch.from_numpy(own_features(graph, kind[2 * far]))[index[far]]
                told = torch.cat([graph[kind].edge_attr.double(), other], dim=1)
                ends, count = index[near], graph[node].num_nodes
                degree = torch.bincount(ends, minlength=count)[:, None].double()
                parts += [degree, *(scatter(told, ends, 0, count, reduce=how) for how in ("mean", "max"))]
    return torch.cat(parts, dim=1).numpy()


def bag_of(features: Array, baseline: Array) -> Array:
    """One row for a graph: means weighted by baseline, maxima, the number of nodes and their time."""
    share = baseline / baseline.sum()
    ends = [np.log1p(len(baseline)), np.log(baseline.sum()), np.log(baseline.max())]
    return np.concatenate([share @ features, features.max(axis=0), features.sum(axis=0) / 100.0, ends])
