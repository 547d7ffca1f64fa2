"""The context model: the slowdown of a node within its program, relative to the node alone, and its losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SimpleConv

from stepsight.features.node_features import HEARD, Topology, directions, node_feature_names
from stepsight.gnn.contexts import LEVELS, ContextNetwork, table_columns

BOUND = 4.0  # log units: a small op takes up to thirty times as long where the host prepares a collective before it
HIDDEN = 24
LAYERS = 2
NODE_DELTA = 0.15  # log units; beyond, an outlier counts linearly
ITERATION_DELTA = 0.1


class RelationalLayer(nn.Module):
    """One round of messages: the mean over each relation, each direction, and over the node's stream.

    Shapes:
        ``hidden`` ``(nodes, channels)`` -> ``(nodes, channels)``.
    """

    def __init__(self, channels: int, relations: Sequence[str]) -> None:
        super().__init__()
        self.relations = tuple(relations)
        self.mean = SimpleConv(aggr="mean")
        self.combine = nn.Linear((2 + len(directions(self.relations))) * channels, channels)

    def forward(self, hidden: Tensor, graph: Topology) -> Tensor:
        stream = torch.from_numpy(graph.stream)
        on_stream = torch.stack([torch.arange(graph.num_nodes), stream])
        streams = self.mean((hidden, hidden.new_zeros(graph.num_streams, hidden.shape[1])), on_stream)
        heard = [hidden, streams[stream]]
        for relation, near, far in directions(self.relations):
            edges = torch.from_numpy(np.ascontiguousarray(graph.edges[relation][[far, near]]))
            heard.append(self.mean(hidden, edges) if edges.numel() else torch.zeros_like(hidden))
        return hidden + functional.silu(self.combine(torch.cat(heard, dim=1)))


class Head(nn.Module):
    """A correction within ``+-bound``, of a hidden state and of the features themselves; zero when it is made."""

    def __init__(self, channels: int, num_features: int, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.decode, self.direct = nn.Linear(channels, 1), nn.Linear(num_features, 1)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor, features: Tensor) -> Tensor:
        raw = (self.decode(hidden) + self.direct(features))[:, 0]
        return self.bound * torch.tanh(raw / self.bound)


class ContextModel(nn.Module):
    """Three log-corrections of every op and collective, each good by itself.  Untrained, all are zero.

    Shapes:
        ``features`` ``(nodes, len(self.features))`` -> ``(3, nodes)``: by kind and phase; by the node's own features;
        and with messages.  The last two lie within ``+-bound``.

    Attributes:
        features: Names of the features that it reads: all those there are when it is made.
        relations: Names of the relations along which nodes hear each other.
    """

    def __init__(
        self, channels: int = HIDDEN, num_layers: int = LAYERS, bound: float = BOUND, relations: Sequence[str] = HEARD
    ) -> None:
        super().__init__()
        self.bound = bound
        self.features, self.relations = node_feature_names(), tuple(relations)
        self._kinds, self._labels = table_columns(self.features)
        self.table = nn.Parameter(torch.zeros(1 + len(self._labels), 1 + len(self._kinds)))
        self.encode = nn.Linear(len(self.features), channels)
        self.layers = nn.ModuleList(RelationalLayer(channels, relations) for _ in range(num_layers))
        self.heads = nn.ModuleDict({level: Head(channels, len(self.features), bound) for level in LEVELS[1:]})
        self.register_buffer("low", torch.full((len(self.features),), -torch.inf))
        self.register_buffer("high", torch.full((len(self.features),), torch.inf))

    def set_range(self, features: Tensor) -> None:
        """Store the range of the training features; beyond it, corrections are constant."""
        self.low = features.amin(dim=0)
        self.high = features.amax(dim=0)

    def forward(self, features: Tensor, graph: Topology) -> Tensor:
        one = features.new_ones(len(features), 1)
        labels, kinds = (torch.cat([one, features[:, own]], dim=1) for own in (self._labels, self._kinds))
        by_kind = ((labels @ self.table) * kinds).sum(dim=1)
        features = features.clamp(self.low, self.high)
        hidden = functional.silu(self.encode(features))
        by_features = self.heads["features"](hidden, features)
        for layer in self.layers:
            hidden = layer(hidden, graph)
        return torch.stack([by_kind, by_features, self.heads["graph"](hidden, features)])


def mean_network(models: Sequence[ContextModel], strengths: tuple[float, float, float]) -> ContextNetwork:
    """The mean of some models for inference without PyTorch; ``strengths`` of its three levels."""
    first, states = models[0], [model.state_dict() for model in models]
    tensors = {name: torch.stack([state[name] for state in states]).double().numpy() for name in states[0]}
    tensors["table"] = tensors["table"].mean(axis=0)
    return ContextNetwork(first.bound, strengths, len(first.layers), tensors, first.features, first.relations)


def node_loss(corrections: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Huber loss of log-corrections ``(levels, nodes)`` against ``(nodes,)``, weighted; summed over levels."""
    off = functional.huber_loss(corrections, target.expand_as(corrections), reduction="none", delta=NODE_DELTA)
    return (off / NODE_DELTA @ weight).sum() / weight.sum()


def iteration_loss(seconds: Tensor, measured: Tensor) -> Tensor:
    """Huber loss of log iteration times ``(levels, runs)`` against ``(runs,)``: mean over runs, summed over levels."""
    off = functional.huber_loss(
        seconds.log(), measured.log().expand_as(seconds), reduction="none", delta=ITERATION_DELTA
    )
    return off.mean(dim=1).sum() / ITERATION_DELTA
