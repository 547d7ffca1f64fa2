"""From the learning graphs to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from stepsight.features.graph_features import RELATIONS, Topology, join, make_topology


@dataclass(frozen=True)
class GraphTensors:
    """One or several programs; edges in both directions where the direction matters.

    Attributes:
        edges: ``(2, e)`` each, in the order of ``RELATIONS``, the reverse after each that has a direction.
        stream_edges: ``(2, nodes)``, node -> stream.
        stream: ``(nodes,)``.
        num_streams: Of all programs.
    """

    edges: tuple[Tensor, ...]
    stream_edges: Tensor
    stream: Tensor
    num_streams: int


def hetero_topology(data: HeteroData) -> Topology:
    """Relations of ``dataset.graphs.to_hetero`` between nodes in the program's order, ops and collectives alike."""
    index = {kind: data[kind].index.numpy() for kind in ("op", "collective")}
    stream = np.zeros(sum(map(len, index.values())), dtype=np.int64)
    pairs: dict[str, list[np.ndarray]] = {}
    for source, relation, target in data.edge_types:
        edges = data[source, relation, target].edge_index.numpy()
        if relation == "runs_on":
            stream[index[source][edges[0]]] = edges[1]
        elif source != "stream":
            pairs.setdefault(relation, []).append(np.stack([index[source][edges[0]], index[target][edges[1]]]))
    joined = {relation: np.concatenate(found, axis=1) for relation, found in pairs.items()}
    return make_topology(joined, stream, data["stream"].num_nodes)


def graph_tensors(graphs: Topology | Sequence[Topology]) -> GraphTensors:
    """Tensors of one or several programs."""
    graph = graphs if isinstance(graphs, Topology) else join(list(graphs))
    edges = []
    for relation in RELATIONS:
        forward = torch.from_numpy(np.ascontiguousarray(graph.edges[relation]))
        edges.append(forward)
        if relation != "may_run_concurrently":
            edges.append(forward.flip(0))
    stream = torch.from_numpy(graph.stream)
    stream_edges = torch.stack([torch.arange(graph.num_nodes), stream])
    return GraphTensors(tuple(edges), stream_edges, stream, graph.num_streams)
