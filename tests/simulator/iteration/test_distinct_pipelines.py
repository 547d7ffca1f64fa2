"""Slow ranks, slow links and mixed nodes: what they slow, and that nothing else is told apart."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import Hardware, find_hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import OtherDevices, SlowLink, Straggler
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.clock.track import run_track
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.durations.segment_timing import AS_IT_IS, Slowdown, Timer
from stepsight.simulator.iteration.simulate import Pipeline, Simulation, distinct_pipelines, simulate
from stepsight.simulator.programs.lower import lower
from stepsight.simulator.programs.sizes import layout_of
from tests.simulator.any_job import EXPERTS, FABRIC, devices, jobs
from tests.simulator.conftest import JobMaker

MANY = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)


def having(job: Job, **cluster: Any) -> Job:
    return replace(job, cluster=replace(job.cluster, **cluster))


def seconds(job: Job, hardware: Hardware) -> float:
    return simulate(job, RooflineLatency(hardware, FABRIC)).iteration_time_s


def pipelines(job: Job, hardware: Hardware) -> tuple[Pipeline, ...]:
    return distinct_pipelines(job, RooflineLatency(hardware, FABRIC))


def slow(*ranks: int, by: float = 2.0) -> tuple[Straggler, ...]:
    return tuple(Straggler(rank=rank, slowdown=by) for rank in ranks)


def test_a_slow_rank_slows_its_replicas_stage_alone(make_job: JobMaker, gpu: Hardware) -> None:
    """Rank 9 of tp 2, dp 2, pp 3 is in stage 2 of replica 0; the other replica is as it was."""
    found = pipelines(having(make_job(tp=2, dp=2, pp=3, devices_per_node=2), stragglers=slow(9)), gpu)
    assert [(p.replicas[0], len(p.replicas)) for p in found] == [(0, 1), (1, 1)]
    assert found[0].slowdowns == (AS_IT_IS, AS_IT_IS, Slowdown(compute=2.0))
    assert found[1].slowdowns == (AS_IT_IS,) * 3


def test_a_slow_link_slows_its_stage_alone(make_job: JobMaker, gpu: Hardware) -> None:
    """Node 4 is stage 2 of replica 0; the other replica waits for it where both meet, in that stage."""
    job = having(make_job(tp=2, dp=2, pp=3, devices_per_node=2), slow_links=(SlowLink(node=4, slowdown=3.0),))
    found = pipelines(job, gpu)
    assert [pipeline.links for pipeline in found] == [(1.0, 1.0, 3.0), (1.0,) * 3]
    assert found[0].slowdowns == (AS_IT_IS, AS_IT_IS, Slowdown(data=3.0, inside=3.0))
    assert found[1].slowdowns == (AS_IT_IS, AS_IT_IS, Slowdown(data=3.0))


@given(ranks=st.sets(st.integers(0, 15), max_size=4))
def test_replicas_that_are_alike_are_simulated_once(make_job: JobMaker, gpu: Hardware, ranks: set[int]) -> None:
    """As many pipelines as there are kinds of replicas."""
    job = having(make_job(tp=2, dp=4, pp=2), stragglers=slow(*sorted(ranks)))
    layout, kinds = layout_of(job), set()
    for replica in range(4):
        own = [rank for rank in ranks if rank // layout.stride("dp") % 4 == replica]
        kinds.add(frozenset(rank // layout.stride("pp") for rank in own))
    found = pipelines(job, gpu)
    assert len(found) == len(kinds)
    assert sum(len(pipeline.replicas) for pipeline in found) == 4


@MANY
@given(job=jobs(), hardware=devices(), data=st.data())
def test_slow_by_nothing_is_not_slow(job: Job, hardware: Hardware, data: st.DataObject) -> None:
    """A slowdown of 1 changes no time, and folds all replicas into one."""
    rank = data.draw(st.integers(0, job.cluster.num_devices - 1))
    node = rank // job.cluster.devices_per_node
    even = having(job, stragglers=slow(rank, by=1.0), slow_links=(SlowLink(node=node, slowdown=1.0),))
    assert len(pipelines(even, hardware)) == 1
    assert seconds(even, hardware) == seconds(job, hardware)


@MANY
@given(job=jobs(), hardware=devices(), by=st.floats(1.0, 10.0), data=st.data())
def test_one_slow_rank_costs_no_more_than_all(job: Job, hardware: Hardware, by: float, data: st.DataObject) -> None:
    ranks = range(job.cluster.num_devices)
    rank = data.draw(st.sampled_from(ranks))
    one, every = (seconds(having(job, stragglers=slow(*some, by=by)), hardware) for some in ((rank,), ranks))
    assert seconds(job, hardware) <= one * (1 + 1e-9) <= every * (1 + 2e-9)


def test_a_replica_with_two_slow_stages_is_slower_than_two_with_one(make_job: JobMaker, gpu: Hardware) -> None:
    """Stages of one pipeline wait for each other; replicas meet at the end."""
    job = make_job(dp=2, pp=2, micro_batches=4, devices_per_node=2)
    plain, apart, same = (seconds(having(job, stragglers=s), gpu) for s in ((), slow(0, 3), slow(0, 2)))
    assert plain < apart < same


def test_sharded_replicas_move_at_the_pace_of_the_slowest(make_job: JobMaker, gpu: Hardware) -> None:
    """FSDP's meet in every layer: one slow rank in each of two stages is as bad as all ranks of both."""
    job = make_job(dp=2, pp=2, zero_stage=3, micro_batches=4, devices_per_node=2)
    apart, every = (seconds(having(job, stragglers=s), gpu) for s in (slow(0, 3), slow(0, 1, 2, 3)))
    assert apart == every


