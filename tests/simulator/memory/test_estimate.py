"""Memory of jobs: what must hold whatever the model."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import HARDWARE, Hardware
from stepsight.dataset.job.job import Job
from stepsight.simulator.memory import estimate_memory, estimate_moments
from stepsight.simulator.memory.estimate import FIELDS
from stepsight.simulator.schedules import find_schedule, write_schedule
from tests.simulator.conftest import JobMaker

LARGE = {"hidden": 1024, "heads": 16, "vocab": 32000, "seq_len": 2048, "layers": 8}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"family": "llama", "kv_heads": 8},
    "unfused": {"fused_attention": False},
    "bert": {"family": "bert"},
    "t5": {"family": "t5", "encoder_layers": 8, "encoder_seq_len": 1024},
    "vit": {"family": "vit", "patch_dim": 768, "vocab": 1000},
    "experts": {"family": "llama", "experts": 8, "experts_per_token": 2},
    "latent": {"family": "llama", "attention": "mla", "kv_lora_rank": 512, "rope_head_dim": 64, "v_head_dim": 64},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_more_parallel_never_needs_more(make_job: JobMaker, gpu: Hardware, name: str, precision: str) -> None:
    """Tensor parallelism, sequence parallelism, each ZeRO stage and recomputation lessen the peak, or leave it."""
    model = {**LARGE, **MODELS[name]}

    def peak(**parallel: Any) -> float:
        return estimate_memory(make_job(micro_batch=2, precision=precision, model=model, **parallel), gpu).peak_bytes

    tp = [peak(tp=tp) for tp in (1, 2, 4, 8)]
    assert tp == sorted(tp, reverse=True)
    assert peak(tp=4, sequence_parallel=True) <= tp[2]
    zero = [peak(dp=8, zero_stage=stage) for stage in (0, 1, 2)]
    assert zero == sorted(zero, reverse=True)
    assert peak(dp=8, zero_stage=3) <= zero[0]
    recompute = [peak(recompute=how) for how in ("none", "selective", "full")]
    assert recompute == sorted(recompute, reverse=True)
    assert recompute[2] < recompute[0]
    assert recompute[2] <= peak(recompute="full", recompute_every=4) <= recompute[0]
    moved = [peak(offload_activations=True, offload_layers=layers) for layers in (0, 3, 1)]
    assert moved[0] < moved[1] < moved[2] < recompute[0]


def test_slack_fills_a_device_and_does_not_overflow_it(make_job: JobMaker, gpu: Hardware) -> None:
    """With room the allocator keeps its part of what passes; without room it gives that back; tensors must fit."""
    job = make_job(micro_batch=2, precision="bf16", model=LARGE)
    slack = replace(gpu, fragmentation=0.5, reserved_bytes=1e6)
    tensors = estimate_memory(job, gpu).stages[0].tensors
    for device_bytes, fits, tight in ((4 * tensors, True, False), (1.1 * tensors, True, True), (tensors, False, False)):
        device = replace(slack, memory_bytes=device_bytes)
        memory = estimate_memory(job, device)
        (stage,) = memory.stages
        assert (memory.fits, memory.tight) == (fits, tight)
        assert stage.tensors == pytest.approx(tensors)
        most = 1e6 + 0.5 * (stage.activations + stage.temporary)
        assert stage.reserved == pytest.approx(min(most, max(1e6, device_bytes - tensors)))
        assert estimate_moments(job, device)[0].max() == pytest.approx(stage.total)


def test_parts_add_up(make_job: JobMaker, gpu: Hardware) -> None:
    """A stage's total is the sum of its fields, and the peak the largest total."""
    memory = estimate_memory(make_job(pp=2, tp=2, precision="bf16"), gpu)
    for stage in memory.stages:
        table = stage.to_dict()
        parts = [value for key, value in table.items() if key in FIELDS]
        assert sum(parts) == pytest.approx(table["total"])
    assert memory.peak_bytes == memory.stages[memory.fullest].total
    assert memory.to_dict()["peak_bytes"] == memory.peak_bytes


