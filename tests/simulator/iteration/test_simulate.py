from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Fabric, Hardware, Link
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.clock import engine, track
from stepsight.simulator.clock.engine import HOST, NUM_CLOCKS
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.durations.segment_timing import Timer
from stepsight.simulator.iteration.simulate import Simulation, distinct_pipelines, simulate, simulate_lowered
from stepsight.simulator.iteration.simulate_many import STEP, can_simulate_many, simulate_many
from stepsight.simulator.programs.op_level import CLOCK_STREAMS, Work
from stepsight.simulator.schedules.order import COMPUTE, POST
from tests.simulator.any_job import FABRIC, devices, jobs
from tests.simulator.conftest import JobMaker

Seconds = NDArray[np.float64]


class FlatLatency:
    """Every segment of a kind takes the same time, whatever it holds."""

    knows_context = True

    def __init__(self, hardware: Hardware, forward: float, backward: float, message: float = 0.0) -> None:
        self.hardware = hardware
        self._seconds = {"forward": forward, "backward": backward, "optimizer": 0.0}
        self._message = message

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        return np.ones(len(ops))

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return np.full(len(collectives), self._message)

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        return [np.full(len(p), self._seconds[p.label] / len(p)) for p in programs]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 8), (8, 32)])
def test_bubble_of_equal_stages(
    make_job: JobMaker, gpu: Hardware, schedule: str, stages: int, micro_batches: int
) -> None:
    """GPipe and 1F1B idle for (p - 1) / m of the ideal time (Narayanan et al. 2021, section 2.2)."""
    job = make_job(pp=stages, micro_batches=micro_batches, schedule=schedule, model={"layers": 8})
    result = simulate(job, FlatLatency(gpu, 1.0, 2.0))
    assert result.iteration_time_s == pytest.approx(3.0 * (micro_batches + stages - 1))
    assert result.breakdown["bubble"] == pytest.approx(3.0 * (stages - 1))
    assert result.breakdown["compute"] == pytest.approx(3.0 * micro_batches)
    flushed = simulate(replace(job, batch=replace(job.batch, flushes=2)), FlatLatency(gpu, 1.0, 2.0))
    assert flushed.iteration_time_s == pytest.approx(3.0 * (micro_batches + 2 * (stages - 1)))


def test_messages_of_one_micro_batch(make_job: JobMaker, gpu: Hardware) -> None:
    """One micro-batch passes every boundary forth and back."""
    result = simulate(make_job(pp=4, micro_batches=1), FlatLatency(gpu, 1.0, 2.0, message=0.25))
    assert result.iteration_time_s == pytest.approx(4 * 3.0 + 6 * 0.25)
    assert result.breakdown["pp_communication"] == pytest.approx(6 * 0.25)


def test_messages_pass_when_they_are_asked_for(make_job: JobMaker, gpu: Hardware) -> None:
    """Two stages, two micro-batches, 1F1B: the last stage waits for each message, the first for the first gradient."""
    result = simulate(make_job(pp=2, micro_batches=2), FlatLatency(gpu, 1.0, 1.0, message=0.25))
    assert result.iteration_time_s == pytest.approx(1.25 + 2.0 + 0.25 + 2.0 + 0.25 + 1.0)


def op_seconds_in_sum(result: Simulation) -> float:
    """Seconds of all nodes of all actions and optimizers."""
    low = result.lowered
    runs = np.bincount(np.concatenate([low.segment, low.optimizer]), minlength=len(low.segments))
    return float(sum(n * result.timer.node_seconds(s).sum() for n, s in zip(runs, low.segments, strict=True)))


def test_one_rank_is_the_sum_of_its_ops(make_job: JobMaker, cpu: Hardware) -> None:
    result = simulate(make_job(micro_batches=3), RooflineLatency(cpu, FABRIC))
    assert result.iteration_time_s == pytest.approx(op_seconds_in_sum(result))
    assert result.breakdown["bubble"] == pytest.approx(0.0, abs=1e-12)


