"""A computing host waits for the gradients that a hook sends: two at once, others queued, all before optimizers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.graph.program import PHASES, WHY_NUMBER, Dependency, Program
from stepsight.dataset.graph.rank_trace import Placement
from stepsight.dataset.traces.read_rank import read_rank
from stepsight.simulator.replay.changes import as_timed
from stepsight.simulator.replay.replay import replay
from tests.dataset.kineto_files import WORKER, KinetoFile

US = 1e-6
SENT = 400.0  # microseconds of each all-reduce
STEP = 1200.0


def hooked(steps: int = 2) -> KinetoFile:
    """Steps of a rank whose communication hook sends three gradients on two threads."""
    file = KinetoFile(0, 2)
    for step in range(steps):
        begin, first = step * STEP, 3 * step
        file.segment("step", begin, STEP - 1)
        file.segment("forward", begin + 5, 110)
        file.call("aten::gelu", begin + 10, 100, [4, 6])
        file.segment("backward", begin + 150, 924)
        for number, sent in enumerate((265.0, 375.0, 667.0)):  # the third waits for the first one's thread
            file.call("aten::gelu_backward", begin + 160 + 110 * number, 100, [4, 6], [4, 6])
            name = f"kind=all_reduce num_bytes=4096 ranks=0,1 group=dp seq={first + number} async=1"
            file.note(f"stepsight::collective {name}", begin + 262 + 110 * number, 2)
            file.note("gloo:all_reduce", begin + sent, SENT, thread=WORKER + number % 2)
        file.segment("optimizer", begin + 1075, 110)
        file.call("aten::_fused_adamw_", begin + 1080, 100, [[6, 8], [6]], [[6, 8], [6]])
    return file


@pytest.fixture
def graph(tmp_path: Path) -> Program:
    return read_rank(hooked().write(tmp_path / "rank0.json"), Placement(rank=0, dp=2))


def test_the_optimizer_waits_for_the_gradients_of_its_step(graph: Program) -> None:
    waits = graph.edge_columns["why"] == WHY_NUMBER[Dependency.SYNCHRONISATION]
    source, target = graph.edge_columns["source"][waits], graph.edge_columns["target"][waits]
    assert len(source) == 6 and (graph.columns["step"][source] == graph.columns["step"][target]).all()
    assert {graph.kind_of(node) for node in target.tolist()} == {"adamw"}
    assert replay([graph]).error_percent == pytest.approx(0.0, abs=0.1)


def test_gradients_lie_in_the_backward_pass(graph: Program) -> None:
    collectives = graph.columns["kind"] == 1
    assert [PHASES[phase] for phase in graph.columns["phase"][collectives]] == ["backward"] * 6


def test_a_faster_host_still_waits_for_its_gradients(graph: Program) -> None:
    """Two all-reduces follow each other on one thread, whatever the host does beside them."""
    (quick,) = as_timed([graph], 1e-6)
    assert 2 * SENT * US < replay([quick]).replayed_s < (STEP - 150.0) * US


def test_a_step_takes_what_it_took_without_a_profiler(graph: Program) -> None:
    wanted = 0.95 * replay([graph]).replayed_s
    paced = as_timed([graph], wanted)
    assert replay(paced).replayed_s == pytest.approx(wanted, rel=1e-3)
    sent = graph.columns["kind"] == 1
    assert np.array_equal(paced[0].duration_s[sent], graph.duration_s[sent])
    assert as_timed([graph], 1.0) == [graph]
