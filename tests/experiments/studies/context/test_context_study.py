"""The benchmark of context models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.imported.rank_graph import COLLECTIVE, NODE_COLUMNS, OP, RankGraph
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.experiments.studies.context import main, tuned_models
from stepsight.experiments.studies.context.benchmark import judge, models_of
from stepsight.experiments.studies.context.benchmark_report import outcome_text
from stepsight.experiments.studies.context.beside import Beside
from stepsight.experiments.studies.context.context_coverage import errors_of, residuals_of
from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.experiments.studies.context.more_families import FAMILIES
from stepsight.experiments.studies.context.neighbour_features import neighbour_features
from stepsight.experiments.studies.context.overlap_task import job_graphs
from stepsight.experiments.studies.context.region_families import Dice


def _graph(factor: float) -> HeteroData:
    """Two ops of kind 7, one after the other."""
    graph = HeteroData()
    graph["op"].x = torch.tensor([[1.0], [2.0]])
    graph["op"].baseline = graph["op"].roofline = torch.tensor([1.0, 3.0])
    graph["op"].key = torch.tensor([7, 7])
    graph["op"].seconds = factor * graph["op"].baseline
    graph["op"].weight = torch.tensor([0.25, 0.75])
    graph["op", "order", "op"].edge_index = torch.tensor([[0], [1]])
    graph["op", "order", "op"].edge_attr = torch.tensor([[5.0]])
    return graph


def _task() -> ContextTask:
    graphs, groups = [_graph(2.0) for _ in range(8)], [f"run{number // 2}" for number in range(8)]
    return ContextTask("made up", "for a test", graphs, groups, designs={"order": Design()})


def test_a_split_never_parts_a_group() -> None:
    """Every graph judges once, and no group both teaches and judges."""
    task = _task()
    folds = task.folds(3, seed=0)
    assert sorted(place for _, held in folds for place in held) == list(range(8))
    for taught, held in folds:
        assert not {task.groups[p] for p in taught} & {task.groups[p] for p in held}


def test_a_table_learns_a_factor_and_a_roofline_does_not() -> None:
    """Where all ops take twice their baseline, the table is right and the roofline off by log 2."""
    outcome = judge(_task(), seeds=1, only=("roofline", "table"), variants=False)
    error = {row.model: row.error for row in outcome.rows}
    assert error["roofline"] == pytest.approx(np.log(2))
    assert error["table by kind and phase"] == pytest.approx(0, abs=1e-6)
    assert not outcome.won  # there is no network among these models
    for row in outcome.rows:
        assert row.coverage == row.node_coverage == 1.0  # all groups are alike
    assert "table by kind and phase" in outcome_text(outcome)


def test_a_network_of_the_table_answers_every_node() -> None:
    """A design of the task trains and answers, and its error is finite."""
    task = _task()
    _, designs, variants = models_of(task)
    assert not variants  # one relation, and no labels of graphs
    answers = designs["GNN: order"](task, task.graphs[:4], 0)(task.graphs[4:])
    off = residuals_of(task, task.graphs[4:], answers)
    assert np.isfinite(errors_of(task, task.graphs[4:], off)[0]).all()


def test_trials_choose_the_settings_of_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial is a run of MLflow with its settings and its error on groups that were held back."""
    runs: list[dict[str, float]] = []

    class Run:
        def log(self, params: dict[str, float], metrics: dict[str, float], tags: dict[str, str]) -> None:
            runs.append({**params, **metrics})

    @contextmanager
    def tracked(uri: str, name: str) -> Iterator[Run]:
        yield Run()

    monkeypatch.setattr(tuned_models, "tracked", tracked)
    task = replace(_task(), epochs=2)
    answer = tuned_models.tuned(Design(), 2, "")(task, task.graphs[:6], 0)
    assert len(runs) == 2
    assert runs[0]["epochs"] == 2 and runs[0]["error_percent"] > 0
    assert len(answer(task.graphs[6:])[0]) == 2


def test_neighbours_are_told_by_hand_made_features() -> None:
    """A node sees the number of its edges, and what its neighbour and the edge between tell."""
    found = neighbour_features(_graph(1.0), "op")
    own, degree_in, mean_in = found[1, :2], found[1, 2], found[1, 3:6]
    assert own.tolist() == [2.0, pytest.approx(np.log(3))]
    assert degree_in == 1
    assert mean_in.tolist() == [5.0, 1.0, 0.0]
    assert not found[0, 2:9].any()


def _rank(spans: list[tuple[int, int, float, float]]) -> RankGraph:
    """A rank with nodes ``(kind, stream, start, seconds)``; all ops are one signature."""
    columns = {name: np.zeros(len(spans), dtype=np.int64) for name in NODE_COLUMNS}
    columns["kind"] = np.array([span[0] for span in spans])
    columns["stream"] = np.array([span[1] for span in spans])
    columns["work"] = np.array([0 if span[0] == OP else 1 for span in spans])
    start, seconds = np.array([span[2] for span in spans]), np.array([span[3] for span in spans])
    works = (Op("linear", (64, 64, 64), "fp32"), Collective("all_reduce", 1 << 20, 2, 2))
    edges = {name: np.zeros(0, dtype=np.int64) for name in ("source", "target", "why")}
    return RankGraph(
        0, 2, "cuda", "GPU", 0.0, start, seconds, columns, edges, np.zeros(0), ("compute", "comm"), ("k",), works
    )  # fmt: skip


_SPANS = [(OP, 0, 0.0, 1e-3), (OP, 0, 2e-3, 1e-3), (COLLECTIVE, 1, 4e-3, 5e-3), (OP, 0, 5e-3, 1.5e-3)]


def test_shares_say_how_long_a_kernel_runs_beside_others() -> None:
    """A kernel within a collective runs beside it for all of its time."""
    rank = _rank(_SPANS)
    beside = Beside.of(rank, rank.duration_s)
    assert beside.share[3].tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert beside.pairs.tolist() == [[2], [3]]
    assert not beside.share[:2].any()


def test_a_slowdown_is_judged_against_the_time_alone() -> None:
    """The graph holds the overlapped kernel with its time alone, and its features do not tell its time."""
    (graph,) = job_graphs([_rank(_SPANS)])
    judged = torch.isfinite(graph["op"].seconds)
    assert judged.sum() == 1
    assert graph["op"].baseline[judged].item() == pytest.approx(1e-3)
    assert graph["op"].seconds[judged].item() == pytest.approx(1.5e-3)
    (slower,) = job_graphs([_rank([*_SPANS[:3], (OP, 0, 5e-3, 3e-3)])])
    assert torch.equal(slower["op"].x, graph["op"].x)
    kind = ("other", "beside", "op")
    assert torch.equal(slower[kind].edge_attr, graph[kind].edge_attr)


@pytest.mark.parametrize("family", ["gated", "state_space", "layouts"])
def test_a_draw_is_the_same_again(family: str) -> None:
    """The seed decides what is compiled and on what."""
    first, again = (FAMILIES[family](Dice(f"{family} 3")) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.inputs, again.inputs, strict=True))


def test_missing_data_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without data the command says which folder must hold what."""
    assert main(["--data", str(tmp_path)]) == 2
    assert "must hold a folder for a task" in capsys.readouterr().err
    with pytest.raises(TraceError, match="groups"):
        ContextTask("t", "a", [_graph(1.0)], ["one"]).folds(3, 0)