def test_gradients_hide_behind_backward_on_fast_links(make_job: JobMaker, gpu: Hardware) -> None:
    """All but the last bucket of DDP is free when links are fast and communication takes no cores."""
    device = replace(gpu, comm_compute_share=0.0)
    job = make_job(dp=8, micro_batches=1, bucket_mbytes=0.05, micro_batch=8)
    result = simulate(job, RooflineLatency(device, Fabric("fast", Link(1e13, 1e-7), Link(1e13, 1e-7))))
    last = [w for w, n in result.op_counts.items() if isinstance(w, Collective)]
    assert sum(result.op_counts[work] for work in last) == 1.0


def test_communication_takes_cores(make_job: JobMaker, cpu: Hardware) -> None:
    """On CPU an overlapped all-reduce costs its share of the computation."""
    job = make_job(dp=2, micro_batches=1, bucket_mbytes=0.05, micro_batch=8)
    fast = Fabric("fast", Link(1e9, 1e-6), Link(1e9, 1e-6))
    free = simulate(job, RooflineLatency(replace(cpu, comm_compute_share=0.0), fast))
    dear = simulate(job, RooflineLatency(replace(cpu, comm_compute_share=1.0), fast))
    assert dear.iteration_time_s > free.iteration_time_s
    assert dear.breakdown["compute"] == pytest.approx(free.breakdown["compute"])
    assert dear.breakdown["dp_communication"] > free.breakdown["dp_communication"]


def test_fsdp_on_cpu_waits_for_every_collective(make_job: JobMaker, cpu: Hardware) -> None:
    result = simulate(make_job(dp=2, zero_stage=3, micro_batches=2), RooflineLatency(cpu, FABRIC))
    assert result.iteration_time_s == pytest.approx(op_seconds_in_sum(result))


STRATEGIES: list[dict[str, Any]] = [
    {},
    {"dp": 2},
    {"dp": 4, "zero_stage": 1, "bucket_mbytes": 0.05},
    {"dp": 2, "zero_stage": 2, "pp": 2},
    {"dp": 2, "zero_stage": 3},
    {"tp": 2},
    {"tp": 4, "sequence_parallel": True, "recompute": "full"},
    {"pp": 2, "schedule": "gpipe"},
    {"pp": 4, "dp": 2, "tp": 2, "recompute": "selective", "bucket_mbytes": 0.02},
    {"pp": 3, "dp": 2, "zero_stage": 3},
    {"dp": 4, "zero_stage": 3, "prefetch": 2, "reshard_after_forward": False},
    {"dp": 4, "dp_shard": 2, "zero_stage": 3},
    {"dp": 4, "dp_shard": 2, "zero_stage": 1, "overlap_param_gather": True, "bucket_mbytes": 0.05},
    {"dp": 2, "tp": 2, "overlap_grad_reduce": False, "order": "dp-tp-cp-pp"},
    {"cp": 2, "dp": 2, "bucket_mbytes": 0.02},
    {"cp": 4, "context_parallel": "all_gather", "zero_stage": 3},
    {"pp": 2, "virtual_stages": 2, "micro_batches": 4},
    {"pp": 2, "schedule": "zb-h1", "dp": 2, "bucket_mbytes": 0.02},
    {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "micro_batches": 4, "dp": 2},
    {"pp": 2, "schedule": "1f1b", "runtime": "torch", "recompute": "full", "recompute_every": 2},
]


def strategies() -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda s, m, f: {"micro_batches": m, **s, "model": {"family": f, "layers": 5}},
                     st.sampled_from(STRATEGIES), st.integers(1, 5), st.sampled_from(["gpt", "llama"]))  # fmt: skip


def run(make_job: JobMaker, hardware: Hardware, strategy: dict[str, Any], fabric: Fabric = FABRIC) -> Simulation:
    return simulate(make_job(**strategy), RooflineLatency(hardware, fabric))


