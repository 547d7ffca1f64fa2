"""Files to events, a block at a time: no block size and no layout changes what is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.traces.event_blocks import EventBlocks, events_of
from tests.dataset.kineto_files import KinetoFile, tiny_step


@pytest.mark.parametrize("layout", ["profiler", "compact"])
@pytest.mark.parametrize("block", [64, 300, 1000, 2**20])
def test_blocks_of_any_size_hold_the_same_events(tmp_path: Path, layout: str, block: int) -> None:
    file = tiny_step()
    file.call('a name with }, { and "quotes"', 2000, 5)
    blocks = EventBlocks(file.write(tmp_path / "t.json", layout), block)
    events = [event for part in blocks for event in part]
    written = events_of(json.dumps(json.loads(file.text("compact"))["traceEvents"]).encode())
    assert [event.table() for event in events] == [event.table() for event in written]
    fields = ("ph", "name", "cat", "ts", "dur", "pid", "tid")
    assert [[getattr(e, f) for f in fields] for e in events] == [[getattr(e, f) for f in fields] for e in written]
    assert blocks.header["schemaVersion"] == 1 and "traceEvents" not in blocks.header


def test_a_bare_list_of_events_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(" " + json.dumps(tiny_step().events), encoding="utf-8-sig")  # as some editors do
    assert len([event for part in EventBlocks(path, 100) for event in part]) == len(tiny_step().events)


@pytest.mark.parametrize("text, told", [('{"traceEvents": null}', "NoneType"), ('{"a": 1}', "keys a"), ("3", "int")])
def test_what_stands_in_place_of_events_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=f"must hold a list traceEvents, got {told} in"):
        list(EventBlocks(path, 100))


@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
@pytest.mark.parametrize("block", [200, 2**20])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float, block: int) -> None:
    text = tiny_step().text()
    path = tmp_path / "t.json"
    path.write_text(text[: int(share * len(text))])
    with pytest.raises(TraceError, match=r"truncated|traceEvents"):
        list(EventBlocks(path, block))


@pytest.mark.parametrize("text", ["", "{}", '{"nodes": []}', "[1, 2", '"x"'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"t\.json"):
        list(EventBlocks(path))


def test_tables_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(f'[{{"ph": "X", "args": {"[" * 10_000}{"]" * 10_000}}}, {{"ph": "X"}}, {{"ph": "X"}}]')
    with pytest.raises(TraceError, match="nested thousands deep"):
        list(EventBlocks(path))


def test_nan_and_broken_text_are_read_with_a_warning(tmp_path: Path) -> None:
    file = KinetoFile().call("aten::mm", 0, 5, [2, 2], Occupancy=float("nan")).call("aten::add", 6, 5, [2])
    blocks = EventBlocks(file.write(tmp_path / "t.json"))
    assert sum(len(part) for part in blocks) == len(file.events)
    assert any("not strict JSON" in warning for warning in blocks.warnings)


@pytest.mark.parametrize("kind", ["tar", "zip", "gztar"])
def test_an_archive_of_traces_is_named(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    tiny_step().write(folder / "rank0.json")
    path = shutil.make_archive(str(tmp_path / "all"), kind, folder)
    with pytest.raises(TraceError, match=rf"got a {kind.removeprefix('gz')} archive: unpack it"):
        list(EventBlocks(Path(path), 100))
