"""A context model of one's own: a function or a module, by itself or by name, in every answer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepsight.dataset import TraceGraphs
from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.trace_graphs.graph_dataset import make_dataset
from stepsight.dataset.trace_graphs.learning_segments import learning_segments
from stepsight.features.node_features import SegmentGraph
from stepsight.registries import CONTEXTS, HARDWARE
from stepsight.testing import ContextModelContract
from stepsight.training.predictor.predictor import Predictor
from tests.dataset.trace_graphs.test_trace_graphs import collection
from tests.gnn.random_networks import ALONE, graph_of


def twice(graph: SegmentGraph, alone: np.ndarray) -> np.ndarray:
    """Everything takes twice as long on the devices of a node that all compute."""
    assert len(graph.program) == len(alone) and graph.hardware.name
    return alone * (2.0 if graph.busy > 1 else 1.0)


class Slower(torch.nn.Module):
    """Collectives take three times as long."""

    def forward(self, graph: Any, alone: torch.Tensor) -> torch.Tensor:
        seconds = alone.clone()
        seconds[graph["collective"].node] *= 3.0
        return seconds


class TestContextModels(ContextModelContract):
    @pytest.fixture(params=[twice, Slower()])
    def model(self, request: pytest.FixtureRequest) -> Any:
        return request.param


def test_a_module_gets_the_graph_as_the_dataset_has_it(tmp_path: Path) -> None:
    """Features, edges and kinds of a segment's graph are those of the same program's, without its times."""
    make_dataset([collection(tmp_path)], tmp_path / "data")
    graphs = TraceGraphs(tmp_path / "data", scope="segment")
    for stored, segment in list(zip(graphs, learning_segments(graphs.table), strict=True))[:6]:
        alone = np.full(len(segment.program), 2e-4)
        made = SegmentGraph(segment.program, HARDWARE["local-cpu"], segment.busy).to_heterodata(alone)
        assert made.edge_types == stored.edge_types and made.segment == stored.segment
        for kind in ("op", "collective"):
            for name in ("x", "kind", "node", "signature", "share"):
                assert torch.equal(made[kind][name], stored[kind][name])
            assert made[kind].y[:, 0].exp().numpy() == pytest.approx(2e-4) and made[kind].y[:, 1].isnan().all()
        for edge_type in stored.edge_types:
            assert torch.equal(made[edge_type].edge_index, stored[edge_type].edge_index)


def test_its_seconds_are_in_every_answer(predictor: Predictor) -> None:
    graph, alone = graph_of(2), ALONE[:4]
    for model, expected in ((twice, 2 * alone), (Slower(), alone * [1, 3, 1, 3])):
        own = predictor.with_context(model)
        assert own.context is not None and own.context(graph, alone) == pytest.approx(expected)
        assert own.context_facts["form"] == "own" and "with a context model" in own.source
    assert predictor.with_context(None).context is None


@pytest.mark.parametrize("result", [np.ones(3), np.array([1.0, np.nan, 1.0, 1.0]), -np.ones(4)])
def test_what_is_no_time_is_refused(predictor: Predictor, result: np.ndarray) -> None:
    own = predictor.with_context(lambda graph, alone: result).context
    assert own is not None
    with pytest.raises(PredictorError, match="must give 4 numbers of seconds"):
        own(graph_of(2), ALONE[:4])
    failing = predictor.with_context(lambda graph, alone: alone[9]).context
    assert failing is not None
    with pytest.raises(PredictorError, match="failed: IndexError"):
        failing(graph_of(2), ALONE[:4])
    with pytest.raises(PredictorError, match=r"must take 2 \(graph, alone\)"):
        predictor.with_context(lambda graph: graph)  # type: ignore[misc]


def test_it_is_saved_by_its_name(predictor: Predictor, tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match=r"must have a name in stepsight\.registries\.CONTEXTS"):
        predictor.with_context(twice).save(tmp_path / "p")
    with CONTEXTS.registered("twice", twice):
        predictor.with_context("twice").save(str(tmp_path / "p"))
        context = Predictor.load(tmp_path / "p").context
        assert context is not None and context.name == "context model twice"
        assert context(graph_of(1), ALONE[:2]) == pytest.approx(2 * ALONE[:2])
    with pytest.raises(PredictorError, match="context model must be"):
        Predictor.load(tmp_path / "p")
