"""The network and its losses; numbers worked out by hand."""

import pytest
import torch

from stepsight.dataset.kinds.op import Op
from stepsight.features.node_features import node_features, topology
from stepsight.gnn.context_model import BOUND, ITERATION_DELTA, NODE_DELTA, ContextModel, iteration_loss, node_loss
from tests.gnn.random_networks import ALONE, graph_of, random_model


def test_untrained_it_is_the_identity() -> None:
    graph = graph_of(6)
    features = torch.from_numpy(node_features(graph, ALONE[:12])).float()
    assert ContextModel()(features, topology(graph.program)).detach().abs().max() == 0


def test_corrections_by_features_and_messages_are_bounded() -> None:
    graph = graph_of(6)
    features = torch.from_numpy(1e3 * node_features(graph, ALONE[:12])).float()
    assert random_model()(features, topology(graph.program))[1:].detach().abs().max() <= BOUND


def test_the_table_knows_a_kind_in_a_phase_and_nothing_else() -> None:
    """Two products of other sizes have the same entry, the same product in another phase has another."""
    levels = []
    for label in ("backward", "forward"):
        graph = graph_of(2, label)
        features = torch.from_numpy(node_features(graph, ALONE[:4])).float()
        levels.append(random_model()(features, topology(graph.program)).detach())
        assert [isinstance(node.work, Op) for node in graph.program.nodes] == [True, False] * 2
    table = levels[0][0]
    assert table[0] == table[2] and table[1] == table[3] and table[0] != table[1]
    assert levels[0][1][0] != levels[0][1][2] and levels[1][0][0] != table[0]


def test_nodes_count_by_their_weight_and_levels_alike() -> None:
    """Within delta half of the square, beyond it linear, both over delta: 0.05 / 0.15 and 0.3 with weights 3 and 1."""
    assert (NODE_DELTA, ITERATION_DELTA) == (0.15, 0.1)
    corrections, target = torch.tensor([[0.15, 0.5], [0.05, 0.2]]), torch.tensor([0.05, 0.2])
    small, large = 0.5 * 0.1**2 / 0.15, 0.3 - 0.5 * 0.15
    for scale in (1.0, 2.0):
        loss = node_loss(corrections, target, scale * torch.tensor([3.0, 1.0]))
        assert loss.item() == pytest.approx((3 * small + large) / 4, rel=1e-5)


def test_iterations_count_by_the_log_of_their_ratio() -> None:
    measured = torch.tensor([1.0, 2.0])
    off = torch.tensor([0.05, 0.4]).exp() * measured
    expected = (0.5 * 0.05**2 / 0.1 + 0.4 - 0.5 * 0.1) / 2
    assert iteration_loss(torch.stack([off, measured]), measured).item() == pytest.approx(expected, rel=1e-4)
