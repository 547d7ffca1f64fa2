"""What a stage runs beside its layers: the optimizer, shared tables, the order of schedules on equal stages."""

from dataclasses import replace
from typing import Any

import pytest

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import OptimizerSpec
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import lower
from tests.simulator.any_job import FABRIC
from tests.simulator.conftest import JobMaker
from tests.simulator.iteration.test_simulate import FlatLatency


def optimizer(job: Job, hardware: Hardware, stage: int = 0) -> list[Op | Collective]:
    return [node.work for node in lower(job, hardware).program("optimizer", stage).nodes]


def having(job: Job, **fields: Any) -> Job:
    return replace(job, optimizer=OptimizerSpec(**fields))


def test_the_tied_table_is_summed_between_first_and_last_stage_alone(make_job: JobMaker, gpu: Hardware) -> None:
    job = make_job(pp=4, model={"tied_embeddings": True})
    table = Collective("all_reduce", 256 * 64 * 4, 2, 2)
    assert [table in optimizer(job, gpu, stage) for stage in range(4)] == [True, False, False, True]
    assert table not in optimizer(make_job(pp=4), gpu)


@pytest.mark.parametrize(("vocab_parallel", "rows"), [(True, 128), (False, 256)])
def test_the_tied_table_is_a_ranks_part_of_it(
    make_job: JobMaker, gpu: Hardware, vocab_parallel: bool, rows: int
) -> None:
    job = make_job(pp=2, tp=2, vocab_parallel=vocab_parallel, model={"tied_embeddings": True})
    assert Collective("all_reduce", rows * 64 * 4, 2, 2) in optimizer(job, gpu)


def test_a_table_that_one_stage_holds_needs_no_message(make_job: JobMaker, gpu: Hardware) -> None:
    """In a V the first stage holds embedding and head."""
    job = make_job(pp=2, schedule="zbv", virtual_stages=2, model={"tied_embeddings": True})
    assert not any(isinstance(work, Collective) for stage in range(2) for work in optimizer(job, gpu, stage))


def test_one_kernel_or_one_for_each_operation(make_job: JobMaker, gpu: Hardware) -> None:
    """Weight decay of AdamW is one pass more."""
    fused, adam, adamw = (
        [work.kind for work in optimizer(having(make_job(), kind=kind, fused=is_fused), gpu)]
        for kind, is_fused in (("adamw", True), ("adam", False), ("adamw", False))
    )
    assert fused == ["adamw"]
    assert adamw == ["elementwise", *adam]


def test_an_offloaded_step_runs_in_the_hosts_memory(make_job: JobMaker, gpu: Hardware) -> None:
    """Gradients down, Adam where its states are, parameters up; slower than on the device."""
    job = make_job(precision="bf16")
    away = having(job, offload=True)
    assert [(work.kind, getattr(work, "dtype", "")) for work in optimizer(away, gpu)] == [
        ("to_host", "fp32"), ("adamw_host", "fp32"), ("from_host", "bf16"),
    ]  # fmt: skip
    times = [simulate(j, RooflineLatency(gpu, FABRIC)).breakdown["optimizer"] for j in (job, away)]
    assert times[0] < times[1]


def test_clipping_needs_the_norm_of_all_ranks_gradients(make_job: JobMaker, gpu: Hardware) -> None:
    """One number from all tensor- and pipeline-parallel ranks, and from all shards."""
    job = having(make_job(tp=2, pp=2, dp=2, zero_stage=1), clip_grad_norm=True)
    sums = [(w.group_size, w.num_bytes) for w in optimizer(job, gpu) if isinstance(w, Collective)]
    assert sums[:2] == [(4, 4), (2, 4)]
    assert len(set(lower(job, gpu).meets.tolist())) == 1


@pytest.mark.parametrize(
    ("precision", "dtype", "kinds"),
    [
        ("fp16", "", ["cast", "elementwise"]),
        ("fp16", "fp32", ["elementwise"]),
        ("bf16", "", []),
    ],
)
def test_gradients_of_a_scaled_loss_are_cast_and_divided(
    make_job: JobMaker, gpu: Hardware, precision: str, dtype: str, kinds: list[str]
) -> None:
    """Whatever the optimizer: fp16 alone scales its loss, and only its gradients are not yet fp32."""
    works = optimizer(make_job(precision=precision, gradient_dtype=dtype), gpu)
    assert [work.kind for work in works] == [*kinds, "adamw", "cast"]


