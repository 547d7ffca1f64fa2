"""The network on typed graphs."""

from __future__ import annotations

import torch
from torch_geometric.data import Batch, HeteroData

from stepsight.gnn.typed_network import NetworkForm, TypedNetwork, both_directions


def _graph(nodes: int = 4) -> HeteroData:
    graph = HeteroData()
    graph["op"].x = torch.randn(nodes, 3)
    graph["op"].baseline = torch.rand(nodes) + 0.1
    graph["link"].x = torch.randn(2, 2)
    graph["link", "beside", "op"].edge_index = torch.tensor([[0, 1], [0, 2]])
    graph["link", "beside", "op"].edge_attr = torch.randn(2, 1)
    return both_directions(graph)


def _network(graph: HeteroData, head: str) -> TypedNetwork:
    torch.manual_seed(0)
    edges = {kind: 1 for kind in graph.edge_types}
    network = TypedNetwork(NetworkForm("op", {"op": 3, "link": 2}, edges, head))
    network.set_support(graph)
    return network


def test_untrained_it_answers_what_is_given() -> None:
    """All factors are 1."""
    graph = _graph()
    assert torch.allclose(_network(graph, "factor")(graph), graph["op"].baseline)


def test_a_slowdown_is_never_a_gain() -> None:
    """Whatever the weights, the head ``slowdown`` answers no less than the time alone."""
    graph = _graph()
    network = _network(graph, "slowdown")
    for weights in network.parameters():
        torch.nn.init.normal_(weights)
    assert (network(graph) >= graph["op"].baseline).all()


def test_totals_are_sums_over_nodes() -> None:
    """A graph takes what its nodes take."""
    batch = Batch.from_data_list([_graph(4), _graph(5)])
    network = _network(batch, "factor")
    seconds = network(batch)
    assert torch.allclose(network.totals(batch, seconds), torch.stack([seconds[:4].sum(), seconds[4:].sum()]))


def test_beyond_its_support_the_edge_of_it_counts() -> None:
    """A feature out of the training's range changes nothing more than the end of the range."""
    graph = _graph()
    network = _network(graph, "factor")
    torch.nn.init.normal_(network.decode.weight)
    far, edge = graph.clone(), graph.clone()
    far["op"].x = graph["op"].x.clone()
    far["op"].x[0, 0] = 1e6
    edge["op"].x = graph["op"].x.clone()
    edge["op"].x[0, 0] = graph["op"].x[:, 0].max()
    assert torch.allclose(network(far), network(edge))
