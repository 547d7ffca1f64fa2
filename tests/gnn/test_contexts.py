"""The network in numpy: equal to PyTorch, saved and loaded, also as earlier versions saved it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.graph.program import Dependency, Program
from stepsight.features.node_features import RELATIONS, SegmentGraph, Topology, join, node_features, topology
from stepsight.gnn.context_model import ContextModel, mean_network
from stepsight.gnn.contexts import FORMS, ContextNetwork, form_of
from tests.gnn.random_networks import ALONE, graph_of, random_model, random_network
from tests.gnn.random_networks import loaded as load_network


def _logs(network: ContextNetwork, graph: SegmentGraph) -> np.ndarray:
    alone = ALONE[: len(graph.program)]
    return np.log(network(graph, alone) / alone)


def _joined() -> tuple[np.ndarray, Topology]:
    graphs = [graph_of(6), graph_of(3)]
    features = [node_features(graph, ALONE[: len(graph.program)]) for graph in graphs]
    return np.concatenate(features), join([topology(graph.program) for graph in graphs])


@pytest.mark.parametrize("num_layers", [0, 2])
def test_numpy_equals_the_mean_of_pytorch_geometric(num_layers: int) -> None:
    """Of three trained networks, for two programs at once."""
    models = [random_model(seed, num_layers) for seed in range(3)]
    features, edges = _joined()
    expected = sum(model(torch.from_numpy(features).float(), edges).detach().numpy() for model in models) / 3
    assert expected.std(axis=1).min() > 0.01
    assert mean_network(models, FORMS["graph"]).levels(features, edges) == pytest.approx(expected, abs=2e-5)


def test_levels_count_by_their_strengths() -> None:
    """``s1 t + s2 (e - t) + s3 (n - e)``; the forms are settings of them."""
    models, graph = [random_model(std=0.1)], graph_of(6)
    table, own, heard = mean_network(models, FORMS["graph"]).levels(
        node_features(graph, ALONE[:12]), topology(graph.program)
    )
    for strengths, expected in (
        ((0.9, 0.7, 0.4), 0.9 * table + 0.7 * (own - table) + 0.4 * (heard - own)),
        (FORMS["none"], 0 * table), (FORMS["table"], table), (FORMS["features"], own), (FORMS["graph"], heard),
    ):  # fmt: skip
        assert _logs(mean_network(models, strengths), graph) == pytest.approx(expected)
    assert [form_of(strengths) for strengths in FORMS.values()] == list(FORMS)
    assert form_of((0.3, 0.5, 0.04)) == "features" and form_of((0.0, 0.0, 0.05)) == "graph"


def test_beyond_the_trained_range_corrections_stay_what_they_are_at_its_edge() -> None:
    graph = graph_of(6)
    model, features = random_model(), node_features(graph, ALONE[:12])
    model.set_range(torch.from_numpy(features).float())
    beyond = features + np.where(features == features.max(axis=0), 5.0, 0.0) * (features.max(axis=0) > 0)
    network, edges = mean_network([model], FORMS["graph"]), topology(graph.program)
    assert network.levels(beyond, edges)[1:] == pytest.approx(network.levels(features, edges)[1:], abs=1e-6)


def test_programs_of_a_batch_do_not_hear_each_other() -> None:
    network = random_network()
    apart = [
        network.levels(node_features(graph, ALONE[: len(graph.program)]), topology(graph.program))
        for graph in (graph_of(6), graph_of(3))
    ]
    assert network.levels(*_joined()) == pytest.approx(np.concatenate(apart, axis=1), abs=1e-12)


def test_every_relation_matters() -> None:
    graph = graph_of(6)
    network, features, edges = random_network(), node_features(graph, ALONE[:12]), topology(graph.program)
    before = network.levels(features, edges)[2]
    for relation in RELATIONS:
        if edges.edges[relation].size:
            fewer = {**edges.edges, relation: np.zeros((2, 0), np.int64)}
            without = Topology(edges.num_nodes, fewer, edges.stream, edges.num_streams)
            assert np.abs(network.levels(features, without)[2] - before).max() > 1e-6, relation


def test_a_network_hears_the_relations_that_it_was_made_for(tmp_path: Path) -> None:
    """In PyTorch, in numpy, and after it was saved; networks that are made now hear no data edges."""
    assert set(RELATIONS) - set(ContextModel().relations) == {"data"}
    model = random_model(relations=ContextModel().relations)
    network, graph = mean_network([model], FORMS["graph"]), graph_of(6)
    network.save(tmp_path)
    nodes, edges = graph.program.nodes, graph.program.edges
    both = ((0, 4, Dependency.DATA), (2, 8, Dependency.DATA))
    more = replace(graph, program=Program(nodes, (*edges, *both), "backward"))
    features = node_features(graph, ALONE[:12])
    heard = model(torch.from_numpy(features).float(), topology(more.program))[2].detach().numpy()
    assert _logs(network, more) == pytest.approx(heard, abs=2e-5)
    for one in (network, load_network(tmp_path)):
        assert one.relations == model.relations
        assert _logs(one, more) == pytest.approx(_logs(network, graph), abs=1e-6)


@pytest.mark.parametrize("relations", ["data", [1], ["data", "data"], ["rendezvous"], None])
def test_unknown_relations_are_refused(tmp_path: Path, relations: object) -> None:
    random_network().save(tmp_path)
    path = tmp_path / "gnn.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "relations": relations}))
    with pytest.raises(PredictorError, match=r"gnn\.json: a context network must hear some of stream_order, data"):
        load_network(tmp_path)


def test_a_saved_network_answers_as_before(tmp_path: Path) -> None:
    network, graph = random_network(), graph_of(6)
    network.save(tmp_path)
    assert _logs(load_network(tmp_path), graph) == pytest.approx(_logs(network, graph), abs=1e-6)


def test_a_network_of_another_schema_is_refused(tmp_path: Path) -> None:
    random_network().save(tmp_path)
    path = tmp_path / "gnn.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 1}))
    with pytest.raises(PredictorError, match="must have schema 2, got 1: train it again"):
        load_network(tmp_path)
    path.rename(tmp_path / "context_table.json")  # as the first ones were called
    with pytest.raises(PredictorError, match=r"context_table\.json.*must have schema 2, got 1: train it again"):
        load_network(tmp_path)


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    network = random_network()
    for breaking in (
        lambda: (tmp_path / "gnn.safetensors").write_bytes(b"junk"),
        lambda: (tmp_path / "gnn.json").write_text("{"),
        lambda: (tmp_path / "gnn.json").write_text("[" * 10**5),
        lambda: (tmp_path / "gnn.json").write_text((tmp_path / "gnn.json").read_text().replace("{", '{"bound": 1,', 1)),
        lambda: save_file({"encode.weight": np.zeros((2, 2), np.float32)}, tmp_path / "gnn.safetensors"),
        lambda: (tmp_path / "gnn.json").write_text(
            json.dumps({"schema": 0, "features": [], "bound": 1, "num_layers": 1})
        ),
    ):
        network.save(tmp_path)
        breaking()
        with pytest.raises(PredictorError):
            load_network(tmp_path)


@pytest.mark.parametrize(
    "value",
    [{"bound": "1"}, {"bound": True}, {"bound": 0}, {"bound": -1}, {"bound": 1e9}, {"bound": float("nan")},
     {"num_layers": 1.5}, {"num_layers": "1"}, {"num_layers": None}, {"num_layers": 10**6}, {"num_layers": -1},
     {"strengths": [1, 1]}, {"strengths": [1, 1, 1.1]}, {"strengths": [1, 1, "1"]}, {"strengths": None}],
)  # fmt: skip
def test_numbers_of_the_wrong_type_or_size_are_refused(tmp_path: Path, value: dict[str, object]) -> None:
    random_network().save(tmp_path)
    path = tmp_path / "gnn.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **value}))
    with pytest.raises(PredictorError, match=r"gnn\.json"):
        load_network(tmp_path)
