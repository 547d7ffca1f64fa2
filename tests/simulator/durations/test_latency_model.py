import pytest

from stepsight.dataset.hardware.hardware import Hardware, find_fabric
from stepsight.simulator.durations.latency_model import LatencyModel, RooflineLatency
from stepsight.testing import LatencyModelContract


class TestRooflineLatency(LatencyModelContract):
    @pytest.fixture
    def latency(self, gpu: Hardware) -> LatencyModel:
        return RooflineLatency(gpu, find_fabric("dgx-a100"))
