"""The contract of readers of tables of measurements."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, read_table


class TableReaderContract:
    """Tests that every reader of tables passes.

    Subclass it in a test module and give it a sample; the reader is registered under ``format``::

        from stepsight.testing import TableReaderContract

        class TestMyTables(TableReaderContract):
            format = "mine"
            place = "logs/gemm.txt"
            text = "device,m,n,k,us\\nNVIDIA H200,4096,4096,4096,210.5\\n"

    Attributes:
        format: Name of the table reader.
        place: Path of the sample within its folder.
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
        assert np.array_equal(first.seconds, second.seconds)
        for name in ("works", "device", "fabric", "software", "source", "files", "skipped"):
            assert getattr(first, name) == getattr(second, name)

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
        """Nothing is half-read: the error names the file, in one line."""
        path = self.sample(tmp_path)
        whole = path.read_bytes()
        if damage == "absent":
            path.unlink()
        else:
            bad = {
                "empty": b"",
                "cut": whole[:-11],
                "flipped": whole[:12] + bytes(byte ^ 0xFF for byte in whole[12:32]) + whole[32:],
                "other": b"a table",
            }[damage]
            path.write_bytes(bad)
        with pytest.raises(TableError) as caught:
            read_table(self.format, path)
        assert path.name in str(caught.value) and "\n" not in str(caught.value)
