"""Rows of events: what the pass that sorts them out reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stepsight.dataset.traces.event_columns import read_columns
from stepsight.dataset.traces.event_rows import Events, event_rows, observed_steps
from tests.dataset.kineto_files import KinetoFile


def _read(file: KinetoFile, path: Path) -> Events:
    return event_rows(read_columns(file.write(path)))


def test_weightless_calls_are_dropped_but_counted(tmp_path: Path) -> None:
    file = KinetoFile().call("aten::gelu", 0, 5, [8]).call("aten::view", 10, 1, [8]).call("aten::add", 20, 5, [8])
    events = _read(file, tmp_path / "a.json")
    assert [row["name"] for row in events.rows] == ["aten::gelu", "aten::add"]
    assert events.dropped_us.tolist() == [10.0]
    assert events.rows[0]["args"]["Input Dims"] == [[8]]


def test_flows_and_python_frames_are_left_out(tmp_path: Path) -> None:
    file = KinetoFile().call("aten::gelu", 0, 5, [8])
    file.events.append({"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": 1, "ts": 1.0, "args": {}})
    file.event("python_function", "train.py(3): step", 0, 50, 100, {}).call("aten::add", 20, 5, [8])
    assert [row["name"] for row in _read(file, tmp_path / "a.json").rows] == ["aten::gelu", "aten::add"]


def test_rows_are_in_order_of_start_outermost_first(tmp_path: Path) -> None:
    file = KinetoFile().call("aten::add", 10, 5, [8]).call("aten::linear", 0, 50, [8]).call("aten::addmm", 0, 20, [8])
    events = _read(file, tmp_path / "a.json.gz")
    assert [row["name"] for row in events.rows] == ["aten::linear", "aten::addmm", "aten::add"]
    assert np.array_equal(events.start_us, [0, 0, 10]) and np.array_equal(events.end_us, [50, 20, 15])


def test_steps_with_numbered_functions_were_observed(tmp_path: Path) -> None:
    file = KinetoFile().call("aten::add", 0, 5, [8]).call("aten::add", 10, 5, [8])
    file.events[-1]["args"]["Record function id"] = 7
    calls = read_columns(file.write(tmp_path / "a.json")).ops
    assert observed_steps(calls, np.array([[0.0, 8.0], [9.0, 20.0]])).tolist() == [False, True]
