"""Examples of parts of one's own run, and the parts keep their contracts."""

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset import TraceGraphs
from stepsight.dataset.trace_graphs.graph_dataset import make_dataset
from stepsight.registries import FABRICS, HARDWARE, OP_KINDS, GivenLatency, OpKind, ScheduleKind
from stepsight.testing import ContextModelContract, LatencyModelContract, OpKindContract, ScheduleContract
from tests.dataset.trace_graphs.test_trace_graphs import collection

EXAMPLES = Path(__file__).parents[2] / "examples"
SCHEDULE = runpy.run_path(str(EXAMPLES / "own_schedule.py"))
LATENCY = runpy.run_path(str(EXAMPLES / "own_latency.py"))
CONTEXT = runpy.run_path(str(EXAMPLES / "own_context.py"))
OP_KIND = runpy.run_path(str(EXAMPLES / "own_op_kind.py"))


class TestOwnSchedule(ScheduleContract):
    @pytest.fixture
    def kind(self) -> ScheduleKind:
        return ScheduleKind(SCHEDULE["eager_1f1b"])

    def most_in_flight(self, num_stages: int, num_micro_batches: int, virtual_stages: int) -> int:
        return min(2 * num_stages - 1, num_micro_batches)


class TestOwnOpKinds(OpKindContract):
    @pytest.fixture(params=["SHORT_CONV", "SHORT_CONV_BACKWARD"])
    def kind(self, request: pytest.FixtureRequest) -> Iterator[OpKind]:
        with OP_KINDS.registered("short_conv", OP_KIND["SHORT_CONV"]):  # the base of the other one
            yield OP_KIND[request.param]


class TestOwnLatency(LatencyModelContract):
    @pytest.fixture
    def latency(self) -> GivenLatency:
        hardware, fabric = HARDWARE["a100-sxm-80gb"], FABRICS["dgx-a100"]
        return GivenLatency(LATENCY["vendor_table"](hardware, fabric), hardware, fabric)


class TestOwnContext(ContextModelContract):
    """Trained on two ranks and three single steps."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Any:
        make_dataset([collection(tmp_path)], tmp_path / "data")
        return CONTEXT["fit"](TraceGraphs(tmp_path / "data", scope="segment"), epochs=2)


def test_the_context_model_answers_as_it_was_trained(tmp_path: Path) -> None:
    """No layer depends on the other nodes of a batch: a normalisation over one graph would answer otherwise."""
    make_dataset([collection(tmp_path)], tmp_path / "data")
    graphs = TraceGraphs(tmp_path / "data", scope="segment")
    model = CONTEXT["fit"](graphs, epochs=2)
    for graph in graphs:
        answers = [own.log_factor(graph) for own in (model.eval(), model.train())]
        assert answers[0].equal(answers[1])


def printed_ms(example: str) -> list[float]:
    """The times that an example prints, one a line."""
    found = subprocess.run(
        [sys.executable, EXAMPLES / example], check=True, capture_output=True, text=True, timeout=120
    )
    return [float(line.split()[-2]) for line in found.stdout.splitlines()]


def test_the_schedule_hides_messages() -> None:
    ours, usual = printed_ms("own_schedule.py")
    assert 0 < ours < usual


def test_the_op_takes_time() -> None:
    ours, usual = printed_ms("own_op_kind.py")
    assert 0 < usual < ours < 1.2 * usual


def test_the_block_saves_collectives() -> None:
    """Attention and MLP side by side need one all-reduce where they need two one after the other."""
    ours, usual = printed_ms("own_block.py")
    assert 0 < ours < usual