@pytest.mark.parametrize(("precision", "passing"), [("fp32", ("gradients",)), ("bf16", ())])
def test_what_stays_does_not_fragment(
    make_job: JobMaker, gpu: Hardware, precision: str, passing: tuple[str, ...]
) -> None:
    """A fixed part, and a part of what a step allocates and frees: gradients too, where no buffer holds them."""
    careful = replace(gpu, reserved_bytes=1e9, fragmentation=0.1)
    (plain,), (more,) = (estimate_memory(make_job(precision=precision), hardware).stages for hardware in (gpu, careful))
    assert plain.reserved == 0 and more.tensors == plain.tensors
    freed = sum(getattr(plain, name) for name in ("activations", "temporary", *passing))
    assert more.reserved == pytest.approx(1e9 + 0.1 * freed)


def test_pytorchs_pipelines_have_a_place_for_every_message(make_job: JobMaker, cpu: Hardware, gpu: Hardware) -> None:
    """More micro-batches need more there, and no more in Megatron's."""
    few, many = (make_job(pp=2, micro_batches=count) for count in (8, 64))
    boundary = 32 * 64 * 4
    stages = [estimate_memory(job, cpu).stages[0] for job in (few, many)]
    assert stages[1].total - stages[0].total == 56 * boundary
    assert estimate_memory(few, gpu).peak_bytes == estimate_memory(many, gpu).peak_bytes


def test_tied_embeddings_have_a_copy_on_the_last_stage(make_job: JobMaker, gpu: Hardware) -> None:
    """On one stage the table is there once."""
    tied = {"tied_embeddings": True}
    (one,), (two,) = (estimate_memory(make_job(model=model), gpu).stages for model in (tied, {}))
    assert two.parameters - one.parameters == 4 * 256 * 64
    last = [estimate_memory(make_job(pp=2, model=model), gpu).stages[1] for model in (tied, {})]
    assert last[0].parameters == last[1].parameters


def test_stages_of_unequal_layers(make_job: JobMaker, gpu: Hardware) -> None:
    """Parameters follow ``stage_layers``."""
    even, uneven = (estimate_memory(make_job(pp=2, stage_layers=layers), gpu) for layers in ((), (1, 3)))
    layer = 4 * (12 * 64**2 + 13 * 64)
    assert even.stages[0].parameters - uneven.stages[0].parameters == layer
    assert uneven.stages[1].parameters - even.stages[1].parameters == layer
    none = estimate_memory(make_job(pp=4, dp=2, zero_stage=3, stage_layers=(1, 0, 2, 1)), gpu).stages[1]
    assert none.parameters == 0


def test_table_of_every_rank_without_vocabulary_parallelism(make_job: JobMaker, gpu: Hardware) -> None:
    """Embedding and head are whole."""
    whole, shared = (estimate_memory(make_job(tp=4, vocab_parallel=flag), gpu).stages[0] for flag in (False, True))
    assert whole.parameters - shared.parameters == 4 * 2 * 256 * 64 * 3 / 4


def test_optimizers_step_may_need_most(make_job: JobMaker, gpu: Hardware) -> None:
    """Foreach kernels copy; with little to compute that is the largest moment."""
    job = make_job(model={**LARGE, "seq_len": 32})
    foreach = replace(job, optimizer=replace(job.optimizer, fused=False))
    (stage,) = estimate_memory(foreach, gpu).stages
    assert stage.moment == "optimizer"
    assert stage.activations == 0
    assert stage.temporary == stage.parameters


def test_zero_bubble_needs_no_more_without_sequence_parallelism(make_job: JobMaker, gpu: Hardware) -> None:
    """Qi et al. 2023, section 2.3: no stage keeps more than 1F1B's first, the parameters' half less than the whole."""
    for tp in (1, 4):
        model = {**LARGE, "vocab": 512}  # logits come on top
        ways = {"pp": 4, "tp": tp, "micro_batches": 8, "precision": "bf16", "model": model}
        zero, plain = (estimate_memory(make_job(schedule=name, **ways), gpu) for name in ("zb-h1", "1f1b"))
        most, usual = (max(stage.activations + stage.temporary for stage in memory.stages) for memory in (zero, plain))
        assert most <= 1.06 * usual  # the head on top