QUICK = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(strategy=strategies(), on_gpu=st.booleans())
def test_what_adds_up(make_job: JobMaker, gpu: Hardware, cpu: Hardware, strategy: dict[str, Any], on_gpu: bool) -> None:
    """The breakdown adds up to the iteration time, and so does n_i * t_i."""
    result = run(make_job, gpu if on_gpu else cpu, strategy)
    assert sum(result.breakdown.values()) == pytest.approx(result.iteration_time_s, rel=1e-12)
    assert min(result.breakdown.values()) > -1e-9
    seconds = dict(zip(result.lowered.all_works, result.work_seconds, strict=True))
    total = sum(count * seconds[work] for work, count in result.op_counts.items())
    assert total == pytest.approx(result.iteration_time_s, rel=1e-9)


@QUICK
@given(strategy=strategies(), data=st.data())
def test_counts_are_the_derivative(
    make_job: JobMaker, gpu: Hardware, strategy: dict[str, Any], data: st.DataObject
) -> None:
    """T(t + e) - T(t) = n_i * e for a small enough e."""
    result = run(make_job, gpu, strategy)
    works = result.lowered.all_works
    at = data.draw(st.integers(0, len(works) - 1))
    step, count = 1e-10, result.op_counts.get(works[at], 0.0)
    above, below = (again(result, gpu, {works[at]: result.work_seconds[at] + e}) for e in (step, -step))
    assert (above - result.iteration_time_s) / step >= count - 1e-2  # T is convex in every t_i
    assert (result.iteration_time_s - below) / step <= count + 1e-2


def again(result: Simulation, hardware: Hardware, seconds: dict[Any, float]) -> float:
    """The iteration time with other seconds of some signatures."""
    latency = RooflineLatency(hardware, FABRIC)
    pipelines = distinct_pipelines(result.job, latency)
    return simulate_lowered(result.job, result.lowered, Timer(latency, seconds), hardware, pipelines).iteration_time_s


@QUICK
@given(strategy=strategies(), factor=st.floats(1.0, 100.0))
def test_more_bandwidth_never_slows(make_job: JobMaker, gpu: Hardware, strategy: dict[str, Any], factor: float) -> None:
    faster = Fabric("fast", *(replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
                              for link in (FABRIC.intra_node, FABRIC.inter_node)))  # fmt: skip
    slow, fast = run(make_job, gpu, strategy), run(make_job, gpu, strategy, faster)
    assert fast.iteration_time_s <= slow.iteration_time_s * (1 + 1e-12)


HOSTS = (  # what launches take: nothing, all alike, by kind, products alone
    {},
    {"host_op_s": 3e-6},
    {"host_op_s": 1e-5, "host_kinds_s": {"linear": 5e-5, "all_reduce": 1e-6, "add": 2e-6}},
    {"host_kinds_s": {"linear": 2e-5}},
)


@QUICK
@given(strategy=strategies(), host=st.sampled_from(HOSTS))
def test_folded_is_unfolded(make_job: JobMaker, gpu: Hardware, strategy: dict[str, Any], host: dict[str, Any]) -> None:
    """Repeated layers as one step, or every op on its own: the same paths from every clock to every clock."""
    result = run(make_job, replace(gpu, **host), strategy)
    for segment in result.lowered.segments:
        folded, unfolded = result.timer.segment(segment), result.timer.ops(segment)
        assert folded.transition == pytest.approx(unfolded.transition, rel=1e-9, abs=1e-15)
        carried = result.timer.ops(segment, carried=True)
        assert folded.carried == pytest.approx(carried.transition, rel=1e-9, abs=1e-15)
        together = np.maximum(folded.carried[:HOST, 0], folded.carried[:HOST, HOST])  # both start at once
        assert folded.transition[:, 0] == pytest.approx(together, rel=1e-9, abs=1e-15)


