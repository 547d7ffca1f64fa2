"""NeuSight: FP32 products whose inner size is called N."""

import pytest

from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tables import Measurements
from stepsight.testing import TableReaderContract

_HEADER = "OPName,Latency,Device,Torch Version,Kernel Name,B,M,N,K,H\n"


class TestNeusight(TableReaderContract):
    format = "neusight"
    place = "train/collect/linear/p2.1.0/NVIDIA A100-PCIE-40GB.csv.gz"
    text = (
        _HEADER + "linear,260.086,NVIDIA A100-PCIE-40GB,p2.1.0,sgemm_128x32,1,6219,54377,5256,\n"
        "bmm,80.3231,NVIDIA A100-PCIE-40GB,p2.1.0,sgemm,868,986,754,979,\n"
        "mul,0.0253,NVIDIA A100-PCIE-40GB,p2.1.0,k,127,,,,168\n"
        "ln,0.0469,NVIDIA A100-PCIE-40GB,p2.1.0,k,60,,,,272\n"
        "conv,0.9,NVIDIA A100-PCIE-40GB,p2.1.0,k,38,,,,1\n"
        "tanh,0,NVIDIA A100-PCIE-40GB,p2.1.0,k,127,,,,168\n"
    )

    def test_the_inner_size_is_n(self, table: Measurements) -> None:
        """A linear of 42 x 195 tiles of 128 x 32 puts out 6219 x 5256; times are milliseconds."""
        assert table.works == (
            Op("linear", (6219, 5256, 54377), "fp32"),
            Op("batched_matmul", (868, 986, 979, 754), "fp32"),
            Op("add", (127 * 168,), "fp32"),
            Op("layer_norm", (60, 272), "fp32"),
        )
        assert table.seconds[2] == pytest.approx(25.3e-6)
        assert set(table.device) == {"a100-pcie-40gb"} and set(table.software) == {"torch 2.1.0"}
        assert table.skipped == {"no op kind for conv": 1, "no time": 1}


class TestThrottled(TableReaderContract):
    """The P4 of the training set was throttled in linears alone."""

    format = "neusight"
    place = "train/collect/linear/p2.1.0/Tesla P4.csv"
    text = _HEADER + "linear,9.0,Tesla P4,p2.1.0,k,1,512,512,512,\nrelu,0.05,Tesla P4,p2.1.0,k,64,,,,64\n"

    def test_its_linears_are_left_out(self, table: Measurements) -> None:
        assert table.works == (Op("relu", (4096,), "fp32"),) and table.skipped == {"a throttled device": 1}
