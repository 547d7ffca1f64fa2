"""Graphs in PyTorch Geometric's form: one ``HeteroData``, many in the stored form of a dataset, and as Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch_geometric.data import HeteroData

from stepsight.dataset.base.bounded import read_parquet
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import new_folder
from stepsight.dataset.graph.program import NODE_KINDS
from stepsight.dataset.trace_graphs.graph_schema import (
    EDGE_NUMBERS,
    NUMBERS,
    TARGETS,
    GraphPart,
    edge_types,
    signature_width,
)

_ABOUT = (
    "source", "run", "role", "model", "strategy", "scale", "hardware", "group", "digest", "rank", "scope", "segment",
    "step", "streams", "busy", "micro_batch", "stage", "wait_s", "span_s", "calls",
    "events", "timed_s",
)  # fmt: skip
_LAUNCH = ("launch_s", "launch_events")
_SINGLE = ("kind", "node", "share", "beside", "call", "recorded")
_STREAM = ("is_device",)


def write_tables(graphs: Sequence[HeteroData], folder: Path) -> None:
    """Write ``graphs.parquet``, ``nodes.<type>.parquet`` and ``edges.<source>.<relation>.<target>.parquet``.

    Every row of a node or an edge says which graph it is of (``graph``, a row of ``graphs.parquet``).
    """
    with new_folder(folder) as part:
        about = {name: [_plain(getattr(graph, name)) for graph in graphs] for name in _ABOUT}
        pq.write_table(pa.table(about), part / "graphs.parquet")
        for kind in (*NODE_KINDS, "stream"):
            pq.write_table(_nodes(graphs, kind), part / f"nodes.{kind}.parquet")
        for edge_type in edge_types():
            pq.write_table(_edges(graphs, edge_type), part / f"edges.{'.'.join(edge_type)}.parquet")


def _plain(value: Any) -> Any:
    """A number that a dataset stores as a tensor, or a text."""
    return value.item() if isinstance(value, torch.Tensor) else value


def _nodes(graphs: Sequence[HeteroData], kind: str) -> pa.Table:
    x = np.concatenate([graph[kind].x.numpy() for graph in graphs])
    columns = {"graph": _owners([len(graph[kind].x) for graph in graphs])}
    columns |= {name: x[:, place] for place, name in enumerate(_STREAM if kind == "stream" else NUMBERS)}
    if kind != "stream":
        y = np.concatenate([graph[kind].y.numpy() for graph in graphs])
        columns |= {name: y[:, place] for place, name in enumerate(TARGETS)}
        for name in _SINGLE:
            columns[name] = np.concatenate([graph[kind][name].numpy() for graph in graphs])
        for name, labels in _wide().items():
            values = np.concatenate([graph[kind][name].numpy() for graph in graphs])
            columns |= {label: values[:, place] for place, label in enumerate(labels)}
    return pa.table(columns)


def _wide() -> dict[str, tuple[str, ...]]:
    """Columns of the tensors of nodes that have several."""
    return {"signature": tuple(f"signature{place}" for place in range(signature_width())), "launch": _LAUNCH}


def _edges(graphs: Sequence[HeteroData], edge_type: tuple[str, str, str]) -> pa.Table:
    ends = np.concatenate([graph[edge_type].edge_index.numpy() for graph in graphs], axis=1)
    numbers = np.concatenate([graph[edge_type].edge_attr.numpy() for graph in graphs])
    columns = {"graph": _owners([graph[edge_type].edge_index.shape[1] for graph in graphs])}
    columns |= {"source": ends[0], "target": ends[1]}
    return pa.table(columns | {name: numbers[:, place] for place, name in enumerate(EDGE_NUMBERS)})


def _owners(counts: list[int]) -> Any:
    return np.repeat(np.arange(len(counts)), counts)


def read_tables(folder: Path) -> list[HeteroData]:
    """Read the files that ``write_tables`` wrote.

    Raises:
        TraceError: If it is not that.
    """
    folder = Path(folder)
    try:
        about = read_parquet(folder / "graphs.parquet").to_pylist()
        graphs = [HeteroData() for _ in about]
        for kind in (*NODE_KINDS, "stream"):
            _read_nodes(read_parquet(folder / f"nodes.{kind}.parquet"), kind, graphs)
        for edge_type in edge_types():
            _read_edges(read_parquet(folder / f"edges.{'.'.join(edge_type)}.parquet"), edge_type, graphs)
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise TraceError(f"{folder} must hold the tables of a graph dataset: {error}") from None
    for graph, values in zip(graphs, about, strict=True):
        for name in _ABOUT:
            setattr(graph, name, values[name])
    return graphs


def _read_nodes(table: Any, kind: str, graphs: list[HeteroData]) -> None:
    bounds = _bounds(table, len(graphs))
    x = _stacked(table, _STREAM if kind == "stream" else NUMBERS)
    y = _stacked(table, TARGETS) if kind != "stream" else x
    whole = {}
    if kind != "stream":
        whole = {name: table.column(name).to_numpy() for name in _SINGLE}
        for name, labels in _wide().items():
            whole[name] = np.stack([table.column(label).to_numpy() for label in labels], axis=1)
    for graph, begin, end in zip(graphs, bounds, bounds[1:], strict=False):
        graph[kind].x = torch.from_numpy(x[begin:end].copy())
        if kind != "stream":
            graph[kind].y = torch.from_numpy(y[begin:end].copy())
        for name, values in whole.items():
            graph[kind][name] = torch.from_numpy(values[begin:end].copy())


def _read_edges(table: Any, edge_type: tuple[str, str, str], graphs: list[HeteroData]) -> None:
    bounds = _bounds(table, len(graphs))
    ends = np.stack([table.column(name).to_numpy() for name in ("source", "target")])
    numbers = _stacked(table, EDGE_NUMBERS)
    for graph, begin, end in zip(graphs, bounds, bounds[1:], strict=False):
        graph[edge_type].edge_index = torch.from_numpy(ends[:, begin:end].copy())
        graph[edge_type].edge_attr = torch.from_numpy(numbers[begin:end].copy())


def _bounds(table: Any, count: int) -> list[int]:
    """Where the rows of each graph begin; the end of the last one at the end."""
    found: list[int] = np.searchsorted(table.column("graph").to_numpy(), np.arange(count + 1)).tolist()
    return found


def _stacked(table: Any, names: Sequence[str]) -> Any:
    return np.stack([table.column(name).to_numpy() for name in names], axis=1).astype(np.float32)


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
