"""Micro-batches in flight, counted from schedules' own actions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.execution import semantics_of
from stepsight.dataset.job.job import ExecutionSpec, Job, OptimizerSpec
from stepsight.simulator.memory import StageMemory, estimate_memory
from stepsight.simulator.memory.peaks import (
    ACTION,
    ACTIVATIONS,
    FLYING,
    GRADIENTS,
    MOMENT,
    States,
    find_peaks,
    states_of,
)
from stepsight.simulator.programs.sizes import groups_of
from stepsight.simulator.schedules import Schedule, find_schedule
from tests.simulator.conftest import JobMaker


def peaks(
    schedule: Schedule, *, kept: float = 1, deferred: float = 0, grown: float = 0, backward: float = 1
) -> np.ndarray:
    sizes = np.zeros((schedule.num_stages, schedule.virtual_stages, 9))
    sizes[:] = (kept, 0, deferred, grown, kept, backward, backward, 0, deferred)
    return find_peaks(schedule, sizes)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "flying"),
    [
        ("1f1b", 4, 8, [4, 3, 2, 1]),
        ("1f1b", 4, 2, [2, 2, 2, 1]),
        ("gpipe", 4, 8, [8, 8, 8, 8]),
        ("1f1b", 1, 8, [1]),
        ("zb-h1", 4, 8, [4, 4, 4, 4]),
    ],
)
def test_in_flight(name: str, stages: int, micro_batches: int, flying: list[int]) -> None:
    """1F1B: as many as stages are left.  Zero-bubble H1: as many as 1F1B's first stage, some of them half done."""
    found = peaks(find_schedule(name, stages, micro_batches), deferred=1)
    assert found[:, ACTIVATIONS].tolist() == flying


@pytest.mark.parametrize(("stages", "virtual_stages"), [(4, 2), (8, 3)])
def test_in_flight_interleaved(stages: int, virtual_stages: int) -> None:
    """Narayanan et al. 2021: chunks of ``2 (p - rank - 1) + (v - 1) p`` micro-batches warm up, and one more runs."""
    found = peaks(find_schedule("1f1b", stages, 8 * stages, virtual_stages))
    ahead = stages - 1 - np.arange(stages)
    np.testing.assert_array_equal(found[:, FLYING], 2 * ahead + (virtual_stages - 1) * stages + 1)


def test_every_chunk_counts_for_itself() -> None:
    """Chunks of very different sizes: their micro-batches are counted apart."""
    schedule = find_schedule("1f1b", 2, 8, 2)
    sizes = np.zeros((2, 2, 9))
    sizes[:, :, 0] = sizes[:, :, 4] = sizes[:, :, 5] = sizes[:, :, 6] = (1, 100)
    found = find_peaks(schedule, sizes)
    assert found[:, FLYING].tolist() == [5, 3]
    assert found[:, ACTIVATIONS].tolist() == [203, 102]


def test_gradients_come_with_the_first_backward() -> None:
    """A second micro-batch finds them there: 1 kept and 5 of gradients, against 1 and its own 2 in the first."""
    (found,) = peaks(find_schedule("1f1b", 1, 2), grown=5, backward=3)
    assert found[[MOMENT, GRADIENTS, ACTION]].tolist() == [8, 5, 1]


def test_what_is_deferred_waits_for_its_own_action() -> None:
    """With all of it deferred, nothing is gained by splitting; with none, as much as by running at once."""
    split = find_schedule("zb-h1", 4, 8)
    whole = find_schedule("1f1b", 4, 8)
    np.testing.assert_array_equal(peaks(split, deferred=0)[:, MOMENT], peaks(whole)[:, MOMENT])
    assert (peaks(split, deferred=1)[1:, MOMENT] > peaks(whole)[1:, MOMENT]).all()


def test_gathered_parameters_stay_from_the_first_forward_on() -> None:
    """The peaks of a chunk hold its own; those of the others come on top, once they have run."""
    schedule = find_schedule("1f1b", 2, 4, 2)
    sizes = np.zeros((2, 2, 9))
    sizes[:, :, 7] = sizes[:, :, 4] = sizes[:, :, 5] = sizes[:, :, 6] = (10, 100)
    assert find_peaks(schedule, sizes)[:, MOMENT].tolist() == [110, 110]
    sizes[:, 1, 7] = 0
    assert find_peaks(schedule, sizes)[:, MOMENT].tolist() == [110, 110]
    sizes[:, 0, 7] = 0
    assert find_peaks(schedule, sizes)[:, MOMENT].tolist() == [100, 100]


