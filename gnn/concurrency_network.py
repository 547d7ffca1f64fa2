"""Slowdown of ops by messages from what runs at the same time, each weighted with the share of time that both run.

An op that runs alone is not slowed: the slowdown is 1 plus a sum of non-negative messages.  Three ways to the messages:

- ``additive``: of features of the op, of its neighbour and of their overlap;
- ``demand``: what the neighbour demands, times how sensitive the op is;
- ``mutual``: as ``demand``, but a neighbour that is slowed itself demands less in a second; this takes some rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Batch, HeteroData
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

from stepsight.gnn.scaled_network import ScaledNetwork

EdgeType = tuple[str, str, str]
WAYS = ("additive", "demand", "mutual")
SHARE = 1  # feature of an edge: share of the target's time in which both run
ROUNDS = 3  # of ``mutual``
NO_SLOWDOWN = -2.0  # softplus of it is where training begins
UNKNOWN = 0.3  # part of the graphs whose hardware is hidden in training


@dataclass(frozen=True)
class ConcurrencyForm:
    """Inputs and sizes of a network.

    Attributes:
        readout: Type of the nodes that are slowed.
        nodes: Features of each type of node.
        edges: Features of each type of edge to the readout.
        way: One of ``WAYS``.
        channels: Width.
        hardware: Number of kinds of hardware; 0: graphs do not tell.
    """

    readout: str
    nodes: Mapping[str, int]
    edges: Mapping[EdgeType, int]
    way: str = "additive"
    channels: int = 16
    hardware: int = 0


class Messages(MessagePassing):  # type: ignore[misc]
    """Sum of non-negative messages, weighted with shares of time.

    Args:
        channels: Of the nodes.
        about: Features of an edge.
        hears_itself: Whether a message depends on who hears it.
    """

    def __init__(self, channels: int, about: int, *, hears_itself: bool) -> None:
        super().__init__(aggr="add")
        self.hears_itself = hears_itself
        last = nn.Linear(channels, 1)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, NO_SLOWDOWN)
        self.network = nn.Sequential(nn.Linear((1 + hears_itself) * channels + about, channels), nn.SiLU(), last)

    def forward(self, x: tuple[Tensor, Tensor], pace: Tensor, where: Tensor, share: Tensor, about: Tensor) -> Tensor:
        """Sum at each target, ``(targets,)``; ``pace``: of each source, ``(sources,)``."""
        count = (x[0].shape[0], x[1].shape[0])
        heard: Tensor = self.propagate(
            where, x=x, pace=(pace[:, None], None), share=share[:, None], about=about, size=count
        )
        return heard[:, 0]

    def message(self, x_i: Tensor, x_j: Tensor, pace_j: Tensor, share: Tensor, about: Tensor) -> Tensor:
        told = [x_i, x_j, about] if self.hears_itself else [x_j, about]
        return share * pace_j * functional.softplus(self.network(torch.cat(told, dim=1)))


class ConcurrencyNetwork(ScaledNetwork):
    """Seconds of the nodes of one type: the given seconds times a slowdown of at least 1."""

    def __init__(self, form: ConcurrencyForm) -> None:
        super().__init__()
        self.form = form
        width = form.channels
        self.encode = nn.ModuleDict({name: nn.Linear(count, width) for name, count in form.nodes.items()})
        self.heard = nn.ModuleDict(
            {"__".join(kind): Messages(width, count, hears_itself=self._mixed) for kind, count in form.edges.items()}
        )
        self.sensitivity = nn.Linear(width, 1)
        nn.init.zeros_(self.sensitivity.weight)
        nn.init.constant_(self.sensitivity.bias, 0.5413)  # softplus of it is 1
        self.hardware = nn.Embedding(form.hardware + 1, width, padding_idx=0)
        nn.init.zeros_(self.hardware.weight)
        for name, count in (*form.nodes.items(), *(("__".join(k), n) for k, n in form.edges.items())):
            self._add_scale(name, count)

    @property
    def _mixed(self) -> bool:
        return self.form.way == "additive"

    def set_support(self, graphs: HeteroData) -> None:
        """Store mean, spread and range of the training features; values beyond the range are clipped."""
        named = {name: graphs[name].x for name in self.form.nodes}
        self._set_scales(named | {"__".join(kind): graphs[kind].edge_attr for kind in self.form.edges})

    def forward(self, graphs: HeteroData) -> Tensor:
        """Seconds of every node of type ``readout``, ``(n,)``."""
        form = self.form
        hidden = {name: functional.silu(self.encode[name](self._scaled(name, graphs[name].x))) for name in form.nodes}
        if form.hardware and "hardware" in graphs:
            hidden = {name: own + self._told(graphs, name) for name, own in hidden.items()}
        target = hidden[form.readout]
        slowdown = target.new_ones(len(target))
        for _ in range(ROUNDS if form.way == "mutual" else 1):
            heard = target.new_zeros(len(target))
            for kind in form.edges:
                source = hidden[kind[0]]
                pace = 1.0 / slowdown if kind[0] == form.readout else source.new_ones(len(source))
                about: Any = graphs[kind].edge_attr
                name = "__".join(kind)
                heard = heard + self.heard[name](
                    (source, target), pace, graphs[kind].edge_index, about[:, SHARE], self._scaled(name, about)
                )
            if not self._mixed:
                heard = functional.softplus(self.sensitivity(target))[:, 0] * heard
            slowdown = 1.0 + heard
        answer: Tensor = graphs[form.readout].baseline * slowdown
        return answer

    def _told(self, graphs: HeteroData, name: str) -> Tensor:
        """What the hardware adds to each node; nothing where it is not known."""
        kind = graphs.hardware.clamp(0, self.form.hardware)
        if self.training:
            kind = torch.where(torch.rand(len(kind)) < UNKNOWN, 0, kind)
        told: Tensor = self.hardware(kind[graphs[name].batch])
        return told

    def totals(self, graphs: Batch, seconds: Tensor) -> Tensor:
        """Seconds of every graph, ``(graphs,)``: the sum over its nodes."""
        total: Tensor = scatter(
            seconds, graphs[self.form.readout].batch, dim=0, dim_size=graphs.num_graphs, reduce="sum"
        )
        return total
