"""Intervals of the models of a task."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.context_coverage import Doubt, pooled_quantile, residuals_of
from stepsight.experiments.studies.context.context_task import ContextTask


def _graph(rng: np.random.Generator, common: float, whole: bool) -> HeteroData:
    """Twenty nodes of two kinds; the second kind is known ten times better."""
    graph, kinds = HeteroData(), np.arange(20) % 2
    off = rng.normal(size=20) * np.where(kinds == 0, 0.3, 0.03) + common * rng.normal()
    graph["op"].baseline = torch.full((20,), 1e-3)
    graph["op"].key = torch.from_numpy(kinds)
    if whole:
        graph.total = torch.tensor([0.02 * float(np.exp(rng.normal() * 0.05))])
    else:
        graph["op"].seconds = torch.from_numpy(1e-3 * np.exp(off)).float()
        graph["op"].weight = graph["op"].seconds
    return graph


@pytest.mark.parametrize(("whole", "common"), [(True, 0.0), (False, 0.0), (False, 0.2)])
def test_intervals_cover_what_they_promise(whole: bool, common: float) -> None:
    """About nine of ten new graphs, and nine tenths of the time of their nodes, lie in their intervals."""
    rng = np.random.default_rng(0)
    graphs = [_graph(rng, common, whole) for _ in range(300)]
    task = ContextTask("t", "a", graphs, [f"g{number}" for number in range(300)], whole=whole)
    answers = [graph["op"].baseline.double().numpy() for graph in graphs], np.full(300, 0.02)
    off = residuals_of(task, graphs[:150], (answers[0][:150], answers[1][:150]))
    found = Doubt(task, range(150), off).covered(
        range(150, 300), residuals_of(task, graphs[150:], (answers[0][150:], answers[1][150:]))
    )
    assert found.totals.mean() == pytest.approx(0.9, abs=0.1)
    if not whole:
        assert found.nodes.mean() == pytest.approx(0.9, abs=0.1)


def test_a_kind_that_is_known_better_has_narrower_intervals() -> None:
    """Doubts are by kind of node."""
    rng = np.random.default_rng(0)
    graphs = [_graph(rng, 0.0, False) for _ in range(40)]
    task = ContextTask("t", "a", graphs, [f"g{number}" for number in range(40)])
    off = residuals_of(task, graphs, ([graph["op"].baseline.double().numpy() for graph in graphs], np.ones(40)))
    narrow, wide = HeteroData(), HeteroData()
    for graph, kind in ((wide, 0), (narrow, 1)):
        graph["op"].update(graphs[0]["op"].to_dict())
        graph["op"].key = torch.full((20,), kind)
    task = ContextTask("t", "a", [*graphs, narrow, wide], [*task.groups, "narrow", "wide"])
    found = Doubt(task, range(40), off).covered([40, 41], residuals_of(
        task, [narrow, wide], ([graphs[0]["op"].baseline.double().numpy()] * 2, np.ones(2))
    ))  # fmt: skip
    assert found.node_widths[0] < found.node_widths[1] / 5
    assert found.total_widths[0] < found.total_widths[1] / 5


def test_groups_count_alike() -> None:
    """Many scores of one group do not outweigh few of another; too few groups stretch the largest score."""
    scores, groups = np.array([1.0] * 98 + [5.0, 6.0]), ["many"] * 98 + ["few"] * 2
    assert pooled_quantile(scores, np.ones(100), groups, 0.5) == 5.0
    assert pooled_quantile(scores, np.ones(100), groups, 0.9) == pytest.approx(6.0 * 0.9 * 3 / 2)