# Sizes of one chunk, all different, so that any other sum is another number.
SIZES = {
    "kept": 1000, "left": 100, "deferred": 600, "grown": 50, "forward": 2000, "backward": 3000, "backward_first": 3500,
    "gathered": 7, "weight": 900,
}  # fmt: skip


def one_stage(*actions: tuple[int, int], **sizes: float) -> list[float]:
    """The peak of a stage of one chunk that runs ``(kind, micro-batch)`` in turn."""
    rows = np.array([(kind, micro, 0) for kind, micro in actions], dtype=np.int32)
    schedule = Schedule((rows,), 1 + int(rows[:, 1].max()), np.zeros((1, 2), dtype=np.int32))
    values = {**SIZES, **sizes}
    assert list(values) == list(SIZES)
    return find_peaks(schedule, np.array([[list(values.values())]], dtype=np.float64))[0].tolist()


@pytest.mark.parametrize(
    ("actions", "sizes", "moment", "there", "grown", "flying", "kind"),
    [
        # The second forward: the first one's activations and what it left stay.
        ([(0, 0), (0, 1)], {}, 1100 + 2000, 2200, 0, 2, 0),
        # The first backward needs more than later ones; what forward left stays after it.
        ([(0, 0), (1, 0)], {}, 100 + 3500, 1100, 0, 1, 1),
        # The second backward: the first one's gradients have grown.
        ([(0, 0), (1, 0), (0, 1), (1, 1)], {"backward": 9000}, 200 + 9000 + 50, 1200, 50, 1, 1),
        # Gradients of parameters: what was deferred goes, the first time they grow.
        ([(0, 0), (2, 0), (3, 0)], {"weight": 9000}, 100 + 9000 + 50, 700, 0, 1, 3),
        ([(0, 0), (2, 0), (3, 0), (0, 1), (2, 1), (3, 1)], {"weight": 9000}, 200 + 9000 + 50, 800, 50, 1, 3),
        # A split backward never pays for what grows: that comes with the parameters' gradients.
        ([(0, 0), (2, 0)], {"backward_first": 99999}, 100 + 3000, 1100, 0, 1, 2),
        # What a split backward defers may be more than its own peak.
        ([(0, 0), (2, 0)], {"deferred": 5000}, 100 + 5000, 5100, 0, 1, 2),
    ],
)
def test_moments_by_hand(
    actions: list[tuple[int, int]],
    sizes: dict[str, float],
    moment: float,
    there: float,
    grown: float,
    flying: int,
    kind: int,
) -> None:
    """Gathered parameters are part of a chunk's own peaks, but of those of what is deferred and of weights."""
    more = 7 if kind == 3 or sizes.get("deferred") else 0
    assert one_stage(*actions, **{**sizes, "gathered": 0}) == [moment, there, grown, flying, kind]
    assert one_stage(*actions, **sizes)[0] == moment + more


def test_another_chunks_gathered_parameters_stay() -> None:
    """Each chunk's come with its first forward and are there while the other runs."""
    rows = np.array([(0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 0, 0)], dtype=np.int32)
    schedule = Schedule((rows,), 1, np.array([[0, 0], [0, 1]], dtype=np.int32))
    sizes = np.zeros((1, 2, 9))
    sizes[0, :, 4] = 10.0, 100.0
    sizes[0, :, 7] = 3.0, 20.0
    assert find_peaks(schedule, sizes)[0, MOMENT] == 100.0 + 3.0


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


def test_weights_gathered_in_8_bits_are_kept_so(make_job: JobMaker, gpu: Hardware) -> None:
    """Of the middle stage, which has no table, all layers stay gathered: norms alone in 16 bits."""
    way = {"pp": 3, "dp": 8, "zero_stage": 3, "reshard_after_forward": False, "precision": "fp8"}
    job = make_job(**way, model={"family": "llama", "layers": 9, "seq_len": 2048})
    batches = [replace(job.batch, fp8_scaling="dynamic", fp8_parameters=narrow) for narrow in (False, True)]
    wide, narrow = (estimate_memory(replace(job, batch=batch), gpu).stages[1] for batch in batches)
    m = job.model
    assert wide.temporary - narrow.temporary == pytest.approx(3 * (4 * m.hidden**2 + 3 * m.hidden * m.ffn))
    assert (wide.parameters, wide.gradients) == (narrow.parameters, narrow.gradients)


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
