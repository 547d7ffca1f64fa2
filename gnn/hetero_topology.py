"""From the learning graphs to what the context model reads."""

from __future__ import annotations

import numpy as np
from torch_geometric.data import HeteroData

from stepsight.features.graph_features import Topology, make_topology


def hetero_topology(data: HeteroData) -> Topology:
    """Return the relations of a ``HeteroData``; nodes, ops and collectives alike, are in the program's order."""
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
