"""Replay of traced steps: equal to what was measured, from durations and dependencies alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import COLLECTIVE, Program
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.simulator.replay.replay import replay
from tests.dataset.traced_jobs import PRODUCT, GpuJob, two_ranks


def graphs_of(tmp_path: Path, ranks: int = 2) -> list[Program]:
    files = two_ranks() if ranks == 2 else [GpuJob().step(1).step(2).file]
    return list(import_ranks([file.write(tmp_path / f"{place}.json") for place, file in enumerate(files)]).graphs)


def faster(graph: Program, name: str, factor: float) -> Program:
    chosen = graph.columns["name"] == graph.names.index(name)
    return graph.replace(duration_s=np.where(chosen, graph.duration_s / factor, graph.duration_s))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replay_equals_the_measured_step(tmp_path: Path, ranks: int) -> None:
    told = replay(graphs_of(tmp_path, ranks))
    assert abs(told.error_percent) < 0.5
    assert told.unexplained_percent < 1
    assert all(abs(stream.error_percent) < 1 for stream in told.streams)
    assert len(told.ranks) == ranks and told.steps == 2


def test_a_replay_uses_no_recorded_start(tmp_path: Path) -> None:
    """Starts that are not those of the roots may be anything."""
    graphs = graphs_of(tmp_path, 1)
    graph = graphs[0]
    rooted = np.ones(len(graph), dtype=bool)
    rooted[graph.edge_columns["target"]] = False
    marks = graph.columns["name"] == graph.names.index("step")
    moved = graph.replace(start_s=np.where(rooted | marks, graph.start_s, graph.start_s + 1.0))
    assert replay([moved]).replayed_s == pytest.approx(replay(graphs).replayed_s)


def test_faster_products_shorten_the_step_by_what_they_took(tmp_path: Path) -> None:
    graph = graphs_of(tmp_path, 1)[0]
    before, after = replay([graph]).replayed_s, replay([faster(graph, PRODUCT, 2.0)]).replayed_s
    assert before - after == pytest.approx((400 + 800) / 2 * 1e-6, rel=0.05)  # 1200 us of products on the device


def test_the_fast_rank_waits_for_the_slow_one(tmp_path: Path) -> None:
    """Making the slow rank's products faster makes both ranks faster: the all-reduce joins them."""
    graphs = graphs_of(tmp_path)
    before, after = replay(graphs), replay([graphs[0], faster(graphs[1], PRODUCT, 2.0)])
    assert [rank.replayed_s for rank in after.ranks] < [rank.replayed_s - 500e-6 for rank in before.ranks]
    alone = replay([graphs[0]])
    assert alone.replayed_s == pytest.approx(alone.measured_s, rel=0.005)


def test_a_collective_takes_its_own_time_once_all_are_there(tmp_path: Path) -> None:
    """The fast rank's all-reduce lasts longer by the wait; its stream is as busy as measured."""
    graphs = graphs_of(tmp_path)
    lengths = [graph.duration_s[graph.columns["kind"] == COLLECTIVE].mean() for graph in graphs]
    assert lengths[0] > lengths[1] + 1e-3
    streams = {(each.rank, each.stream): each for each in replay(graphs).streams}
    assert streams[0, "stream20"].replayed_busy_s == pytest.approx(2 * lengths[0], rel=0.02)


def test_a_trace_without_a_step_is_refused(tmp_path: Path) -> None:
    graph = graphs_of(tmp_path, 1)[0].replace(steps_s=np.zeros((0, 2)))
    with pytest.raises(TraceError, match="at least one traced step"):
        replay([graph])
