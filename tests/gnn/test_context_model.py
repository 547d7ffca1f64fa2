import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.graph.program import Dependency, Program, ProgramBuilder
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.features.graph_features import RELATIONS, join, node_features, topology
from stepsight.gnn.context_model import BOUND, LAYERS, ContextModel
from stepsight.gnn.inference import ContextWeights

HARDWARE = find_hardware("local-cpu")
assert HARDWARE is not None


def _program(num_ops: int = 6) -> Program:
    builder = ProgramBuilder("backward")
    for index in range(num_ops):
        op = builder.add(Op("linear", (64, 64 + index, 32), "fp32"))
        builder.add(Collective("all_reduce", 4096, 2, 2), "dp", after=[op], why=Dependency.SYNCHRONISATION)
    return builder.build()


def _random_model(seed: int = 0, num_layers: int = LAYERS) -> ContextModel:
    torch.manual_seed(seed)
    model = ContextModel(num_layers=num_layers)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def _inputs(program: Program) -> np.ndarray:
    return node_features(program, np.full(len(program), 2e-4), HARDWARE, 2)


def test_untrained_it_is_the_identity() -> None:
    program = _program()
    model = ContextModel()
    out = model(torch.from_numpy(_inputs(program)).float(), topology(program))
    assert out.detach().abs().max() == 0


def test_corrections_are_bounded() -> None:
    program = _program()
    features = torch.from_numpy(_inputs(program) * 1e3).float()
    out = _random_model()(features, topology(program))
    assert out.detach().abs().max() <= BOUND


@pytest.mark.parametrize("num_layers", [0, LAYERS])
def test_numpy_inference_equals_pytorch_geometric(num_layers: int) -> None:
    programs = [_program(6), _program(3)]
    graph = join([topology(program) for program in programs])
    features = np.concatenate([_inputs(program) for program in programs])
    model = _random_model(num_layers=num_layers)
    expected = model(torch.from_numpy(features).float(), graph).detach().numpy()
    assert expected.std() > 0.01
    assert model.weights().forward(features, graph) == pytest.approx(expected, abs=2e-5)


def test_beyond_the_trained_range_corrections_stay_what_they_are_at_its_edge() -> None:
    program = _program()
    model, features = _random_model(), _inputs(program)
    model.set_range(torch.from_numpy(features).float())
    beyond = features + np.where(features == features.max(axis=0), 5.0, 0.0) * (features.max(axis=0) > 0)
    weights, graph = model.weights(), topology(program)
    assert weights.forward(beyond, graph) == pytest.approx(weights.forward(features, graph), abs=1e-6)


def test_programs_of_a_batch_do_not_hear_each_other() -> None:
    one, two = _program(6), _program(3)
    weights = _random_model().weights()
    together = weights.forward(np.concatenate([_inputs(one), _inputs(two)]), join([topology(one), topology(two)]))
    alone = np.concatenate([weights.forward(_inputs(p), topology(p)) for p in (one, two)])
    assert together == pytest.approx(alone, abs=1e-12)


def test_every_relation_matters() -> None:
    program = _program()
    weights, features, graph = _random_model().weights(), _inputs(program), topology(program)
    before = weights.forward(features, graph)
    for relation in RELATIONS:
        if graph.edges[relation].size:
            edges = {**graph.edges, relation: np.zeros((2, 0), np.int64)}
            without = type(graph)(graph.num_nodes, edges, graph.stream, graph.num_streams)
            assert np.abs(weights.forward(features, without) - before).max() > 1e-6, relation


def test_saved_weights_answer_as_before(tmp_path: Path) -> None:
    program, weights = _program(), _random_model().weights()
    weights.save(tmp_path)
    alone = np.full(len(program), 2e-4)
    expected = weights.log_correction(program, alone, HARDWARE, 2)
    assert ContextWeights.load(tmp_path).log_correction(program, alone, HARDWARE, 2) == pytest.approx(
        expected, abs=1e-6
    )


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    weights = _random_model().weights()
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
        weights.save(tmp_path)
        breaking()
        with pytest.raises(PredictorError):
            ContextWeights.load(tmp_path)


@pytest.mark.parametrize(
    "value",
    [{"bound": "1"}, {"bound": True}, {"bound": 0}, {"bound": -1}, {"bound": 1e9}, {"bound": float("nan")},
     {"num_layers": 1.5}, {"num_layers": "1"}, {"num_layers": None}, {"num_layers": 10**6}, {"num_layers": -1}],
)  # fmt: skip
def test_numbers_of_the_wrong_type_or_size_are_refused(tmp_path: Path, value: dict[str, object]) -> None:
    _random_model().weights().save(tmp_path)
    path = tmp_path / "gnn.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **value}))
    with pytest.raises(PredictorError, match=r"gnn\.(json|safetensors)"):
        ContextWeights.load(tmp_path)
