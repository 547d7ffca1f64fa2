"""Ops of two ranks beside each other: overlap, tables, and replays that find it themselves."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.imported.rank_graph import (
    COLLECTIVE,
    EDGE_COLUMNS,
    HOST,
    NODE_COLUMNS,
    OP,
    WHY_NUMBER,
    RankGraph,
)
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.experiments.studies.context import main, network_models
from stepsight.experiments.studies.context.beside import overlapping
from stepsight.experiments.studies.context.edgeless_models import given
from stepsight.experiments.studies.context.overlap_table import neighbour_table, nonnegative_medians
from stepsight.experiments.studies.context.pair_runs import PairRun, spans_of
from stepsight.experiments.studies.context.pair_steps import replayed_ranks, step_error
from stepsight.experiments.studies.context.pairs_task import task_of_pairs
from stepsight.experiments.studies.pairs.pair_jobs import JOBS
from stepsight.gnn import concurrency_network

ALONE_S, LOST = 1e-3, 0.5


def test_overlaps_are_told_in_both_directions() -> None:
    """Spans of one lane never overlap, those of two lanes do for as long as both run."""
    start, end = np.array([0.0, 2.0, 1.0]), np.array([2.0, 4.0, 3.0])
    pairs, both = overlapping(start, end, np.array([0, 0, 1]))
    assert sorted(zip(*pairs.tolist(), both.tolist(), strict=True)) == [
        (0, 2, 1.0), (1, 2, 1.0), (2, 0, 1.0), (2, 1, 1.0)
    ]  # fmt: skip


def test_constants_of_a_table_are_found_and_never_negative() -> None:
    rows = np.random.default_rng(0).random((200, 3))
    found = nonnegative_medians(rows, rows @ np.array([0.5, 0.0, 1.0]), np.ones(200))
    assert found == pytest.approx([0.5, 0.0, 1.0], abs=0.01)
    assert not nonnegative_medians(rows, -rows[:, 0], np.ones(200)).any()


def _rank(rank: int, slowdown: float) -> RankGraph:
    """Two ops, one after the other, and a sum of both ranks at the end; host calls mark two steps."""
    kinds, starts, spent, steps = [HOST], [0.0], [0.0], [0]
    now = 0.0
    for step in (0, 1):
        for kind in (OP, OP, COLLECTIVE):
            kinds.append(kind)
            starts.append(now)
            spent.append(ALONE_S * slowdown if kind == OP else ALONE_S)
            steps.append(step)
            now += spent[-1]
        kinds.append(HOST)
        starts.append(now)
        spent.append(0.0)
        steps.append(step)
    columns = {name: np.full(len(kinds), -1, dtype=np.int64) for name in NODE_COLUMNS}
    columns |= {"kind": np.array(kinds), "step": np.array(steps), "stream": np.zeros(len(kinds), dtype=np.int64)}
    columns["name"] = (np.array(kinds) != HOST).astype(np.int64)
    columns["work"] = np.array([{OP: 0, COLLECTIVE: 1, HOST: -1}[kind] for kind in kinds])
    is_sum = columns["kind"] == COLLECTIVE
    columns["group"], columns["seq"] = np.where(is_sum, 0, -1), np.where(is_sum, np.cumsum(is_sum) - 1, -1)
    order = np.arange(len(kinds) - 1)
    edges = dict(
        zip(EDGE_COLUMNS, (order, order + 1, np.full(len(order), WHY_NUMBER[Dependency.HOST_ORDER])), strict=True)
    )
    works = (Op("linear", (64, 64, 64), "fp32"), Collective("all_reduce", 1 << 20, 2, 2))
    marks = [start for start, kind in zip(starts, kinds, strict=True) if kind == HOST]
    return RankGraph(
        rank, 2, "cpu", "cpu", 0.0, np.array(starts), np.array(spent), columns, edges, np.zeros(len(order)),
        ("compute",), ("step", "call"), works, groups=(("dp", (0, 1)),),
        steps_s=np.array(list(pairwise(marks))), unrecorded_s=np.zeros(len(kinds)),
    )  # fmt: skip


def _run(job: str = "a", slowdown: float = 1.0 + LOST) -> PairRun:
    ranks = (_rank(0, slowdown), _rank(1, slowdown))
    alone = np.where(ranks[0].nodes["kind"] == OP, ALONE_S, np.nan)
    keys = tuple(
        (("call" if kind == OP else "all_reduce", None, number % 4) if kind != HOST else None)
        for number, kind in enumerate(ranks[0].nodes["kind"].tolist())
    )
    return PairRun(job, ranks, (keys, keys), (alone, alone), (0,), 0.0)


def test_ops_of_both_ranks_overlap_and_sums_follow_the_last_rank() -> None:
    """Each op runs beside one of the other rank, as long as it would take alone."""
    spans = spans_of(_run(), 0)
    assert spans.is_op.sum() == 4
    assert spans.both_s.sum() == pytest.approx(4 * ALONE_S)
    assert spans.spent_s[~spans.is_op] == pytest.approx([ALONE_S, ALONE_S])


def test_a_table_tells_the_step_from_time_alone() -> None:
    """Jobs that lose half of the shared time teach the step of another one, whose overlap the replay finds."""
    task = task_of_pairs([_run(job) for job in "abcd"], Path("x"))
    assert np.isfinite(task.graphs[0]["op"].seconds.numpy()).sum() == 4
    run = _run("e")
    assert step_error(run, given("baseline")(task, task.graphs, 0)) == pytest.approx(-25.0, abs=0.1)
    ask = neighbour_table(task, task.graphs, 0)
    assert step_error(run, ask) == pytest.approx(0.0, abs=0.5)
    is_op = (run.ranks[1].nodes["kind"] == OP) & (run.ranks[1].nodes["step"] == 0)
    assert replayed_ranks(run, ask)[1].duration_s[is_op] == pytest.approx([1.5e-3, 1.5e-3], rel=0.01)


def test_measured_time_is_no_feature() -> None:
    """Slower ops have the same features: overlap is found from times alone."""
    fast, slow = (task_of_pairs([_run("a", s)], Path("x")).graphs[0] for s in (1.5, 1.5001))
    assert torch.allclose(fast["op"].x[:, :-1], slow["op"].x[:, :-1], atol=1e-3)


def test_every_way_of_the_network_is_judged() -> None:
    assert network_models.WAYS == concurrency_network.WAYS


def test_pairs_need_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs").mkdir()
    assert main(["--task", "pairs", "--data", str(tmp_path)]) == 2
    assert "--collect" in capsys.readouterr().err
    with pytest.raises(TraceError, match="beside others"):
        task_of_pairs([], tmp_path)


def test_at_least_twelve_jobs_of_both_kinds() -> None:
    assert len(JOBS) >= 12 and {job.wrap for job in JOBS.values()} == {"ddp", "fsdp"}
    model, loss_of = JOBS["deep-ddp"].make()
    assert torch.isfinite(loss_of()) and json.dumps(len(JOBS["deep-ddp"].optimizer(model).param_groups))