def test_hybrid_shards_are_in_step_within_a_group(make_job: JobMaker, gpu: Hardware) -> None:
    job = having(make_job(dp=8, dp_shard=2, zero_stage=3), stragglers=slow(5))
    assert [(p.replicas[0], len(p.replicas)) for p in pipelines(job, gpu)] == [(0, 6), (4, 2)]


def test_replicas_that_share_experts_are_in_step(make_job: JobMaker, gpu: Hardware) -> None:
    """Tokens of both go through all of their experts in every layer."""
    job = having(make_job(dp=4, ep=2, model={"family": "llama", **EXPERTS}), stragglers=slow(3))
    assert [(p.replicas[0], len(p.replicas)) for p in pipelines(job, gpu)] == [(0, 2), (2, 2)]


@pytest.mark.parametrize(
    ("job", "node", "slowed"),
    [
        ({"tp": 4}, 0, set()),  # four ranks on a node: nothing leaves it
        ({"tp": 4, "dp": 2}, 0, {"dp"}),
        ({"tp": 8, "dp": 2}, 1, {"tp", "dp"}),
        ({"tp": 2, "dp": 4, "order": "dp-tp-cp-pp"}, 0, {"tp"}),  # replicas share a node, tensor-parallel ranks do not
        ({"tp": 2, "cp": 4}, 1, {"cp", "dp"}),  # which hold the same parameters
        ({"tp": 4, "pp": 2}, 1, {"pp"}),
        ({"tp": 2, "pp": 2}, 0, set()),
    ],
)
def test_slow_links_slow_what_crosses_them(
    make_job: JobMaker, gpu: Hardware, job: dict[str, Any], node: int, slowed: set[str]
) -> None:
    """Nodes of four ranks, one with a slow way out: of the kinds of traffic there are, those that take it."""
    shape: dict[str, Any] = {"devices_per_node": 4, "model": {"heads": 8}, "overlap_grad_reduce": False}
    plain = make_job(**shape, **job)
    even, odd = (
        simulate(j, RooflineLatency(replace(gpu, comm_compute_share=0.0), FABRIC))
        for j in (plain, having(plain, slow_links=(SlowLink(node=node, slowdown=4.0),)))
    )
    kinds = {"tp", "cp", "dp", "pp"}
    more = {kind for kind in kinds if longer(odd, even, f"{kind}_communication")}
    assert more == slowed
    assert (odd.iteration_time_s > even.iteration_time_s) == bool(slowed)


def longer(one: Simulation, other: Simulation, part: str) -> bool:
    return one.breakdown[part] > other.breakdown[part] * (1 + 1e-9)


def test_a_slow_link_slows_messages_by_as_much(make_job: JobMaker, gpu: Hardware) -> None:
    """Two stages on two nodes: every message takes four times as long, which is all that is longer."""
    job = make_job(pp=2, micro_batches=1, devices_per_node=1)
    low = lower(job, gpu)
    (message,) = low.messages
    alone = float(RooflineLatency(gpu, FABRIC).collective_seconds([message])[0])
    odd = seconds(having(job, slow_links=(SlowLink(node=1, slowdown=4.0),)), gpu)
    assert odd - seconds(job, gpu) == pytest.approx(2 * 3 * alone)


