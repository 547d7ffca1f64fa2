from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.traces.kineto_events import read_events
from tests.dataset.kineto_files import KinetoFile, tiny_step


def test_weightless_calls_are_dropped_but_counted(tmp_path: Path) -> None:
    """In the profiler's own layout they never become dictionaries; their starts are kept."""
    file = KinetoFile().call("aten::gelu", 0, 5, [8]).call("aten::view", 10, 1, [8]).call("aten::add", 20, 5, [8])
    events = read_events(file.write(tmp_path / "a.json"))
    assert [row["name"] for row in events.rows] == ["aten::gelu", "aten::add"]
    assert events.dropped_us.tolist() == [10.0]
    plain = read_events(file.write(tmp_path / "b.json", "compact"))
    assert [row["name"] for row in plain.rows] == ["aten::gelu", "aten::view", "aten::add"]
    assert len(plain.dropped_us) == 0


def test_flows_and_python_frames_are_left_out(tmp_path: Path) -> None:
    file = KinetoFile().call("aten::gelu", 0, 5, [8])
    file.events.append({"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": 1, "ts": 1.0, "args": {}})
    file.event("python_function", "train.py(3): step", 0, 50, 100, {}).call("aten::add", 20, 5, [8])
    for layout, count in (("profiler", 2), ("compact", 3)):
        events = read_events(file.write(tmp_path / f"{layout}.json", layout))
        assert len([row for row in events.rows]) == count
        assert all(row["ph"] == "X" for row in events.rows)


def test_rows_are_in_order_of_start_outermost_first(tmp_path: Path) -> None:
    file = KinetoFile().call("aten::add", 10, 5, [8]).call("aten::linear", 0, 50, [8]).call("aten::addmm", 0, 20, [8])
    events = read_events(file.write(tmp_path / "a.json.gz"))
    assert [row["name"] for row in events.rows] == ["aten::linear", "aten::addmm", "aten::add"]
    assert np.array_equal(events.start_us, [0, 0, 10]) and np.array_equal(events.end_us, [50, 20, 15])


def test_a_bare_list_of_events_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(tiny_step().events))
    assert len(read_events(path).rows) > 10


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty file"),
        (b"  \n", "empty file"),
        (gzip.compress(b"", mtime=0), "empty file"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "whole gzip"),
        (b'{"traceEvents": [', "whole JSON"),
        (b'{"traceEvents": []}', "got none"),
        (b'{"events": []}', "list traceEvents, got keys events"),
        (b"17", "got int"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b'{"traceEvents": [{"ph": "X", "ts": "now", "dur": 1}]}', "in numbers"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": NaN}]}', "dur must lie within 0"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1e300}]}', "dur must lie within 0"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": -1}]}', "got -1"),
        (b'{"traceEvents": [{"ph": "X", "ts": -1, "dur": 1}]}', "ts must lie within 0"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1' + b"0" * 400 + b"}]}", "in numbers"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1, "args": null}]}', "args of an event must be a table"),
        (b"[" * 100_000, "nested thousands deep"),
        (b'{"traceEvents": [{"name": "x"}]}', "must have ph"),
        (b'{"traceEvents": [3]}', "must have ph"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_events(path)
    assert says in str(caught.value) and "rank0.json" in str(caught.value) and "\n" not in str(caught.value)
