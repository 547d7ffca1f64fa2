"""Parts in PyTorch Geometric's form: one ``HeteroData``, or many in the stored form of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch_geometric.data import HeteroData

from stepsight.dataset.graph.rank_graph import NODE_KINDS
from stepsight.dataset.trace_graphs.graph_schema import GraphPart, edge_types

About = dict[str, Any]
_COLUMNS = ("x", "y", "kind", "node", "signature", "share", "launch", "beside", "call", "recorded")
_NUMBERS = ("step", "busy", "micro_batch", "stage", "wait_s", "span_s", "events")


def to_hetero_data(part: GraphPart, about: About) -> HeteroData:
    """A step or a segment as ``HeteroData``; ``about`` becomes attributes of the graph."""
    data = HeteroData()
    for key, arrays in _arrays(part).items():
        store = data[key]
        for name, array in arrays.items():
            store[name] = torch.from_numpy(array)
    for name, value in _attributes(part, about).items():
        setattr(data, name, value)
    return data


def collated(parts: Sequence[tuple[About, GraphPart]]) -> tuple[HeteroData, dict[Any, Any] | None]:
    """Collate all parts like ``InMemoryDataset.collate``, but much faster.

    Returns:
        One ``HeteroData`` that holds all nodes and edges, and where each graph's begin; a single graph as it is, and
        None.
    """
    if len(parts) == 1:
        return to_hetero_data(parts[0][1], parts[0][0]), None
    arrays = [_arrays(part) for _, part in parts]
    data = HeteroData()
    slices: dict[Any, Any] = {}
    for key, names in arrays[0].items():
        store, slices[key] = data[key], {}
        for name in names:
            values = [each[key][name] for each in arrays]
            along = 1 if name == "edge_index" else 0
            lengths = [value.shape[along] for value in values]
            store[name] = torch.from_numpy(np.concatenate(values, axis=along))
            slices[key][name] = torch.from_numpy(np.cumsum([0, *lengths]))
    attributes = [_attributes(part, about) for about, part in parts]
    for name, first in attributes[0].items():
        values = [each[name] for each in attributes]
        setattr(data, name, torch.tensor(values) if isinstance(first, int | float) else values)
        slices[name] = torch.arange(len(parts) + 1)
    return data, slices


def _arrays(part: GraphPart) -> dict[Any, dict[str, Any]]:
    """Arrays of each type of node and edge by name."""
    found: dict[Any, dict[str, Any]] = {
        kind: {name: getattr(part, name)[kind] for name in _COLUMNS} for kind in NODE_KINDS
    }
    found["stream"] = {"x": part.x["stream"]}
    for edge_type in edge_types():
        ends, numbers = part.edges[edge_type]
        found[edge_type] = {"edge_index": ends, "edge_attr": numbers}
    return found


def _attributes(part: GraphPart, about: About) -> About:
    numbers = {name: getattr(part, name) for name in _NUMBERS}
    names = {"streams": list(part.streams), "calls": list(part.calls)}
    return {**about, "scope": part.scope, "segment": part.label, **names, **numbers}