def test_pytorchs_split_frees_little(make_job: JobMaker, gpu: Hardware) -> None:
    """A middle stage keeps all that it kept and the output gradients of linears and norms besides; in elements per
    s b h: 9 and 2 for a layer.  One forward and three halves of backwards are in flight."""
    way = {"pp": 4, "micro_batches": 8, "schedule": "zb-h1", "model": LARGE}
    torch, megatron = (estimate_memory(make_job(**way, runtime=name), gpu).stages[2] for name in ("torch", ""))
    unit = 4 * 2048 * 1024 * 2  # of two layers
    lse = 4 * 2048 * 16 * 2
    assert megatron.in_flight == torch.in_flight == 4
    assert megatron.activations == pytest.approx(4 * 16 * unit, rel=0.02)
    assert torch.activations == pytest.approx((16 + 3 * (16 + 11)) * unit + 4 * lse, rel=0.01)


def test_users_own_schedule(make_job: JobMaker, gpu: Hardware, tmp_path: Path) -> None:
    """Its micro-batches in flight are counted from its actions; it is read again when it changes."""
    path = tmp_path / "own.csv"
    write_schedule(find_schedule("gpipe", 2, 4), path)
    job = make_job(pp=2, precision="bf16", schedule=str(path))
    assert [stage.in_flight for stage in estimate_memory(job, gpu).stages] == [4, 4]
    write_schedule(find_schedule("1f1b", 2, 4), path)
    os.utime(path, (1, 1))
    assert [stage.in_flight for stage in estimate_memory(job, gpu).stages] == [2, 1]
    with pytest.raises(JobError, match="must hold pp = 2 ranks"):
        estimate_memory(make_job(pp=2, micro_batches=8, schedule=str(path)), gpu)


def test_what_fits_has_no_reason(make_job: JobMaker, gpu: Hardware) -> None:
    memory = estimate_memory(make_job(), gpu)
    assert memory.fits and memory.reason == ""


@pytest.mark.parametrize("name", ["gpt3-175b-1024", "gpt3-175b-1024-interleaved", "gpt3-175b-1024-zero-bubble",
                                  "llama3-70b-fsdp-512", "mixtral-8x22b-ep-256"])  # fmt: skip
def test_the_largest_moment_is_the_peak(name: str) -> None:
    """The memory of each action, over all actions and the optimizer, has the stage's total as its maximum."""
    job = Job.from_file(Path(__file__).parents[3] / "examples" / f"{name}.toml")
    hardware = HARDWARE[job.cluster.hardware]
    totals = [stage.total for stage in estimate_memory(job, hardware).stages]
    moments = estimate_moments(job, hardware)
    assert [array.max() for array in moments] == pytest.approx(totals)


def test_a_loss_in_place_needs_the_logits_alone(make_job: JobMaker, gpu: Hardware) -> None:
    """Their gradient overwrites them, and metrics are computed when no activation is left."""

    def peak(vocab: int, **model: Any) -> float:
        small = {**LARGE, "layers": 1, "vocab": vocab, "tied_embeddings": True, **model}
        return estimate_memory(make_job(micro_batch=8, precision="bf16", model=small), gpu).peak_bytes

    tokens, more = 8 * LARGE["seq_len"], 64000
    own, metrics = ([peak(vocab, fused_loss=True, metric_losses=n) for vocab in (more, 2 * more)] for n in (0, 2))
    parameters = 18 * more * LARGE["hidden"]
    assert metrics == own
    assert own[1] - own[0] == pytest.approx(2 * tokens * more + parameters, rel=0.25)
    assert own[1] < peak(2 * more) - 2 * tokens * more
