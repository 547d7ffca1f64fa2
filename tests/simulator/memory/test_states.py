"""Bytes of parameters, gradients and optimizer states."""

from dataclasses import replace

import pytest

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.execution import semantics_of
from stepsight.dataset.job.job import ExecutionSpec, Job, OptimizerSpec
from stepsight.simulator.memory import StageMemory, estimate_memory
from stepsight.simulator.memory.states import States, states_of
from stepsight.simulator.programs.sizes import groups_of
from tests.simulator.conftest import JobMaker

NUMEL = 4 * (12 * 64**2 + 13 * 64) + 2 * 256 * 64 + 32 * 64 + 2 * 64


def _states(job: Job) -> States:
    return states_of(job.parallel, semantics_of(job), job.batch.dtype, groups_of(job))


def held(stage: StageMemory) -> float:
    return stage.parameters + stage.gradients + stage.optimizer


@pytest.mark.parametrize(
    ("precision", "zero_stage", "bytes_per_parameter"),
    [
        ("bf16", 0, 18),
        ("bf16", 1, 6 + 12 / 8),
        ("bf16", 2, 2 + 16 / 8),
        ("fp16", 0, 20),
        ("fp16", 1, 4 + 16 / 8),
        ("fp8", 1, 8 + 12 / 8),
        ("fp32", 0, 16),
        ("fp32", 1, 8 + 8 / 8),
    ],
)
def test_states(make_job: JobMaker, gpu: Hardware, precision: str, zero_stage: int, bytes_per_parameter: float) -> None:
    """The table of Megatron's distributed optimizer; ZeRO divides in turn (Rajbhandari et al. 2019)."""
    (stage,) = estimate_memory(make_job(dp=8, zero_stage=zero_stage, precision=precision), gpu).stages
    assert held(stage) == pytest.approx(bytes_per_parameter * NUMEL)


@pytest.mark.parametrize(
    ("engine", "precision", "own", "optimizer"),
    [
        ("megatron", "fp32", 4, 8),
        ("megatron", "pure-bf16", 2, 4),  # no main copy
        ("megatron", "bf16", 2, 12),  # moments, and a main copy
        ("eager-pytorch", "bf16", 4, 8),  # the parameters are the main ones
    ],
)
def test_who_owns_main_parameters(
    make_job: JobMaker, gpu: Hardware, engine: str, precision: str, own: int, optimizer: int
) -> None:
    """A main copy is there where the engine has one and the model's type is another; Megatron has gradients always."""
    job = replace(make_job(precision=precision), execution=ExecutionSpec(engine=engine))
    (stage,) = estimate_memory(job, gpu).stages
    assert (stage.parameters, stage.optimizer) == pytest.approx((own * NUMEL, optimizer * NUMEL))
    if engine == "megatron":
        assert stage.gradients == pytest.approx(NUMEL * (2 if precision == "pure-bf16" else 4))


def test_fsdp_shards_everything(make_job: JobMaker, gpu: Hardware) -> None:
    """16 bytes over all replicas, or over those that share; gradients are not there in the first forward."""
    for dp_shard, shards in ((0, 8), (2, 2)):
        (stage,) = estimate_memory(make_job(dp=8, zero_stage=3, dp_shard=dp_shard, precision="bf16"), gpu).stages
        assert stage.parameters + stage.optimizer == pytest.approx(12 * NUMEL / shards)
        assert stage.gradients <= 4 * NUMEL / shards


def test_experts_have_fewer_replicas(make_job: JobMaker, gpu: Hardware) -> None:
    """Two replicas of each expert share 12 bytes, eight share those of the rest."""
    model = {"experts": 8, "experts_per_token": 2}
    job = make_job(dp=8, ep=4, zero_stage=1, precision="bf16", model=model)
    states = _states(job)
    assert states.optimizer == (12 / 8, 12 / 2)
    assert states.parameters == (2, 2)


def test_optimizer_may_wait_on_the_host(make_job: JobMaker, gpu: Hardware) -> None:
    """Neither moments nor master copy."""
    job = replace(make_job(precision="bf16"), optimizer=OptimizerSpec(offload=True))
    assert _states(job).optimizer == (0, 0)


def test_foreach_makes_a_copy(make_job: JobMaker) -> None:
    """The root of the second moment, for every element that the rank steps."""
    job = make_job(dp=8, zero_stage=1)
    foreach = replace(job, optimizer=OptimizerSpec(fused=False))
    assert _states(job).workspace == (0, 0)
    assert _states(foreach).workspace == (4 / 8, 4 / 8)


def test_parameters_stay_gathered_in_a_pipeline(make_job: JobMaker, gpu: Hardware) -> None:
    """All layers of all chunks, or one and the next that is on its way; 2 bytes each.

    The middle stage has neither embedding nor head.
    """
    way = {"pp": 3, "virtual_stages": 2, "dp": 8, "micro_batches": 6, "zero_stage": 3, "precision": "bf16"}
    model = {"layers": 18, "seq_len": 2048}
    jobs = [make_job(**way, reshard_after_forward=again, model=model) for again in (False, True)]
    stay, few = (estimate_memory(job, gpu).stages[1] for job in jobs)
    layer = 12 * 64**2 + 13 * 64
    assert stay.temporary - few.temporary == pytest.approx(2 * layer * (6 - 2))
    assert stay.activations == few.activations


@pytest.mark.parametrize(
    ("precision", "gradient_dtype", "narrow", "bytes_per_parameter"),
    [
        ("bf16", "fp32", False, (2, 4)),
        ("bf16", "model", False, (2, 2)),
        ("bf16", "model-fused", False, (2, 2)),
        ("fp16", "model", False, (2, 2)),
        ("fp8", "model", False, (4, 2)),  # 16 bits, and casts of both layouts
        ("fp8", "model", True, (2, 2)),
        ("nvfp4", "model", True, (1, 2)),
        ("bf16", "model", True, (2, 2)),  # not quantised
    ],
)
def test_types_that_a_job_states(
    make_job: JobMaker,
    gpu: Hardware,
    precision: str,
    gradient_dtype: str,
    narrow: bool,
    bytes_per_parameter: tuple[int, int],
) -> None:
    """Megatron's gradient buffers have the type that replicas exchange; parameters may be in the narrow type alone."""
    job = make_job(dp=2, precision=precision, gradient_dtype=gradient_dtype)
    job = replace(job, batch=replace(job.batch, fp8_parameters=narrow), execution=ExecutionSpec(engine="megatron"))
    (stage,) = estimate_memory(job, gpu).stages
    own, gradients = bytes_per_parameter
    assert (stage.parameters, stage.gradients) == pytest.approx((own * NUMEL, gradients * NUMEL))
