"""Seconds of nodes from a graph with typed nodes and edges: messages with edge features, non-negative outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Batch, HeteroData
from torch_geometric.nn import HeteroConv, ResGatedGraphConv
from torch_geometric.transforms import ToUndirected
from torch_geometric.utils import scatter

from stepsight.gnn.scaled_network import ScaledNetwork

EdgeType = tuple[str, str, str]
HEADS = ("factor", "slowdown")
NO_SLOWDOWN = -3.0  # softplus of it is a slowdown of 5 %, the start of training


@dataclass(frozen=True)
class NetworkForm:
    """Inputs and sizes of a network.

    Attributes:
        readout: Type of the nodes whose seconds it answers.
        nodes: Features of each type of node.
        edges: Features of each type of edge, reverse edges (``rev_...``) included.  None: a sum over nodes.
        head: ``factor`` of the seconds that are given, or ``slowdown``: a factor of at least 1.
        channels: Width.
        layers: Rounds of messages.
        parts: Resources that the given seconds of a node consist of (``parts`` of the graph); each has a factor.
        bound: By which a node's factors may be off those of all nodes, log units.
        rest: Whether a graph takes seconds that belong to no node.
    """

    readout: str
    nodes: Mapping[str, int]
    edges: Mapping[EdgeType, int]
    head: str = "factor"
    channels: int = 32
    layers: int = 2
    parts: int = 1
    bound: float = 2.0
    rest: bool = False


def both_directions(graph: HeteroData) -> HeteroData:
    """The graph with every edge also in the opposite direction, under its own type."""
    return ToUndirected(merge=False)(graph)


class TypedNetwork(ScaledNetwork):
    """Seconds of the nodes of one type.

    Untrained, it answers about the seconds that are given (``baseline``).
    """

    def __init__(self, form: NetworkForm) -> None:
        super().__init__()
        self.form = form
        width = form.channels
        self.encode = nn.ModuleDict({name: nn.Linear(count, width) for name, count in form.nodes.items()})
        self.rounds = nn.ModuleList(self._round() for _ in range(form.layers if form.edges else 0))
        self.norms = nn.ModuleList(
            nn.ModuleDict({name: nn.LayerNorm(width) for name in form.nodes}) for _ in self.rounds
        )
        self.between = nn.Linear(width, width)
        self.decode = nn.Linear(width, form.parts)
        start = NO_SLOWDOWN if form.head == "slowdown" else 0.0
        self.usual = nn.Parameter(torch.full((form.parts,), start))
        self.log_rest = nn.Parameter(torch.tensor(-12.0))
        for name, count in form.nodes.items():
            self._add_scale(f"node_{name}", count)
        for kind, count in form.edges.items():
            self._add_scale("edge_" + "__".join(kind), count)
        nn.init.zeros_(self.decode.weight)
        nn.init.zeros_(self.decode.bias)

    def _round(self) -> HeteroConv:
        width = self.form.channels
        return HeteroConv(
            {
                kind: ResGatedGraphConv((width, width), width, edge_dim=max(count, 1), root_weight=False, aggr="mean")
                for kind, count in self.form.edges.items()
            },
            aggr="sum",
        )

    def set_support(self, graphs: HeteroData) -> None:
        """Store mean, spread and range of the training features; values beyond the range are clipped."""
        named = {f"node_{name}": graphs[name].x for name in self.form.nodes}
        self._set_scales(named | {"edge_" + "__".join(kind): graphs[kind].edge_attr for kind in self.form.edges})

    def forward(self, graphs: HeteroData) -> Tensor:
        """Seconds of every node of type ``readout``, ``(n,)``."""
        form = self.form
        scaled = {name: self._scaled(f"node_{name}", graphs[name].x) for name in form.nodes}
        hidden = {name: functional.silu(self.encode[name](values)) for name, values in scaled.items()}
        where = {kind: graphs[kind].edge_index for kind in form.edges}
        about = {kind: self._scaled("edge_" + "__".join(kind), graphs[kind].edge_attr) for kind in form.edges}
        if self.rounds:
            for messages, norms in zip(self.rounds, self.norms, strict=True):
                assert isinstance(norms, nn.ModuleDict)
                heard = messages(hidden, where, about)
                hidden = {
                    name: own + functional.silu(norms[name](heard[name])) if name in heard else own
                    for name, own in hidden.items()
                }
        own = functional.silu(self.between(hidden[form.readout]))
        raw = self.usual + form.bound * torch.tanh(self.decode(own) / form.bound)
        given: Tensor = graphs[form.readout].baseline[:, None] if form.parts == 1 else graphs[form.readout].parts
        factor = 1.0 + functional.softplus(raw) if form.head == "slowdown" else raw.exp()
        answer: Tensor = (given * factor).sum(dim=1)
        return answer

    def totals(self, graphs: Batch, seconds: Tensor) -> Tensor:
        """Seconds of every graph, ``(graphs,)``: the sum over its nodes, plus a remainder."""
        total: Tensor = scatter(
            seconds, graphs[self.form.readout].batch, dim=0, dim_size=graphs.num_graphs, reduce="sum"
        )
        return total + self.log_rest.exp() if self.form.rest else total
