"""The contracts of readers of traces, and of readers of tables of measurements."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import TableError, TraceError
from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.graph.rank_trace import RankTrace
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, read_table


class TraceReaderContract:
    """Tests that every reader of traces passes.

    Attributes:
        on_host: Whether ops run on the host.  There a slot is all the time since the end of the op before.
    """

    on_host = True

    def sample(self, folder: Path) -> Path:
        """Write a trace that holds at least one op, and return its path."""
        raise NotImplementedError

    def read(self, path: Path) -> RankTrace:
        """Read a trace with the reader under test."""
        raise NotImplementedError

    @pytest.fixture
    def trace(self, tmp_path: Path) -> RankTrace:
        return self.read(self.sample(tmp_path))

    def test_every_node_has_its_times(self, trace: RankTrace) -> None:
        """All arrays are as long as the program, finite, and no time is negative."""
        n = len(trace.program)
        assert n > 0
        for values in (trace.start_s, trace.duration_s, trace.slot_s, trace.wait_s, trace.num_events):
            assert values.shape == (n,) and np.isfinite(values).all()
        assert min(trace.duration_s.min(), trace.slot_s.min()) >= 0 and (trace.wait_s >= -1e-12).all()
        assert trace.span.shape == (n,) and trace.tail_s.shape == (len(trace.spans),)

    def test_nodes_are_work(self, trace: RankTrace) -> None:
        """Nodes are ops and collectives on named streams; collectives know whom they meet."""
        for index, node in enumerate(trace.program.nodes):
            assert isinstance(node.work, Op | Collective) and node.stream
            assert (index in trace.meets) == isinstance(node.work, Collective)

    def test_what_waits_comes_later(self, trace: RankTrace) -> None:
        """Edges go forward, and stream order is left to the program."""
        for before, after, why in trace.program.edges:
            assert before < after and why is not Dependency.STREAM_ORDER

    def test_slots_fill_their_segment(self, trace: RankTrace) -> None:
        """On a host, slots of the compute stream and waits add up to the time from a segment's begin to its end."""
        for index, span in enumerate(trace.spans if self.on_host else ()):
            nodes = (trace.span == index) & trace.is_compute
            if nodes.any():
                filled = trace.slot_s[nodes].sum() + trace.wait_s[nodes].sum() + trace.tail_s[index]
                # Times since boot, as floating-point seconds, resolve about a nanosecond.
                assert filled == pytest.approx(span.end_s - span.start_s, rel=1e-6, abs=2e-9)

    def test_segments_are_in_order(self, trace: RankTrace) -> None:
        assert all(before.start_s <= after.start_s for before, after in pairwise(trace.spans))
        assert trace.span.max(initial=-1) < len(trace.spans)

    def test_reading_again_is_the_same(self, tmp_path: Path) -> None:
        path = self.sample(tmp_path)
        first, second = self.read(path), self.read(path)
        assert first.program.digest_key == second.program.digest_key and np.array_equal(first.slot_s, second.slot_s)

    @pytest.mark.parametrize("damage", ["absent", "empty", "cut", "flipped", "not json", "other json"])
    def test_a_damaged_file_is_refused_in_one_line(self, tmp_path: Path, damage: str) -> None:
        """Nothing is half-read: the error names the file, in one line."""
        path = self.sample(tmp_path)
        _damage(path, damage, {"not json": b"a trace", "other json": b'{"a": 1}'})
        with pytest.raises(TraceError) as caught:
            self.read(path)
        assert path.name in str(caught.value) and "\n" not in str(caught.value)


