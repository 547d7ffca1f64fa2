"""Formulas of overlap, and steps replayed with predicted times of kernels or of the host."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.imported.import_ranks import import_ranks
from stepsight.dataset.imported.rank_graph import RankGraph
from stepsight.experiments.studies.context import main
from stepsight.experiments.studies.context.gaps import GapJob, HostCalls, KeyMeans, host_calls, modelled
from stepsight.experiments.studies.context.overlap_formulas import fit_constants
from stepsight.simulator.replay.replay import replay
from tests.dataset.traced_jobs import GpuJob


@pytest.fixture
def rank(tmp_path: Path) -> RankGraph:
    return import_ranks([GpuJob().step(1).step(2).file.write(tmp_path / "t.json")]).graphs[0]


def test_constants_of_a_formula_are_found() -> None:
    """Kernels that lose half of the held part of their time, and 5 microseconds, teach both."""
    alone = np.geomspace(5e-6, 1e-3, 40)
    rows = np.stack([0.2 * alone, np.full(40, 1e-5)], axis=1)
    constants = fit_constants(alone, rows, alone + rows @ np.array([0.5, 0.5]), np.ones(40))
    assert constants == pytest.approx([0.5, 0.5], rel=0.05)


def test_kernels_that_lose_nothing_teach_no_negative_constant() -> None:
    alone = np.geomspace(5e-6, 1e-3, 40)
    assert not fit_constants(alone, 0.2 * alone[:, None], 0.9 * alone, np.ones(40)).any()


def test_a_step_with_the_traced_host_is_the_traced_step(rank: RankGraph) -> None:
    calls = host_calls(rank)
    job = GapJob("one", [rank], [calls])
    assert set(calls.half.tolist()) == {0, 1}
    assert modelled(job, [calls.spent_s]) == pytest.approx(replay([rank]).replayed_s)
    assert modelled(job, [5 * calls.spent_s]) > modelled(job, [calls.spent_s])


def test_a_stall_stays_as_traced_and_teaches_nothing(rank: RankGraph) -> None:
    """A call that comes a second late is no launch that takes a second."""
    edge = host_calls(rank).edges[-2]
    delay = rank.delay_s.copy()
    delay[edge] = 1.0
    late = host_calls(replace(rank, delay_s=delay))
    assert late.stall.sum() == 1 and late.stall[-2, 0]
    told = KeyMeans([(late, np.ones(len(late.edges), dtype=np.bool_), 1.0)]).seconds(late)
    assert told.max() < 1e-3
    stalled = GapJob("one", [replace(rank, delay_s=delay)], [late])
    assert modelled(stalled, [np.zeros_like(late.spent_s)]) > 0.4  # of two steps


def test_rare_keys_lean_on_the_general_one() -> None:
    """Of a kind that was seen once, the mean is mostly that of all launches."""
    keys = [("launch", "add", "add first")] * 9 + [("launch", "mul", "mul first")]
    spent = np.array([[1e-5, 0.0]] * 9 + [[9e-5, 0.0]])
    nothing = np.zeros((10, 2), dtype=np.bool_)
    calls = HostCalls(np.arange(10), np.arange(10), keys, spent, nothing, np.zeros(10, dtype=np.int64))
    told = KeyMeans([(calls, np.ones(10, dtype=np.bool_), 1.0)]).seconds(calls)[:, 0]
    assert told[0] == pytest.approx(1e-5, rel=0.1)
    assert 2e-5 < told[9] < 6e-5


def test_the_command_judges_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Jobs with equal hosts tell each other's; a step without its host is too short."""
    for name in ("a", "b", "c"):
        GpuJob().step(1).step(2).file.write(tmp_path / "gaps" / name / "rank0.json")
    assert main(["--task", "gaps", "--data", str(tmp_path), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    error = {row["model"]: row["error_percent"] for row in table["rows"]}
    assert error["by kind of op, other jobs"] < 3 and error["by kind of op, half of this job"] < 3
    assert main(["--task", "overlap-steps", "--data", str(tmp_path)]) == 2
