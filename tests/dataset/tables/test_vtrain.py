"""vTrain: all-reduces in nanoseconds."""

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.tables import Measurements, read_table
from stepsight.testing import TableReaderContract


class TestVtrain(TableReaderContract):
    format = "vtrain"
    place = "trace/a100/AR_GPU8_1M_1024M_LUT"
    text = (
        "size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)\n"
        "1048576,262144,float,92790,19.78,92150,19.91\n"
        "1073741824,268435456,float,8192800,229.35,8196400,229.25\n"
    )

    def test_in_place_nanoseconds(self, table: Measurements) -> None:
        """The second time is in place; the name says how many devices."""
        assert table.works == tuple(Collective("all_reduce", size, 8, 8) for size in (2**20, 2**30))
        assert table.seconds.tolist() == pytest.approx([92.15e-6, 8196.4e-6])
        assert set(table.device) == {"a100-sxm-80gb"} and set(table.fabric) == {"dgx-a100"}
        assert 2**30 / table.seconds[1] * 2 * 7 / 8 == pytest.approx(229.25e9, rel=1e-3)  # as it says itself

    def test_a_name_without_devices_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "LUT").write_text(self.text)
        with pytest.raises(TableError, match="AR_GPU and the number"):
            read_table("vtrain", tmp_path / "LUT")
