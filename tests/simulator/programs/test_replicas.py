"""Traffic between replicas: every gradient once, parameters when they are needed, volumes as published."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Fabric, Hardware, Link
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.durations.segment_timing import timer_of
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import lower
from stepsight.simulator.programs.sizes import groups_of, part_shapes, rank_shape
from stepsight.simulator.programs.stage import _gathered, part_units
from tests.simulator.any_job import EXPERTS
from tests.simulator.conftest import JobMaker

MIXTURE = {"family": "llama", **EXPERTS, "dense_layers": 1, "moe_every": 2, "layers": 7}


def sent(program: Program, kind: str = "") -> list[Collective]:
    """Collectives beside the computation, in the order of issue."""
    works = [node.work for node in program.nodes if node.stream.startswith("dp")]
    return [work for work in works if isinstance(work, Collective) and kind in ("", work.kind)]


def arriving(job: Job) -> list[tuple[int, bool]]:
    """Elements of all gradients of a part in the order of arrival, and whether experts'."""
    found = []
    for unit in reversed(part_units(rank_shape(job), part_shapes(job)[0])):
        own = [(numel, step.expert) for step in reversed(unit.block) for numel in step.parameters]
        found += own * unit.times
    return found


@pytest.mark.parametrize(
    ("scaling", "narrow"),
    [("dynamic", True), ("rowwise", False), ("delayed", True), ("current", True), ("mxfp8", True)],
)
def test_fsdp_gathers_weights_of_linears_in_8_bits(
    make_job: JobMaker, gpu: Hardware, scaling: str, narrow: bool
) -> None:
    """One byte an element, and two for norms and the table; with a scale for each row all is gathered in 16 bits."""
    job = make_job(dp=4, zero_stage=3, micro_batches=1, precision="fp8", model={"family": "llama"})
    job = replace(job, batch=replace(job.batch, fp8_scaling=scaling, fp8_parameters=True))
    m, layers = job.model, job.model.layers
    linears = 4 * m.hidden**2 + 3 * m.hidden * m.ffn
    others = layers * 2 * m.hidden + m.hidden + 2 * m.vocab * m.hidden
    forward, backward = (lower(job, gpu).program(label, 0, 0) for label in ("forward", "backward"))
    gathered = sum(work.num_bytes for work in sent(forward, "all_gather"))
    assert gathered == (1 if narrow else 2) * layers * linears + 2 * others
    reduced = sum(work.num_bytes for work in sent(backward, "reduce_scatter"))
    assert reduced == 4 * (layers * linears + others)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("scaling", "stored", "narrow"),
    [("current", True, True), ("current", False, False), ("delayed", True, True), ("mxfp8", True, False)],
)
def test_megatrons_optimizer_gathers_parameters_in_8_bits_that_exist_so(
    make_job: JobMaker, gpu: Hardware, scaling: str, stored: bool, narrow: bool, overlaps: bool
) -> None:
    """Weights of linears, experts' too, but not the router, norms and tables; MXFP8 is gathered in 16 bits."""
    model = {"family": "llama", **EXPERTS}
    job = make_job(dp=4, zero_stage=1, micro_batches=1, precision="fp8", overlap_param_gather=overlaps, model=model)
    job = replace(job, batch=replace(job.batch, fp8_scaling=scaling, fp8_parameters=stored))
    m, layers = job.model, job.model.layers
    linears = 4 * m.hidden**2 + 3 * m.experts * m.hidden * (m.expert_ffn or m.ffn)
    others = layers * (2 + m.experts) * m.hidden + m.hidden + 2 * m.vocab * m.hidden
    program = lower(job, gpu).program("forward" if overlaps else "optimizer")
    works = [node.work for node in program.nodes if node.stream != "compute" or not overlaps]
    gathered = sum(work.num_bytes for work in works if isinstance(work, Collective) and work.kind == "all_gather")
    assert gathered == (1 if narrow else 2) * layers * linears + 2 * others


def greedy(gradients: list[tuple[int, bool]], expert: bool, limit: float) -> list[int]:
    """Bytes of buckets: each is sent when it holds ``limit`` bytes, the last holds the rest."""
    buckets: list[int] = []
    held = 0
    for numel, of_expert in gradients:
        if of_expert == expert:
            held += 4 * numel
            if held >= limit:
                buckets, held = [*buckets, held], 0
    return [*buckets, held] if held else buckets


