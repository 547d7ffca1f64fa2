"""The contracts of latency and context models: what the simulator asks for durations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepsight.dataset.graph.program import Program, ProgramBuilder
from stepsight.dataset.hardware.hardware import FABRICS, Hardware
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.training.predictor.predictor import Predictor

OPS = (
    Op("linear", (64, 128, 256), "fp32"),
    Op("linear_wgrad", (512, 128, 256), "fp32"),
    Op("layer_norm", (64, 256), "fp32"),
    Op("add", (65536,), "fp32"),
    Op("attention", (2, 4, 4, 64, 64, 32, 1), "fp32"),
    Op("adamw", (100_000, 12), "fp32"),
)
COLLECTIVES = (
    Collective("all_reduce", 2**20, 2, 2),
    Collective("all_gather", 2**16, 2, 2),
    Collective("reduce_scatter", 2**24, 4, 2),
    Collective("send_recv", 2**18, 2, 1),
)


def small_program() -> Program:
    """Return a program of three ops, and a collective that overlaps with one of them."""
    builder = ProgramBuilder("backward")
    first = builder.add(OPS[0])
    sent = builder.add(COLLECTIVES[0], "dp", after=[first])
    builder.add(OPS[1], after=[first])
    builder.add(OPS[3], after=[sent])
    return builder.build()


def _alone(work: Op | Collective) -> Program:
    """Return a program of one op or collective."""
    builder = ProgramBuilder("forward")
    builder.add(work)
    return builder.build()


class LatencyModelContract:
    """Tests that every ``LatencyModel`` passes: the one that the fixture ``latency`` returns."""

    def test_states_its_hardware(self, latency: LatencyModel) -> None:
        assert isinstance(latency.hardware, Hardware)

    def test_seconds_are_positive_and_finite(self, latency: LatencyModel) -> None:
        for seconds, works in ((latency.op_seconds(OPS), OPS), (latency.collective_seconds(COLLECTIVES), COLLECTIVES)):
            assert seconds.shape == (len(works),) and seconds.dtype == np.float64
            assert (np.isfinite(seconds) & (seconds > 0)).all()

    def test_a_batch_is_its_parts(self, latency: LatencyModel) -> None:
        """One call for all, or a call for each in any order, gives the same seconds."""
        apart = np.concatenate([latency.op_seconds([op]) for op in OPS[::-1]])
        assert latency.op_seconds(OPS)[::-1] == pytest.approx(apart)
        apart = np.concatenate([latency.collective_seconds([work]) for work in COLLECTIVES])
        assert latency.collective_seconds(COLLECTIVES) == pytest.approx(apart)

    def test_asking_twice_gives_the_same(self, latency: LatencyModel) -> None:
        assert np.array_equal(latency.op_seconds(OPS), latency.op_seconds(OPS))

    def test_nothing_takes_no_time_to_ask(self, latency: LatencyModel) -> None:
        assert latency.op_seconds([]).shape == latency.collective_seconds([]).shape == (0,)

    def test_more_bytes_never_take_less(self, latency: LatencyModel) -> None:
        sizes = [Collective("all_reduce", 2**power, 2, 2) for power in range(10, 28, 2)]
        assert (np.diff(latency.collective_seconds(sizes)) >= -1e-12).all()

    def test_context_keeps_shapes_and_stays_positive(self, latency: LatencyModel) -> None:
        program = small_program()
        alone = [np.full(len(program), 1e-3), np.full(1, 2e-3)]
        inside = latency.in_context([program, _alone(OPS[0])], alone)
        assert [part.shape for part in inside] == [part.shape for part in alone]
        assert all((np.isfinite(part) & (part > 0)).all() for part in inside)


class ContextModelContract:
    """Tests that every context model passes: ``model(graph, alone) -> seconds``, a function or a ``torch.nn.Module``,
    which the fixture ``model`` returns.
    """

    @pytest.fixture
    def latency(self, model: Any) -> LatencyModel:
        return Predictor.load("a100-sxm").with_context(model).latency_on(FABRICS["dgx-a100"], 8, 8)

    def test_every_node_of_every_segment_gets_seconds(self, latency: LatencyModel) -> None:
        for program in (small_program(), _alone(OPS[0]), _alone(COLLECTIVES[0])):
            (inside,) = latency.in_context([program], [np.full(len(program), 1e-3)])
            assert inside.shape == (len(program),) and (np.isfinite(inside) & (inside > 0)).all()

    def test_asking_twice_gives_the_same(self, model: Any, latency: LatencyModel) -> None:
        program, alone = small_program(), np.full(4, 1e-3)
        again = Predictor.load("a100-sxm").with_context(model).latency_on(FABRICS["dgx-a100"], 8, 8)
        assert np.array_equal(latency.in_context([program], [alone])[0], again.in_context([program], [alone])[0])

    def test_the_seconds_alone_stay_as_they_are(self, latency: LatencyModel) -> None:
        alone = np.full(4, 1e-3)
        latency.in_context([small_program()], [alone])
        assert (alone == 1e-3).all()
