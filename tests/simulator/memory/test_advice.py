"""Why a job does not fit, and what to try."""

from stepsight.dataset.hardware import Hardware
from stepsight.simulator.memory import estimate_memory
from tests.simulator.conftest import JobMaker

LONG = {"seq_len": 131072}


def test_what_does_not_fit_is_explained(make_job: JobMaker, gpu: Hardware) -> None:
    """One line: which stage, what takes what, and the first change that is enough."""
    memory = estimate_memory(make_job(pp=2, micro_batches=8, micro_batch=128, precision="bf16", model=LONG), gpu)
    assert not memory.fits
    assert memory.reason.startswith("stage 0 needs ")
    assert "2 micro-batches in flight), a device has 80.0 GB; micro_batch 64 would free " in memory.reason
    assert "\n" not in memory.reason


def test_cheap_changes_come_first(make_job: JobMaker, gpu: Hardware) -> None:
    """Sequence parallelism costs nothing."""
    job = make_job(tp=4, micro_batch=160, precision="bf16", model=LONG)
    assert "; sequence_parallel would free" in estimate_memory(job, gpu).reason


def test_nothing_is_promised(make_job: JobMaker, gpu: Hardware) -> None:
    """Where no single change is enough, the one that frees most is named as such."""
    job = make_job(micro_batch=1, precision="bf16", model={"layers": 400, "hidden": 16384, "heads": 128})
    reason = estimate_memory(job, gpu).reason
    assert reason.endswith("not enough alone")
    assert "offloading the optimizer" in reason


def test_passes_are_told_from_micro_batches(make_job: JobMaker, gpu: Hardware) -> None:
    """With several chunks a micro-batch passes a stage as often; one is one."""
    large = {"micro_batch": 512, "precision": "bf16", "model": LONG}
    looped = estimate_memory(make_job(pp=2, virtual_stages=2, micro_batches=2, **large), gpu)
    assert "; 4 passes of 2 micro-batches in flight)" in looped.reason
    assert "; 1 micro-batch in flight)" in estimate_memory(make_job(micro_batches=8, **large), gpu).reason