@pytest.mark.parametrize("model", [{}, {"tied_embeddings": True}, MIXTURE], ids=["dense", "tied", "experts"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mbytes=st.floats(1e-4, 1.0), ep=st.sampled_from([1, 2, 4]))
def test_buckets_are_those_of_a_greedy_walk(
    make_job: JobMaker, gpu: Hardware, model: dict[str, Any], mbytes: float, ep: int
) -> None:
    """Any bucket size: all gradients once, none but the last smaller, experts' apart and over who holds the same."""
    ep = ep if "experts" in model else 1
    job = make_job(dp=4, ep=ep, micro_batches=1, bucket_mbytes=mbytes, precision="bf16", model=model)
    works = sent(lower(job, gpu).program("backward"))
    gradients, groups = arriving(job), groups_of(job)
    if ep == 1:
        both = greedy(gradients, False, int(mbytes * 2**20)) + greedy(gradients, True, int(mbytes * 2**20))
        assert Counter(work.num_bytes for work in works) == Counter(both)
        return
    for group, expert in ((groups.replicas, False), (groups.experts, True)):
        own = [work.num_bytes for work in works if work.group_size == group.size]
        assert own == (greedy(gradients, expert, int(mbytes * 2**20)) if group.size > 1 else [])


def test_experts_held_by_tensor_parallel_ranks_are_summed(make_job: JobMaker, gpu: Hardware) -> None:
    """Four ranks, two for each expert, nothing else is held twice: experts' gradients alone are summed, over two."""
    job = make_job(tp=4, ep=2, expert_tp=1, micro_batches=1, model=MIXTURE | {"heads": 4, "ffn": 128})
    works = sent(lower(job, gpu).program("backward"))
    experts = sum(numel for numel, expert in arriving(job) if expert)
    assert {work.group_size for work in works} == {2}
    assert sum(work.num_bytes for work in works) == 4 * experts


def moved(work: Collective) -> float:
    """Bytes that each rank sends in a ring."""
    passes = 2 if work.kind == "all_reduce" else 1
    return passes * work.num_bytes * (work.group_size - 1) / work.group_size


def iteration_volume(job: Job, gpu: Hardware) -> float:
    low = lower(job, gpu)
    indices = [*low.segment.tolist(), int(low.optimizer[0])]
    works = [node.work for at in indices for node in low.segments[at].program.nodes
             if isinstance(node.work, Collective) and node.share == 1.0]  # fmt: skip
    return sum(moved(work) for work in works)


@pytest.mark.parametrize(("zero_stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_volumes_of_zero(make_job: JobMaker, gpu: Hardware, zero_stage: int, times: int) -> None:
    """Rajbhandari et al. 2020, section 7: twice the parameters, with stage 3 three times (all counted in fp32).

    FSDP's root (embedding, head) is gathered once for both passes.
    """
    job = make_job(dp=8, zero_stage=zero_stage, micro_batches=1)
    gradients = arriving(job)
    parameters = 4 * sum(numel for numel, _ in gradients)
    units = part_units(rank_shape(job), part_shapes(job)[0])
    root = 4 * sum(sum(step.parameters) for unit in units if unit.root for step in unit.block)
    expected = times * parameters - (root if zero_stage == 3 else 0)
    assert iteration_volume(job, gpu) == pytest.approx(expected * 7 / 8)


def test_hybrid_shards_send_a_shard_between_groups(make_job: JobMaker, gpu: Hardware) -> None:
    """HSDP: within a group as FSDP, then an all-reduce of what each rank holds between groups."""
    job = make_job(dp=8, dp_shard=4, zero_stage=3, micro_batches=1)
    works = sent(lower(job, gpu).program("backward"))
    scattered = sum(work.num_bytes for work in works if work.kind == "reduce_scatter")
    assert scattered == 4 * sum(numel for numel, _ in arriving(job))
    assert {(work.kind, work.group_size) for work in works} == {
        ("all_gather", 4), ("reduce_scatter", 4), ("all_reduce", 2),
    }  # fmt: skip
    between = sum(work.num_bytes for work in works if work.kind == "all_reduce")
    assert between == pytest.approx(scattered / 4, rel=1e-3)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("model", [{"layers": 6}, MIXTURE], ids=["dense", "experts"])
def test_parameters_are_gathered_as_often_as_they_were_freed(
    make_job: JobMaker, gpu: Hardware, model: dict[str, Any], prefetch: int, reshard: bool
) -> None:
    """Resharded: in every forward and every backward; else once an iteration, before the first forward."""
    job = make_job(dp=4, zero_stage=3, prefetch=prefetch, reshard_after_forward=reshard, micro_batches=2, model=model)
    low = lower(job, gpu)
    gathers = [
        [len(sent(low.program(label, 0, micro), "all_gather")) for micro in range(2)]
        for label in ("forward", "backward")
    ]
    units = [unit for unit in part_units(rank_shape(job), part_shapes(job)[0]) if not unit.root]
    mixed = [any(step.expert for step in unit.block) for unit in units]
    layers = sum(unit.times * (1 + experts) for unit, experts in zip(units, mixed, strict=True))
    assert gathers == ([[layers + 1] * 2, [layers] * 2] if reshard else [[layers + 1, 0], [0, 0]])


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_slow_computation_hides_all_but_the_first_gathers(make_job: JobMaker, gpu: Hardware, prefetch: int) -> None:
    """Exposed: the root and the first layer in forward; in backward the last layer travels beside the head."""
    job = make_job(dp=4, zero_stage=3, prefetch=prefetch, micro_batches=1, micro_batch=64, model={"layers": 6})
    device = replace(gpu, comm_compute_share=0.0)
    latency = RooflineLatency(device, Fabric("fast", Link(1e12, 1e-6), Link(1e12, 1e-6)))
    result = simulate(job, latency)
    counts = {work.kind: 0.0 for work in result.op_counts if isinstance(work, Collective)}
    for work, count in result.op_counts.items():
        if isinstance(work, Collective):
            counts[work.kind] += count
    assert counts == {"all_gather": 2.0, "reduce_scatter": 1.0}


def test_without_prefetch_every_gather_is_exposed(make_job: JobMaker, gpu: Hardware) -> None:
    job = make_job(dp=4, zero_stage=3, prefetch=0, micro_batches=1, micro_batch=64, model={"layers": 6})
    device = replace(gpu, comm_compute_share=0.0)
    result = simulate(job, RooflineLatency(device, Fabric("fast", Link(1e12, 1e-6), Link(1e12, 1e-6))))
    gathers = sum(n for work, n in result.op_counts.items() if work.kind == "all_gather")
    assert gathers >= 1 + 6 + 5  # in backward the last layer's may pass beside the head


def test_costs_of_a_ring(gpu: Hardware) -> None:
    """n - 1 steps of 1/n of the buffer each; an all-reduce scatters and gathers."""
    size, num_bytes, link = 8, 2**20, Link(1e9, 1e-6)
    latency = RooflineLatency(gpu, Fabric("one", link, link))
    works = [Collective(kind, num_bytes, size, size) for kind in ("reduce_scatter", "all_gather", "all_reduce")]
    steps = (size - 1) * (link.latency_s + num_bytes / size / link.bandwidth_bytes_per_s)
    assert latency.collective_seconds(works) == pytest.approx(np.array([steps, steps, 2 * steps]))


def test_zero_1_may_send_all_sums_to_every_rank(make_job: JobMaker, gpu: Hardware) -> None:
    """As DeepSpeed's BF16 optimizer: gradients all-reduced in fp32, then shards stepped and gathered in bf16."""
    asked = {"zero_stage": 1, "overlap_grad_reduce": False, "precision": "bf16", "gradient_dtype": "fp32-cast"}
    shares, sums = (make_job(dp=4, **asked, reduce_scatter=flag) for flag in (True, False))
    kinds = [[work.kind for work in sent(lower(job, gpu).program("optimizer"))] for job in (shares, sums)]
    assert set(kinds[0]) == {"reduce_scatter", "all_gather"}
    assert kinds[1] == ["all_reduce" if kind == "reduce_scatter" else kind for kind in kinds[0]]


def test_lists_cost_the_host_two_calls_for_each_part_and_recomputation_gathers_for_itself(
    make_job: JobMaker, gpu: Hardware
) -> None:
    """DeepSpeed 0.3: as many bytes in forward; every call adds to the time, as the device waits for the host."""
    job = make_job(dp=8, zero_stage=3, micro_batches=1, precision="fp16", model={"layers": 3}, recompute="full")
    lists = replace(job, execution=replace(job.execution, engine="deepspeed-0.3"))
    forward, before = lower(lists, gpu).program("forward"), lower(job, gpu).program("forward")
    assert sent(forward, "all_gather") == sent(before, "all_gather")
    layer = next(u for u in part_units(rank_shape(job), part_shapes(job)[0]) if not u.root)
    calls = [node.work.dims[0] for node in forward.nodes if node.work.kind == "host_calls"]
    assert calls[1:] == [2 * 8 * len(layer.tensors[False])] * 3
    latency = RooflineLatency(
        replace(gpu, host_op_s=1e-3, comm_compute_share=0.2), Fabric("toy", Link(1e11, 0.0), Link(1e11, 0.0))
    )
    assert simulate(lists, latency).iteration_time_s > 1e-3 * (sum(calls) + 3 * calls[-1])
    timer = timer_of(latency)
    for segment in lower(lists, latency.hardware).segments:  # events and ops tell the same
        in_events, in_ops = timer.segment(segment), timer.ops(segment)
        assert in_events.transition == pytest.approx(in_ops.transition)


@pytest.mark.parametrize(
    ("tensors", "twice", "gathered"),
    [
        ((6, 6, 2, 4), False, (6, 6, 2, 4)),
        ((6, 6, 2, 4), True, (6, 6, 2, 4, 6, 2, 4)),  # the last one that forward uses is still there for backward
        ((4, 1, 6), True, (4, 1, 6, 6)),
    ],
)
def test_what_is_used_again_soon_is_gathered_once(
    tensors: tuple[int, ...], twice: bool, gathered: tuple[int, ...]
) -> None:
    """In units of 1e8 elements: gathered again are those with 1e9 of others in between; small tensors stay."""
    found = _gathered((50_000, *(10**8 * n for n in tensors)), lists=True, twice=twice)
    assert found == tuple(10**8 * n for n in gathered)