@MANY
@given(job=jobs(), data=st.data())
def test_mixed_nodes_are_between_both_kinds(job: Job, data: st.DataObject) -> None:
    """Some A100, some H100: not slower than all A100, not faster than all H100.

    But for what collectives take of the computation beside them, which is the cluster's own devices' on all nodes.
    """
    job = replace(job, batch=replace(job.batch, precision="bf16"))
    nodes = tuple(sorted(data.draw(st.sets(st.integers(0, job.cluster.nodes - 1)))))
    old, new = (find_hardware(name) for name in ("a100-sxm-80gb", "h100-sxm-80gb"))
    assert old is not None and new is not None
    new = replace(new, compute_efficiency=0.72, comm_compute_share=old.comm_compute_share)
    mixed = seconds(having(job, mixed=(OtherDevices(nodes=nodes, hardware="a100-sxm-80gb"),)), new)
    slowest, fastest = seconds(job, old), seconds(job, new)
    assert fastest * (1 - 1e-9) <= mixed <= slowest * (1 + 1e-9)
    if len(nodes) == job.cluster.nodes:
        assert mixed == pytest.approx(slowest, rel=1e-9)


def test_a_stage_on_faster_devices_is_faster(make_job: JobMaker) -> None:
    """Others than the cluster's need not be slower."""
    job = make_job(pp=2, devices_per_node=1, precision="bf16", micro_batches=8)
    old, new = find_hardware("a100-sxm-80gb"), find_hardware("h100-sxm-80gb")
    assert old is not None and new is not None
    upgraded = having(job, mixed=(OtherDevices(nodes=(1,), hardware="h100-sxm-80gb"),))
    replaced = having(job, mixed=(OtherDevices(nodes=(0,), hardware="a100-sxm-80gb"),))
    assert seconds(upgraded, old) < seconds(job, old)
    assert seconds(upgraded, old) == pytest.approx(seconds(replaced, new))


def test_unknown_devices_are_refused(make_job: JobMaker, gpu: Hardware) -> None:
    job = having(make_job(), mixed=(OtherDevices(nodes=(0,), hardware="abacus"),))
    with pytest.raises(JobError, match=r"hardware must be one of a100.*got 'abacus'"):
        seconds(job, gpu)


@settings(MANY, max_examples=25)
@given(data=st.data(), shape=st.sampled_from([{"dp": 2, "pp": 2}, {"tp": 2, "dp": 3}, {"cp": 2, "dp": 2, "pp": 3}]))
def test_replica_by_replica_by_hand(make_job: JobMaker, gpu: Hardware, data: st.DataObject, shape: Any) -> None:
    """Every replica on its own with the slowest of its ranks in each stage; the optimizers start when all are there."""
    job = make_job(**shape, model={"layers": 6}, bucket_mbytes=0.02, devices_per_node=2)
    factors = data.draw(st.lists(st.sampled_from([1.0, 1.5, 3.0]), min_size=16, max_size=16))
    factors = factors[: job.cluster.num_devices]
    stragglers = tuple(Straggler(rank=rank, slowdown=factor) for rank, factor in enumerate(factors))
    latency = RooflineLatency(gpu, FABRIC)
    result = simulate(having(job, stragglers=stragglers), latency)
    low, timer, layout, p = lower(job, gpu), Timer(latency), layout_of(job), job.parallel
    ready, slowest = np.zeros(p.pp), np.zeros(p.pp)
    for replica in range(p.dp):
        paces = np.zeros(p.pp)
        for rank, factor in enumerate(factors):
            if rank // layout.stride("dp") % p.dp == replica:
                stage = rank // layout.stride("pp") % p.pp
                paces[stage] = max(paces[stage], factor)
        stages = low.track.stage.tolist()
        own = [(int(at), float(paces[stage])) for at, stage in zip(low.segment, stages, strict=True)]
        transition = np.array([timer.segment(low.segments[at], Slowdown(compute=pace)).transition for at, pace in own])
        messages = timer.work_seconds(low.messages)[low.message]
        run = run_track(low.track, np.arange(len(own), dtype=np.int32), transition, messages)
        ready, slowest = np.maximum(ready, run.clocks.max(axis=1)), np.maximum(slowest, paces)
    ends = []
    for stage, at in enumerate(low.optimizer.tolist()):
        ops = timer.ops(low.segments[at], Slowdown(compute=float(slowest[stage])))
        ends.append(ready[stage] + float(ops.seconds.sum()))
    assert result.iteration_time_s == pytest.approx(max(ends), rel=1e-9)


def test_collectives_of_slow_ranks_are_not_slow(make_job: JobMaker, gpu: Hardware) -> None:
    """A straggler is slow at its ops: its links are as others'."""
    job = make_job(tp=2)
    result = simulate(having(job, stragglers=slow(0, 1, by=3.0)), RooflineLatency(gpu, FABRIC))
    plain = simulate(job, RooflineLatency(gpu, FABRIC))
    for work, count in result.op_counts.items():
        factor = 1.0 if isinstance(work, Collective) else 3.0
        assert count == pytest.approx(factor * plain.op_counts[work])
