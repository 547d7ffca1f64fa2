"""Event files are what the harness writes, or one line that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.box_spec import read_box
from stepsight.dataset.runs.event_file import read_event_file
from tests.dataset.run_folders import write_events

OP = {"kind": "add", "dims": [8], "dtype": "fp32"}
COLLECTIVE = {"kind": "all_reduce", "num_bytes": 8, "group_size": 2, "ranks_per_node": 2}


def test_what_was_measured(tmp_path: Path) -> None:
    facts = {"memory_bytes": 8, "peak_flops": {"fp32": 1e9}, "a_later_fact": "x"}
    file = read_event_file(write_events(tmp_path, busy=2, hardware=facts))
    assert file.works == (Op("linear", (4, 6, 8), "fp32"), Collective("all_reduce", 96, 2, 2))
    assert (file.seconds, file.busy) == ((2e-6, 5e-5), 2)
    assert file.hardware == {"memory_bytes": 8.0, "peak_flops": {"fp32": 1e9}}


def test_events_of_a_box_say_which(tmp_path: Path) -> None:
    box = read_box("2x2@200mbit")
    assert read_event_file(write_events(tmp_path, box=box.to_dict(), world_size=4)).box == box
    assert read_event_file(write_events(tmp_path, "outside")).box is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": 3}, "schema = 1, got 3"),
        ({"busy": 0}, "busy must be >= 1, got 0"),
        ({"busy": True}, "busy must be a whole number, got True"),
        ({"records": None}, "records must be a list, got None"),
        ({"records": [3]}, "a record must be a table, got 3"),
        ({"records": [{"seconds": 1.0}]}, "no 'collective'"),
        ({"records": [{"op": OP}]}, "seconds must be a number within +-1e+30, got None"),
        ({"records": [{"op": OP, "seconds": 0}]}, "seconds must be > 0, got 0"),
        ({"records": [{"op": OP, "seconds": float("inf")}]}, "finite, got Infinity"),
        ({"records": [{"op": OP, "seconds": 10**400}]}, "seconds must be a number"),
        ({"records": [{"op": {**OP, "dims": ["8"]}, "seconds": 1}]}, "dims must be a whole number, got '8'"),
        ({"records": [{"op": {**OP, "dims": [2**60]}, "seconds": 1}]}, "dims must lie within"),
        ({"records": [{"op": {**OP, "dtype": []}, "seconds": 1}]}, "must be an event profile"),
        ({"records": [{"collective": {**COLLECTIVE, "num_bytes": "8"}, "seconds": 1}]}, "num_bytes must be a whole"),
        ({"records": [{"collective": {**COLLECTIVE, "colour": 8}, "seconds": 1}]}, "colour"),
        ({"hardware": {"peak_flops": "x"}}, "peak_flops must be a table, got 'x'"),
        ({"hardware": {"peak_flops": {"fp32": "x"}}}, "peak_flops.fp32 must be a number within +-1e+30, got 'x'"),
        ({"hardware": {"memory_bytes": 0}}, "memory_bytes must lie within 1 and 1e+18, got 0"),
        ({"hardware": {"comm_compute_share": 2}}, "comm_compute_share must lie within 0 and 1, got 2"),
        ({"busy": 10**400}, "busy must lie within"),
        ({"hardware": {"memory_bytes": "x"}}, "memory_bytes must be a number within +-1e+30, got 'x'"),
        ({"box": {"nodes": 2}}, "a box has nodes, ranks_per_node, mbits_per_s"),
        (
            {"box": read_box("4x2@200mbit").to_dict(), "world_size": 4},
            "world_size must equal the box's ranks, got 4 != 8",
        ),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = write_events(tmp_path, **changes)
    with pytest.raises(TraceError) as caught:
        read_event_file(path)
    assert says in str(caught.value) and "ops-1.json" in str(caught.value) and "\n" not in str(caught.value)