@pytest.mark.parametrize(("dp", "zero_stage", "shards"), [(1, 0, 1), (4, 0, 1), (4, 1, 4), (4, 2, 4), (4, 3, 4)])
def test_a_rank_steps_its_share(make_job: JobMaker, gpu: Hardware, dp: int, zero_stage: int, shards: int) -> None:
    whole = optimizer(make_job(), gpu)[0]
    part = next(work for work in optimizer(make_job(dp=dp, zero_stage=zero_stage), gpu) if work.kind == "adamw")
    assert isinstance(whole, Op) and isinstance(part, Op)
    assert part.dims[0] == pytest.approx(whole.dims[0] / shards, rel=1e-3)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_every_nth_layer_is_recomputed(make_job: JobMaker, gpu: Hardware, every: int) -> None:
    """Layers 0, n, 2n … of a stage run their attention again."""
    job = make_job(model={"layers": 5}, recompute="full", recompute_every=every, precision="bf16")
    kinds = [node.work.kind for node in lower(job, gpu).program("backward").nodes]
    assert kinds.count("attention") == -(-5 // every)
    assert kinds.count("attention_backward") == 5


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 12, 3), (4, 8, 4)])
def test_bubble_of_interleaved_stages(
    make_job: JobMaker, gpu: Hardware, stages: int, micro_batches: int, chunks: int
) -> None:
    """(p - 1) / (v m) of the ideal time (Narayanan et al. 2021, section 2.2)."""
    job = make_job(pp=stages, micro_batches=micro_batches, virtual_stages=chunks, model={"layers": stages * chunks})
    result = simulate(job, FlatLatency(gpu, 1.0, 2.0))
    ideal = 3.0 * chunks * micro_batches
    assert result.iteration_time_s == pytest.approx(ideal * (1 + (stages - 1) / (chunks * micro_batches)))
    assert result.breakdown["bubble"] == pytest.approx(3.0 * (stages - 1))


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 4, 3)])
def test_bubble_breadth_first(make_job: JobMaker, gpu: Hardware, stages: int, micro_batches: int, chunks: int) -> None:
    """Lamy-Poirier 2022: the same, filling and draining once a pass over the chunks."""
    job = make_job(
        pp=stages, micro_batches=micro_batches, virtual_stages=chunks, schedule="looped-bfs",
        model={"layers": stages * chunks},
    )  # fmt: skip
    result = simulate(job, FlatLatency(gpu, 1.0, 2.0))
    assert result.iteration_time_s == pytest.approx(3.0 * chunks * micro_batches + 3.0 * (stages - 1))


class SplitLatency(FlatLatency):
    """Backwards in two halves of given length."""

    def __init__(self, hardware: Hardware, forward: float, of_input: float, of_weights: float) -> None:
        super().__init__(hardware, forward, 0.0)
        self._seconds |= {"input": of_input, "weight": of_weights}


@pytest.mark.parametrize(("forward", "of_input", "of_weights"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 2.0, 1.0)])
@pytest.mark.parametrize("stages", [2, 4, 6])
def test_bubble_of_zero_bubble_h1(
    make_job: JobMaker, gpu: Hardware, stages: int, forward: float, of_input: float, of_weights: float
) -> None:
    """Qi et al. 2023, table 1: the last stage to end has idled (p - 1) (F + B - W), B the input's gradient."""
    job = make_job(pp=stages, micro_batches=3 * stages, schedule="zb-h1", model={"layers": stages})
    result = simulate(job, SplitLatency(gpu, forward, of_input, of_weights))
    work = 3 * stages * (forward + of_input + of_weights)
    bubble = (stages - 1) * (forward + of_input - of_weights)
    assert result.clocks[0, 0] == pytest.approx(work + bubble)
    assert result.iteration_time_s <= work + bubble + (stages - 1) * of_weights + 1e-9
