from pathlib import Path

import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.job.job import Job
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs_and_fits(path: Path) -> None:
    job = Job.from_file(path)
    hardware = find_hardware(job.cluster.hardware)
    assert hardware is not None
    result = simulate(job, RooflineLatency(hardware, job.fabric))
    assert result.iteration_time_s > 0
    assert result.memory.fits, result.memory.reason


def test_gpt3_is_near_what_was_published() -> None:
    """Megatron-LM with selective recomputation and sequence parallelism: 13.75 s for GPT-3 175B on 64 A100 and a batch
    of 64 (Korthikanti et al. 2022, table 5); the roofline knows no kernel's efficiency and is within 15 %."""
    job = Job.from_dict(
        {
            "model": {"name": "gpt3-175b"},
            "parallel": {"tp": 8, "pp": 8, "sequence_parallel": True, "recompute": "selective"},
            "batch": {"micro_batch": 1, "global_batch": 64, "precision": "bf16"},
            "cluster": {"hardware": "a100-sxm-80gb", "nodes": 8, "devices_per_node": 8},
        }
    )
    hardware = find_hardware("a100-sxm-80gb")
    assert hardware is not None
    assert simulate(job, RooflineLatency(hardware, job.fabric)).iteration_time_s == pytest.approx(13.75, rel=0.15)
