"""The network of concurrency."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Batch, HeteroData

from stepsight.gnn.concurrency_network import WAYS, ConcurrencyForm, ConcurrencyNetwork
from stepsight.training.context.fit_typed import TypedFit, fit_typed

BESIDE = ("op", "beside", "op")


def _graph(share: float = 0.5, lost: float = 0.4) -> HeteroData:
    """Two ops beside each other for a share of their time, and one alone."""
    graph = HeteroData()
    graph["op"].x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    graph["op"].baseline = torch.tensor([1.0, 2.0, 3.0])
    graph["op"].seconds = torch.tensor([1.0 + lost * share, 2.0 * (1.0 + lost * share), 3.0])
    graph["op"].weight = torch.ones(3)
    graph[BESIDE].edge_index = torch.tensor([[0, 1], [1, 0]])
    graph[BESIDE].edge_attr = torch.tensor([[share, share], [share, share]])
    return graph


def _network(way: str, hardware: int = 0) -> ConcurrencyNetwork:
    torch.manual_seed(0)
    return ConcurrencyNetwork(ConcurrencyForm("op", {"op": 2}, {BESIDE: 2}, way, 8, hardware)).eval()


@pytest.mark.parametrize("way", WAYS)
def test_who_is_alone_is_not_slowed_and_nobody_gains(way: str) -> None:
    """Whatever the weights, messages are not negative, and an op without neighbours takes its time alone."""
    network = _network(way)
    for weights in network.parameters():
        torch.nn.init.normal_(weights)
    seconds = network(_graph())
    assert seconds[2] == 3.0
    assert (seconds >= _graph()["op"].baseline).all()


@pytest.mark.parametrize("way", WAYS)
def test_longer_overlap_costs_more(way: str) -> None:
    network = _network(way)
    assert (network(_graph(0.9))[:2] > network(_graph(0.1))[:2]).all()


def test_a_slowed_neighbour_demands_less() -> None:
    """With equal weights, ops that slow each other lose less than ops whose neighbours keep their pace."""
    assert (_network("mutual")(_graph())[:2] < _network("demand")(_graph())[:2]).all()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_lost_is_learned(way: str) -> None:
    """Ops that lose 0.4 of the time that they share teach it."""
    graphs = [_graph(share) for share in (0.2, 0.4, 0.6, 0.8)]
    fit = TypedFit(relations=("beside",), concurrency=way, channels=8, epochs=60, rate=0.03, decay=0.0)
    nodes, totals = fit_typed(graphs, fit, 0).seconds([_graph(0.5)])
    assert nodes[0] == pytest.approx([1.2, 2.4, 3.0], rel=0.03)
    assert totals[0] == pytest.approx(nodes[0].sum())


def test_unknown_hardware_is_no_hardware() -> None:
    """Graphs of hardware that taught nothing are answered as without any."""
    network = _network("demand", hardware=2)
    for weights in network.parameters():
        torch.nn.init.normal_(weights)
    with torch.no_grad():
        network.hardware.weight[0] = 0.0
    told, silent = _graph(), _graph()
    told.hardware, silent.hardware = torch.tensor([1]), torch.tensor([0])
    known, unknown = network(Batch.from_data_list([told])), network(Batch.from_data_list([silent]))
    assert not torch.equal(known, unknown)
    assert torch.allclose(unknown, network(_graph()))
