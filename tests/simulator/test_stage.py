"""What one stage runs, as seen from whole predictions."""

from dataclasses import replace

import pytest

from stepsight.dataset.hardware import Hardware
from stepsight.dataset.job import OptimizerSpec
from stepsight.dataset.op import Op
from stepsight.simulator.latency import RooflineLatency
from stepsight.simulator.lowering import lower
from stepsight.simulator.simulate import simulate
from tests.simulator.conftest import JobMaker


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_an_optimizer_on_the_host_is_slower(make_job: JobMaker, gpu: Hardware, precision: str, zero_stage: int) -> None:
    """Gradients go there, parameters come back, and the host's memory is slower than the device's."""
    job = make_job(dp=2, zero_stage=zero_stage, precision=precision)
    away = replace(job, optimizer=OptimizerSpec(offload=True))
    latency = RooflineLatency(gpu, job.fabric)
    usual, offloaded = (simulate(each, latency).iteration_time_s for each in (job, away))
    works = [work for work in lower(away, gpu).all_works if isinstance(work, Op)]
    (step,) = (work for work in works if work.kind == "adamw_host")
    assert {"to_host", "from_host"} <= {work.kind for work in works}
    assert not any(work.kind == "adamw" for work in works)
    assert offloaded > usual
    assert offloaded - usual < latency.op_seconds([step])[0] + 2 * step.dims[0] * 4 / gpu.host_link_bytes_per_s + 1e-4