class TableReaderContract:
    """Tests that every reader of tables passes.

    Attributes:
        format: Name under which the reader is registered.
        place: Path of the sample within its folder, such as ``logs/gemm.txt``.
        text: The sample; compressed where its name ends in ``.gz``.
        slack: How many times its device's peak FLOP/s a time may imply, where rounding or clocks allow more than 1.
        tells_software: Whether every row says which software was measured.
    """

    format: str
    place: str
    text: str
    slack = 1.05
    tells_software = True

    def content(self) -> bytes:
        """Return the bytes of the sample."""
        data = self.text.encode()
        return gzip.compress(data, mtime=0) if self.place.endswith(".gz") else data

    def sample(self, folder: Path) -> Path:
        """Write the sample and return its path."""
        path = folder / self.place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.content())
        return path

    def read(self, folder: Path) -> Measurements:
        """Write and read the sample."""
        return read_table(self.format, self.sample(folder))

    @pytest.fixture
    def table(self, tmp_path: Path) -> Measurements:
        return self.read(tmp_path)

    def test_every_row_is_a_measurement(self, table: Measurements) -> None:
        """Times are positive and finite, works are ours, and each row says where it comes from."""
        assert len(table) > 0
        assert (np.isfinite(table.seconds) & (table.seconds > 0)).all()
        assert all(isinstance(work, Op | Collective) and work.num_bytes > 0 for work in table.works)
        assert all(table.software) or not self.tells_software
        assert all(fabric == "" for work, fabric in zip(table.works, table.fabric, strict=True) if isinstance(work, Op))
        assert all(table.files[source].digest and table.files[source].licence for source in table.source)
        assert all(count > 0 for count in table.skipped.values())

    def test_no_op_is_faster_than_its_device(self, table: Measurements) -> None:
        """No time implies more FLOP/s than the device's peak."""
        for work, seconds, device in zip(table.works, table.seconds, table.device, strict=True):
            hardware = find_hardware(device)
            if isinstance(work, Op) and hardware is not None:
                assert work.flops / seconds <= self.slack * hardware.flops_per_s(work.dtype), (work, seconds, device)

    def test_reading_again_is_the_same(self, tmp_path: Path) -> None:
        first, second = self.read(tmp_path), self.read(tmp_path)
        names = ("works", "device", "fabric", "software", "source", "files", "skipped")
        assert attrgetter(*names)(first) == attrgetter(*names)(second)
        assert np.array_equal(first.seconds, second.seconds)

    def test_a_folder_reads_as_its_files(self, tmp_path: Path) -> None:
        """In a folder, files of the format are read, other files but texts are counted, the licence is reported."""
        one = self.read(tmp_path)
        (tmp_path / "SOURCE.md").write_text("where from")
        (tmp_path / "LICENSE").write_text("Apache License 2.0")
        (tmp_path / "more.bin").write_bytes(b"?")
        whole = read_table(self.format, tmp_path)
        assert whole.works == one.works
        assert whole.skipped == {**one.skipped, "a file that is no table of this format (.bin)": 1}
        assert {file.licence for file in whole.files.values()} == {"Apache-2.0"}
        assert list(whole.files) == [f"{self.format}/{self.place}"]

    def test_a_table_goes_into_a_file_and_back(self, table: Measurements, tmp_path: Path) -> None:
        table.to_parquet(tmp_path / "out" / "table.parquet")
        again = Measurements.from_parquet(tmp_path / "out" / "table.parquet")
        assert again.works == table.works and np.array_equal(again.seconds, table.seconds)

    @pytest.mark.parametrize("damage", ["absent", "empty", "cut", "flipped", "other"])
    def test_a_damaged_file_is_refused_in_one_line(self, tmp_path: Path, damage: str) -> None:
        """Nothing is half-read: the error names the file, in one line; only a cut row is counted as left out."""
        path = self.sample(tmp_path)
        rows = read_table(self.format, path)
        _damage(path, damage, {"other": b"a table"})
        try:
            left = read_table(self.format, path)
        except TableError as error:
            assert path.name in str(error) and "\n" not in str(error)
        else:
            assert damage == "cut" and len(left) < len(rows) and left.skipped.keys() - rows.skipped.keys()


def _damage(path: Path, damage: str, others: Mapping[str, bytes]) -> None:
    """Damage a file, or replace its content by other bytes."""
    whole = path.read_bytes()
    if damage == "absent":
        path.unlink()
    elif damage in others:
        path.write_bytes(gzip.compress(others[damage]) if path.suffix == ".gz" else others[damage])
    else:
        flipped = bytes(byte ^ 0xFF for byte in whole[12:60])
        path.write_bytes({"empty": b"", "cut": whole[:-11], "flipped": whole[:12] + flipped + whole[60:]}[damage])