@QUICK
@given(strategy=strategies(), host=st.sampled_from(HOSTS))
def test_segments_compose_to_the_whole_graph(
    make_job: JobMaker, gpu: Hardware, strategy: dict[str, Any], host: dict[str, Any]
) -> None:
    """Two levels give what one walk over every op of every stage gives: no stream runs two ops at once, every
    dependency holds, nothing runs before it is launched, and the end is the same."""
    hardware = replace(gpu, **host)
    result = run(make_job, hardware, strategy)
    low, track, free = result.lowered, result.lowered.track, {}
    clocks = np.zeros((low.num_stages, NUM_CLOCKS))
    host_at = np.zeros(low.num_stages)

    def run_ops(stage: int, index: int) -> None:
        segment, finish, begin = low.segments[index], [], clocks[stage, 0]
        if low.num_stages > 1:  # it waited for a message
            host_at[stage] = begin
        needs: list[list[int]] = [[] for _ in segment.program.nodes]
        for before, after, _ in segment.program.edges:
            needs[after].append(before)
        graph = segment.graph
        rows = zip(segment.program.nodes, result.timer.node_seconds(segment).tolist(), needs,
                   graph.blocks.tolist(), graph.taken.tolist(), graph.early.tolist(), strict=True)  # fmt: skip
        for node, duration, wait, blocks, taken, early in rows:
            start = max([begin, free.get((stage, node.stream), 0.0), *(finish[n] for n in wait)])
            launch = 0.0 if taken else hardware.launch_s(node.work)
            host_at[stage] += launch
            if launch and not early:
                start = max(start, host_at[stage])
            finish.append(start + duration)
            free[stage, node.stream] = finish[-1]
            clock = CLOCK_STREAMS.index(node.stream) if node.stream in CLOCK_STREAMS else 0
            for at in {clock, 0} if blocks else {clock}:
                clocks[stage, at] = max(clocks[stage, at], finish[-1])

    posted = np.zeros((track.num_messages, 2))
    for op, stage, index, side in zip(*(column.tolist() for column in track.entries), strict=True):
        if op == COMPUTE:
            run_ops(stage, int(low.segment[index]))
        elif op == POST:
            posted[index, side] = clocks[stage, 0]
        else:
            seconds = result.timer.work_seconds(low.messages)[low.message[index]]
            clocks[stage, 0] = max(clocks[stage, 0], posted[index].max() + seconds)
    clocks[:, 0] = clocks.max(axis=1)
    for stage in range(low.num_stages):
        run_ops(stage, int(low.optimizer[stage]))
    assert clocks.max() == pytest.approx(result.iteration_time_s, rel=1e-12)
    assert result.finish[:, :NUM_CLOCKS] == pytest.approx(clocks, rel=1e-9, abs=1e-15)


@QUICK
@given(
    micro_batches=st.integers(1, 40),
    host=st.floats(1e-7, 1e-4),
    clip=st.booleans(),
    family=st.sampled_from(["gpt", "llama"]),
)
def test_the_host_runs_ahead(
    make_job: JobMaker, gpu: Hardware, micro_batches: int, host: float, clip: bool, family: str
) -> None:
    """One device: the end lies between what host and device take each on their own and both in turn; however many
    micro-batches are skipped, walking all of them ends at the same time; and the parts add up."""
    job = make_job(micro_batches=micro_batches, model={"family": family})
    job = replace(job, optimizer=replace(job.optimizer, clip_grad_norm=clip))
    free, result = (simulate(job, RooflineLatency(replace(gpu, host_op_s=s), FABRIC)) for s in (0.0, host))
    launches = host * sum(
        float(sum(not taken for taken in result.lowered.segments[at].graph.taken.tolist()))
        for at in [*result.lowered.segment.tolist(), *result.lowered.optimizer.tolist()]
    )
    assert result.iteration_time_s >= max(free.iteration_time_s, launches) * (1 - 1e-9)
    assert result.iteration_time_s <= free.iteration_time_s + launches
    pipeline_run = result.pipeline_runs[0]
    assert pipeline_run.run.clocks == pytest.approx(pipeline_run.clocks, rel=1e-9)
    assert sum(result.breakdown.values()) == pytest.approx(result.iteration_time_s)
    waited = result.iteration_time_s - free.iteration_time_s
    assert result.breakdown["host"] == pytest.approx(waited, rel=1e-6, abs=1e-12)
    assert free.launches_share == pytest.approx(0.0, abs=1e-9)
    assert result.launches_share >= waited / result.iteration_time_s * (1 - 1e-6) - 1e-9


