"""The benchmark of context models: what is held out teaches nothing, and a rule that a model can learn is found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Dependency, Node, Program
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies import context
from stepsight.experiments.studies.context import Split, Task
from stepsight.features.node_features import RELATIONS, SegmentGraph
from stepsight.training.context.fit_context import Example, Measured

NAMES = tuple(f"run{number}" for number in range(4))
WORKS = (Op("linear", (64, 64, 64), "fp32"), Op("add", (4096,), "fp32"))


def _example(run: str, order: Sequence[int]) -> Example:
    """Products take twice their time alone after an addition, additions half of it."""
    program = Program(tuple(Node(WORKS[each]) for each in order), ((0, 2, Dependency.DATA),), "forward")
    alone = np.array([1e-3, 1e-4])[list(order)]
    inside = alone * np.array([2.0, 0.5])[list(order)]
    return Example(SegmentGraph(program, HARDWARE["local-cpu"], 1), alone, inside, run)


@pytest.fixture
def task() -> Task:
    examples = {name: [_example(name, order) for order in ((0, 1, 0, 1), (1, 0, 1))] for name in NAMES}

    def split(held: frozenset[str]) -> Split:
        teach: list[Measured] = [(own, []) for name, own in examples.items() if name not in held]
        return Split(teach, teach, {name: examples[name] for name in held})

    return Task("made", "products and additions", NAMES, split)


@pytest.mark.parametrize(("teach", "judged"), [(0, 4), (3, 1)])
def test_what_a_table_can_learn_is_learned_on_runs_that_are_held_out(task: Task, teach: int, judged: int) -> None:
    """Errors are in parts of those of the regressors alone, whose own is 1."""
    outcome = context.judge(task, seeds=1, folds=2, teach=teach)
    rows = {row["model"]: row for row in outcome["rows"]}
    assert set(rows) == {*context.FORMS, context.AUTO, *context.TREES} and outcome["groups"] == judged
    assert rows["none"]["score"] == pytest.approx(1.0)
    assert max(rows[form]["score"] for form in ("table", "features", "graph", "auto")) < 0.2
    assert rows["auto"]["behind"] == 0.0 and "made" in context.outcome_text(outcome)


def test_kinds_of_edges_are_left_out_one_by_one(task: Task) -> None:
    """Networks are compared with the network that hears every kind of edge, and trees with such trees."""
    outcome = context.judge(task, seeds=1, folds=2, teach=3, edges=True)
    rows = {row["model"]: row for row in outcome["rows"]}
    kinds = [context.EVERY, *(f"without {relation}" for relation in RELATIONS), "none"]
    assert set(rows) == {"none", *(f"{family}, {kind}" for family in ("network", "trees") for kind in kinds)}
    assert rows["none"]["behind"] is None and rows["network, every edge"]["behind"] == 0.0
    assert rows["trees, none"]["behind"] == pytest.approx(
        rows["trees, none"]["score"] - rows["trees, every edge"]["score"]
    )
    assert "behind every edge" in context.outcome_text(outcome)


def test_features_of_neighbours_come_from_both_sides() -> None:
    """Columns by relation and direction follow a node's own ones; without them, rows are the network's features."""
    example = _example("a", (0, 1, 0))
    own, more = (context.rows_of(example.graph, example.alone, relations) for relations in ((), RELATIONS))
    assert np.array_equal(more[:, : own.shape[1]], own)
    before, after = more[:, own.shape[1]], more[:, 2 * own.shape[1] + 1]
    assert before.tolist() == [0.0, 1.0, 1.0] and after.tolist() == [1.0, 1.0, 0.0]


def test_runs_of_one_name_are_held_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two collections of a script teach together, or judge together; none is lost."""
    runs = [SimpleNamespace(name=name) for name in ("a", "b", "a")]
    measured = [([_example(run.name, (0, 1, 0))], []) for run in runs]
    monkeypatch.setattr(context, "_collections", lambda folder: [folder])
    monkeypatch.setattr(context, "_regressors", lambda folders: (SimpleNamespace(left_out=None), runs))
    monkeypatch.setattr(context.fit_context, "measured_runs", lambda runs, predictor: measured)
    task = context.runs_task(Path())
    assert task.names == ["a", "b"]
    for held, teach, judged in (("a", 1, 2), ("b", 2, 1)):
        split = task.split(frozenset({held}))
        assert (len(split.seen), len(split.unseen)) == (teach, teach)
        assert {name: len(examples) for name, examples in split.judged.items()} == {held: judged}


def test_collections_of_events_alone_count(tmp_path: Path) -> None:
    """Small-to-large keeps what was measured alone in folders of their own."""
    for name, within in (("events-2x1", "events"), ("2x1", "runs"), ("notes", "texts")):
        (tmp_path / name / within).mkdir(parents=True)
    (tmp_path / "events-2x1" / "plan.json").write_text("{}")
    assert [path.name for path in context._collections(tmp_path)] == ["2x1", "events-2x1"]


def test_a_folder_without_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A task needs at least two groups, and ``--data`` a task's folder."""
    assert context.STUDY.main(["--data", str(tmp_path)]) == 2
    assert "runs, cluster" in capsys.readouterr().err
    single = Task("one", "", ["a"], lambda held: Split([], [], {}))
    with pytest.raises(TraceError, match="at least 2 groups"):
        context.judge(single, 1, 2)
