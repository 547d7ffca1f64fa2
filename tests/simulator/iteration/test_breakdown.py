"""Properties of a whole iteration that hold for every job: of its time, its parts, and what it depends on."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsight.dataset.hardware.hardware import Fabric, Hardware, Link
from stepsight.dataset.job.job import Job
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import Simulation, exchange_facts, simulate
from stepsight.simulator.iteration.timeline import timeline
from stepsight.simulator.programs.lower import iteration_flops
from tests.simulator.any_job import FABRIC, devices, jobs

MANY = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
clusters = st.booleans().flatmap(lambda uneven: jobs(uneven_cluster=uneven))


def run(job: Job, hardware: Hardware, fabric: Fabric = FABRIC) -> Simulation:
    return simulate(job, RooflineLatency(hardware, fabric))


@MANY
@given(job=clusters, hardware=devices())
def test_every_breakdown_adds_up(job: Job, hardware: Hardware) -> None:
    """To the iteration time, and no part of it is negative."""
    result = run(job, hardware)
    parts, total = result.breakdown, result.iteration_time_s
    assert sum(parts.values()) == pytest.approx(total, rel=1e-9)
    assert min(parts.values()) >= 0.0


@MANY
@given(job=clusters, hardware=devices())
def test_what_is_on_the_critical_path_adds_up(job: Job, hardware: Hardware) -> None:
    """The sum of n_i * t_i is the iteration time; with a host that launches, what is less is the host's."""
    result = run(job, hardware)
    seconds = dict(zip(result.lowered.all_works, result.work_seconds.tolist(), strict=True))
    found = sum(count * seconds[work] for work, count in result.op_counts.items())
    assert found <= result.iteration_time_s * (1 + 1e-9)
    if hardware.host_op_s == 0:
        assert found == pytest.approx(result.iteration_time_s, rel=1e-9)


@MANY
@given(job=clusters, hardware=devices())
def test_every_segment_is_the_same_folded_or_op_by_op(job: Job, hardware: Hardware) -> None:
    """From clock to clock, on every rank's devices and links."""
    result = run(job, hardware)
    conditions = {slowdown for pipeline_run in result.pipeline_runs for slowdown in pipeline_run.pipeline.slowdowns}
    for segment in result.lowered.segments:
        for condition in conditions:
            folded, ops = result.timer.segment(segment, condition), result.timer.ops(segment, condition)
            assert folded.transition == pytest.approx(ops.transition, rel=1e-9, abs=1e-15)


@MANY
@given(job=clusters, hardware=devices())
def test_clocks_alone_are_those_of_the_whole_run(job: Job, hardware: Hardware) -> None:
    """Where what repeats is skipped, and where it is not."""
    for pipeline_run in run(job, hardware).pipeline_runs:
        assert pipeline_run.clocks == pytest.approx(pipeline_run.run.clocks, rel=1e-9)


@MANY
@given(job=clusters, hardware=devices(), intra=st.floats(1.0, 100.0), inter=st.floats(1.0, 100.0))
def test_no_job_is_slower_on_faster_links(job: Job, hardware: Hardware, intra: float, inter: float) -> None:
    faster = Fabric("fast", Link(1e11 * intra, 3e-6), Link(2e10 * inter, 1e-5))
    slow, fast = run(job, hardware), run(job, hardware, faster)
    assert fast.iteration_time_s <= slow.iteration_time_s * (1 + 1e-9)


@MANY
@given(job=jobs(), hardware=devices())
def test_needed_work_is_done_and_takes_its_time(job: Job, hardware: Hardware) -> None:
    """MFU <= HFU <= 1 at the roofline's peak."""
    result = run(job, replace(hardware, op_latency_s=0.0))
    needed, done = iteration_flops(result.lowered)
    peak = hardware.flops_per_s(job.batch.precision) * job.parallel.pp
    assert 0 < needed <= done <= result.iteration_time_s * peak


@settings(MANY, max_examples=20)
@given(job=clusters, hardware=devices(), level=st.sampled_from(["segment", "op"]))
def test_every_timeline_is_whole(job: Job, hardware: Hardware, level: str) -> None:
    """Streams do one thing at a time, actions are there once, and the last event ends with the iteration."""
    result = run(job, hardware)
    events = timeline(result, level)["traceEvents"]
    streams = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert max(end for rows in spans.values() for _, end in rows) == pytest.approx(
        result.iteration_time_s * 1e6, rel=1e-6, abs=2e-3
    )
    for stream, rows in spans.items():
        if not streams[stream].startswith("pp"):  # messages do not wait for each other
            assert all(before[1] <= after[0] + 3e-3 for before, after in pairwise(sorted(rows)))
    if level == "segment":
        labels = {"forward", "backward", "input", "weight", "optimizer"}
        seen = Counter(event["pid"] for event in events if event.get("cat") in labels)
        low = result.lowered
        for number in range(len(result.pipeline_runs)):
            for stage in range(low.num_stages):
                own = int((low.track.stage == stage).sum())
                assert seen[number * low.num_stages + stage] == own + 1


def test_exchange_facts_are_sums_of_the_breakdown() -> None:
    """Waits for all communication; the slowest rank's lookups are the mean's and what it takes beyond."""
    waits = {"index_exchange": 1.0, "all_to_all": 2.0, "dp_communication": 4.0}
    found = exchange_facts({"lookups": 2.0, "imbalance": 1.0, "dense": 9.0, **waits})
    assert found == {"exposed_communication": 7.0, "imbalance": 1.5}
    assert exchange_facts({"compute": 1.0, **waits}) == {}
