"""A part that breaks a contract fails it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.dataset.graph.rank_trace import RankTrace
from stepsight.dataset.hardware.hardware import find_fabric, find_hardware
from stepsight.dataset.tables.measurements import Measurements
from stepsight.dataset.traces.read_rank import read_kineto
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.testing import LatencyModelContract, TableReaderContract, TraceReaderContract
from tests.dataset.kineto_files import tiny_step


def test_a_latency_model_whose_answers_depend_on_the_batch_fails() -> None:
    class Batchwise(RooflineLatency):
        def op_seconds(self, ops):  # type: ignore[no-untyped-def]
            return super().op_seconds(ops) * len(ops)

    hardware = find_hardware("a100-sxm-80gb")
    assert hardware is not None
    model = Batchwise(hardware, find_fabric("dgx-a100"))
    LatencyModelContract().test_states_its_hardware(model)
    with pytest.raises(AssertionError):
        LatencyModelContract().test_a_batch_is_its_parts(model)


def test_a_trace_reader_that_loses_time_fails(tmp_path: Path) -> None:
    class Reads(TraceReaderContract):
        def sample(self, folder: Path) -> Path:
            path = folder / "trace.json.gz"
            tiny_step(0, 2).write(path)
            return path

        def read(self, path: Path) -> RankTrace:
            return read_kineto(path)

    class Loses(Reads):
        def read(self, path: Path) -> RankTrace:
            trace = super().read(path)
            trace.slot_s[:] /= 2
            return trace

    Reads().test_slots_fill_their_segment(Reads().read(Reads().sample(tmp_path)))
    with pytest.raises(AssertionError):
        Loses().test_slots_fill_their_segment(Loses().read(Loses().sample(tmp_path)))


def test_a_table_faster_than_its_device_fails(tmp_path: Path) -> None:
    class Table(TableReaderContract):
        format, place = "csv", "own.csv"
        text = "device,op,dims,dtype,microseconds\na100-sxm-80gb,linear,4096x4096x4096,bf16,10\n"

    table: Measurements = Table().read(tmp_path)
    assert table.seconds == pytest.approx([1e-5])
    with pytest.raises(AssertionError):
        Table().test_no_op_is_faster_than_its_device(table)
