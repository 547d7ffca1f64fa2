from stepsight.dataset.hardware.hardware import Hardware
from stepsight.simulator.memory import estimate_memory
from tests.simulator.conftest import JobMaker


def test_no_more_is_gathered_ahead_than_there_is(make_job: JobMaker, gpu: Hardware) -> None:
    """A stage of four layers holds at most these, however many are asked for ahead."""
    few, many = (
        estimate_memory(make_job(dp=8, zero_stage=3, precision="bf16", prefetch=ahead), gpu).peak_bytes
        for ahead in (3, 1000)
    )
    assert many == few