def test_compiled_kernels_give_the_same(make_job: JobMaker, gpu: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted or compiled, every number is equal."""
    kernels = (
        engine.longest_paths,
        engine.add_path,
        engine.run_events,
        track.run_entries,
        track.run_periods,
        track.trace_path,
    )
    results = []
    for native in (False, True):
        for loop in kernels:
            monkeypatch.setattr(loop, "_native", loop.compile() if native else loop.function)
        results.append(run(make_job, gpu, {"pp": 4, "dp": 2, "tp": 2, "bucket_mbytes": 0.02, "micro_batches": 6}))
        assert results[-1].op_counts
    assert results[0].iteration_time_s == results[1].iteration_time_s
    assert results[0].op_counts == results[1].op_counts
    assert results[0].breakdown == results[1].breakdown


def test_equal_questions_give_equal_answers(make_job: JobMaker, gpu: Hardware) -> None:
    one, two = (run(make_job, gpu, {"pp": 4, "dp": 2}) for _ in range(2))
    assert one.iteration_time_s == two.iteration_time_s
    assert one.op_counts == two.op_counts


FAR = ("gemm", "all_gather", "all_reduce", "send_recv")  # kinds that count as outside of what was measured


def far(works: Sequence[Work]) -> list[bool]:
    return [work.kind in FAR for work in works]


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(some=st.lists(jobs(), min_size=1, max_size=6), hardware=devices())
def test_many_jobs_take_as_long_as_each_by_itself(some: list[Job], hardware: Hardware) -> None:
    """Any jobs in any order, several of them alike: the times of ``simulate``."""
    latency = RooflineLatency(hardware, FABRIC)
    alone = np.array([simulate(job, latency).iteration_time_s for job in some])
    together, _ = simulate_many(some, latency)
    assert together == pytest.approx(alone, rel=1e-12)
    again, _ = simulate_many([*some[::-1], *some], latency)
    assert again == pytest.approx(np.concatenate([together[::-1], together]), rel=1e-12)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(some=st.lists(jobs(), min_size=1, max_size=4), hardware=devices())
def test_a_part_is_that_of_the_critical_path(some: list[Job], hardware: Hardware) -> None:
    """As many seconds as its uses on the critical path take, where no other path is as long within ``STEP``."""
    latency = RooflineLatency(hardware, FABRIC)
    none = simulate_many(some, latency, lambda works: [False] * len(works))[1]
    for job, seconds, outside in zip(some, *simulate_many(some, latency, far), strict=True):
        simulation = simulate(job, latency)
        each = dict(zip(simulation.lowered.all_works, simulation.work_seconds, strict=True))
        expected = sum(n * each[w] for w, n in simulation.op_counts.items() if far([w])[0])
        shorter = {work: time * (1.0 - STEP) for work, time in each.items() if far([work])[0]}
        less = (seconds - again(simulation, hardware, shorter)) / STEP
        assert not none.any() and outside >= expected - 1e-6 * seconds
        if less == pytest.approx(outside, abs=1e-6 * seconds):
            assert outside == pytest.approx(expected, abs=1e-6 * seconds)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(job=jobs(uneven_cluster=True), hardware=devices())
def test_jobs_whose_ranks_differ_are_not_simulated_together(job: Job, hardware: Hardware) -> None:
    """Ranks that differ need pipelines of their own."""
    cluster = job.cluster
    alike = not (cluster.stragglers or cluster.slow_links or cluster.mixed)
    assert can_simulate_many(job, RooflineLatency(hardware, FABRIC)) == alike
