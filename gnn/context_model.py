"""The context model: the slowdown of a node within its program, relative to the node alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SimpleConv

from stepsight.features.graph_features import RELATIONS, Topology, node_feature_names
from stepsight.gnn.inference import ContextWeights

BOUND = 2.0  # log units: small ops take several times as long with cold caches and host gaps, but never a hundred times
HIDDEN = 24
LAYERS = 2


class RelationalLayer(nn.Module):
    """One round of messages: the mean over each relation, each direction, and over the node's stream.

    Shapes:
        ``hidden`` ``(nodes, channels)`` -> ``(nodes, channels)``.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        relations = 2 * len(RELATIONS) - 1
        self.mean = SimpleConv(aggr="mean")
        self.combine = nn.Linear((2 + relations) * channels, channels)

    def forward(self, hidden: Tensor, graph: Topology) -> Tensor:
        stream = torch.from_numpy(graph.stream)
        on_stream = torch.stack([torch.arange(graph.num_nodes), stream])
        streams = self.mean((hidden, hidden.new_zeros(graph.num_streams, hidden.shape[1])), on_stream)
        heard = [hidden, streams[stream]]
        for edges in _edges(graph):
            heard.append(self.mean(hidden, edges) if edges.numel() else torch.zeros_like(hidden))
        return hidden + functional.silu(self.combine(torch.cat(heard, dim=1)))


def _edges(graph: Topology) -> Iterator[Tensor]:
    """Edges of every relation, ``(2, e)`` each, followed by the reverse of a relation that has a direction."""
    for relation in RELATIONS:
        forward = torch.from_numpy(np.ascontiguousarray(graph.edges[relation]))
        yield forward
        if relation != "may_run_concurrently":
            yield forward.flip(0)


class ContextModel(nn.Module):
    """Bounded log-correction of every op and collective.  Untrained it is the identity: all corrections are zero.

    Shapes:
        ``features`` ``(nodes, len(self.features))`` -> ``(nodes,)``, within ``+-bound``.

    Attributes:
        features: Names of the features that it reads: all those there are when it is made.
    """

    def __init__(self, channels: int = HIDDEN, num_layers: int = LAYERS, bound: float = BOUND) -> None:
        super().__init__()
        self.bound = bound
        self.features = node_feature_names()
        num_features = len(self.features)
        self.encode = nn.Linear(num_features, channels)
        self.layers = nn.ModuleList(RelationalLayer(channels) for _ in range(num_layers))
        self.decode = nn.Linear(channels, 1)
        self.direct = nn.Linear(num_features, 1)
        self.register_buffer("low", torch.full((num_features,), -torch.inf))
        self.register_buffer("high", torch.full((num_features,), torch.inf))
        for head in (self.decode, self.direct):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def set_range(self, features: Tensor) -> None:
        """Store the range of the training features; beyond it, corrections are constant."""
        self.low = features.amin(dim=0)
        self.high = features.amax(dim=0)

    def forward(self, features: Tensor, graph: Topology) -> Tensor:
        features = features.clamp(self.low, self.high)
        hidden = functional.silu(self.encode(features))
        for layer in self.layers:
            hidden = layer(hidden, graph)
        raw = self.decode(hidden) + self.direct(features)
        return self.bound * torch.tanh(raw[:, 0] / self.bound)

    def weights(self) -> ContextWeights:
        """A copy for inference without PyTorch."""
        tensors = {name: value.detach().double().numpy().copy() for name, value in self.state_dict().items()}
        return ContextWeights(self.bound, len(self.layers), tensors, self.features)
