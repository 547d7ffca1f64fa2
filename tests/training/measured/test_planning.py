"""Plans with stand-ins."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import CollectError, TraceError
from stepsight.dataset.graph.program import Program, ProgramBuilder
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.hardware.hardware import Hardware, alpha_beta_seconds, find_fabric
from stepsight.dataset.harness.plan.plan_checks import check_plan
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_manifest import RunManifest
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import lower
from stepsight.training.context.fit_context import make_examples, make_wholes
from stepsight.training.fitting.train_runs import evaluate_heldout
from stepsight.training.measured.measured import MeasuredRun, Profile, fill_from_traces
from stepsight.training.measured.planning import (
    StandInLatency,
    as_the_harness_runs,
    job_digest,
    make_plan,
    predict_run,
    run_name,
    stand_in_of,
    stand_in_seconds,
    trained_names,
)
from stepsight.training.predictor.predictor import Predictor


def _job(hardware: str = "h200-sxm-141gb", nodes: int = 2, **parallel: Any) -> Job:
    p = ParallelSpec(**{"dp": 1, **parallel})
    fabric: Any = "dgx-h100" if nodes > 1 else "loopback"
    return Job(
        model=ModelSpec(family="llama", layers=8, hidden=512, heads=8, vocab=1024, seq_len=128),
        parallel=p,
        batch=BatchSpec(micro_batch=1, global_batch=8 * p.dp, precision="pure-bf16"),
        cluster=ClusterSpec(
            hardware=hardware, nodes=nodes, devices_per_node=p.tp * p.cp * p.pp * p.dp // nodes, fabric=fabric
        ),
    )


def test_the_table_is_the_jobs_own_collectives_with_what_its_fabric_implies() -> None:
    job = _job(tp=4, pp=2, dp=4)
    told = stand_in_of(job, 5)
    assert told["rank"] == 5
    rows = [dict(row) for row in told["collectives"]]
    seconds = {Collective(**row): value for row, value in ((r, r.pop("seconds")) for r in rows)}
    assert {(c.kind, c.group_size, c.num_nodes) for c in seconds} == {
        ("all_reduce", 4, 1), ("send_recv", 2, 2),
    }  # fmt: skip
    assert all(value == alpha_beta_seconds(work, job.fabric) for work, value in seconds.items())


def test_a_plan_holds_plain_runs_and_stand_ins_of_jobs_that_no_machine_here_could_hold() -> None:
    large, small = _job(tp=8, dp=32), _job("local-cpu", nodes=1)
    runs: list[tuple[str, Job, dict[str, Any]]] = [
        ("train", small, {"rounds": 2}),
        *(("train", large, {"rounds": 1, "stand_in": stand_in_of(large, rank)}) for rank in (0, 255)),
    ]
    plan = make_plan(runs, profile_jobs=[large, small])
    assert json.loads(json.dumps(plan)) == check_plan(plan)
    names = [run["name"] for run in plan["runs"]]
    assert [name.rsplit("-", 1)[-1] for name in names[1:]] == ["rank0", "rank255"]
    (events,) = plan["events"]
    assert events["world_size"] == 1 and events["collectives"] == [] and events["ops"]


def test_what_the_harness_cannot_run_has_no_stand_in() -> None:
    with pytest.raises(CollectError, match="rank must be one of the job's 8, got 8"):
        stand_in_of(_job(dp=8), 8)
    with pytest.raises(CollectError, match="recompute none and full"):
        stand_in_of(_job(dp=8, recompute="selective"), 0)


def test_the_harness_reduces_a_pipelines_gradients_when_its_schedule_is_over() -> None:
    plain, pipeline, sharded = _job(dp=8), _job(pp=2, dp=4), _job(pp=2, dp=4, zero_stage=3)
    assert as_the_harness_runs(plain) is plain
    ran = [as_the_harness_runs(job).parallel for job in (pipeline, sharded)]
    assert [(p.runtime, p.overlap_grad_reduce) for p in ran] == [("torch", False), ("torch", True)]


LOOPBACK = find_fabric("loopback")
MEASURED = Collective("all_reduce", 4096, 2, 2)


def _emulated(micro_batches: int = 4, **parallel: Any) -> Job:
    p = ParallelSpec(**{"dp": 1, **parallel})
    return Job(
        model=ModelSpec(family="gpt", layers=4, hidden=128, heads=4, vocab=512, seq_len=64),
        parallel=p,
        batch=BatchSpec(micro_batch=2, global_batch=2 * micro_batches * p.dp, precision="fp32"),
        cluster=ClusterSpec(hardware="toy", devices_per_node=p.tp * p.pp * p.dp, fabric="loopback"),
    )


def _manifest(job: Job, rank: int | None, folder: Path = Path("run")) -> RunManifest:
    ranks = job.cluster.num_devices if rank is None else 1
    return RunManifest(
        folder=folder, name=folder.name, role="train", job=job, world_size=ranks, rounds=((0.1,),), stand_in=rank
    )


class _Doubled(RooflineLatency):
    """Everything takes twice as long within a step."""

    knows_context = True

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Any]) -> Sequence[Any]:
        return [2 * alone for alone in seconds]


def _sums(program: Program, latency: StandInLatency) -> float:
    """Seconds of everything in it, one after the other."""
    return sum(
        float((latency.op_seconds if isinstance(n.work, Op) else latency.collective_seconds)([n.work])[0])  # type: ignore[list-item]
        for n in program.nodes
    )


def test_collectives_take_what_the_table_says_in_any_context(hardware: Hardware) -> None:
    latency = StandInLatency(_Doubled(hardware, LOOPBACK), LOOPBACK)
    op, sum_ = Op("gelu", (1000,), "fp32"), Collective("all_reduce", 4096, 8, 8)
    builder = ProgramBuilder("forward")
    builder.add(op)
    builder.add(sum_)
    assert latency.collective_seconds([sum_])[0] == alpha_beta_seconds(sum_, LOOPBACK)
    (inside,) = latency.in_context([builder.build()], [np.array([1.0, 3.0])])
    assert inside.tolist() == [2.0, 3.0]
    assert StandInLatency(_Doubled(replace(hardware, comm_compute_share=0.5), LOOPBACK), LOOPBACK).hardware == hardware


def test_a_shard_does_its_ops_and_waits_for_every_collective(hardware: Hardware) -> None:
    job, plain = _emulated(tp=4), RooflineLatency(hardware, LOOPBACK)
    lowered, latency = lower(job, hardware), StandInLatency(plain, LOOPBACK)
    programs = [lowered.program(label, 0, m) for m in range(4) for label in ("forward", "backward")]
    expected = sum(_sums(program, latency) for program in [*programs, lowered.program("optimizer")])
    assert stand_in_seconds(job, 3, plain) == pytest.approx(expected)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_stage_does_its_own_passes_and_waits_for_no_other_stage(hardware: Hardware, stage: int) -> None:
    """GPipe: messages are received when they are needed, and sends waited for after all forwards or backwards."""
    job, plain, count = _emulated(pp=4, schedule="gpipe"), RooflineLatency(hardware, LOOPBACK), 4
    lowered, latency = lower(job, hardware), StandInLatency(plain, LOOPBACK)
    forward, backward = (
        sum(_sums(lowered.program(label, stage, m), latency) for m in range(count)) for label in ("forward", "backward")
    )
    (message,) = lowered.messages
    delay = alpha_beta_seconds(message, LOOPBACK)
    waits = count * ((stage > 0) + (stage < 3)) + (stage < 3) + (stage > 0)
    expected = forward + backward + _sums(lowered.program("optimizer", stage), latency) + waits * delay
    assert stand_in_seconds(job, stage, plain) == pytest.approx(expected)


def test_a_stage_alone_takes_less_than_the_pipeline(hardware: Hardware) -> None:
    """It has no bubble; with the host of a GPU neither."""
    gpu = replace(hardware, kind="gpu", host_op_s=2e-6, host_action_s=1e-5, host_message_s=1e-6)
    for machine in (hardware, gpu):
        plain, job = RooflineLatency(machine, LOOPBACK), _emulated(pp=4)
        alone = [stand_in_seconds(job, stage, plain) for stage in range(4)]
        whole = simulate(job, plain).iteration_time_s
        assert 0.4 * whole < max(alone) < whole


def _measured(job: Job, rank: int | None, name: str) -> MeasuredRun:
    """A forward of one op, and one collective that its annotation made."""
    builder = ProgramBuilder("forward")
    builder.add(Op("gelu", (1000,), "fp32"))
    builder.add(MEASURED)
    segment = TracedSegment(builder.build(), np.array([1e-4, 1e-3]), "forward", rank or 0, 1, name)
    return MeasuredRun(_manifest(job, rank, Path(name)), (segment,))


def test_collectives_that_nobody_measured_are_not_learned() -> None:
    """Only what was real fills a profile from traces."""
    for rank, learned in ((None, 1), (5, 0)):
        profile = Profile(LOOPBACK)
        fill_from_traces(profile, [_measured(_emulated(dp=8, zero_stage=3), rank, "one")])
        assert (len(profile.ops), len(profile.collectives)) == (1, learned)


def test_all_stand_ins_teach_ops_in_context_but_stages_no_iteration(predictor: Predictor) -> None:
    runs = [
        _measured(_emulated(dp=8), 5, "replica"),
        _measured(_emulated(pp=4), 2, "stage"),
        _measured(_emulated(), None, "plain"),
    ]
    examples, wholes = make_examples(runs, predictor), make_wholes(runs, predictor)
    assert [example.run for example in examples] == ["replica", "stage", "plain"]
    assert examples[0].alone[1] == alpha_beta_seconds(MEASURED, LOOPBACK)
    assert examples[2].alone[1] != examples[0].alone[1]
    assert [(whole.run, whole.busy) for whole in wholes] == [("replica", 1), ("plain", 1)]
    expected = stand_in_seconds(_emulated(dp=8), 5, predictor.latency(_emulated(dp=8), alone=True))
    assert wholes[0].seconds_and_counts(wholes[0].alone)[0] == pytest.approx(expected)
    assert predict_run(runs[0].manifest, predictor).iteration_time_s == pytest.approx(expected)


@pytest.fixture
def write_timed(tmp_path: Path) -> Callable[[str, Job, int], None]:
    def write(name: str, job: Job, rank: int) -> None:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        manifest = {"schema": 1, "name": name, "role": "heldout", "job": job.to_dict(), "world_size": 1}
        (folder / "manifest.json").write_text(json.dumps({**manifest, "rounds": [[0.1]], "stand_in": {"rank": rank}}))

    return write


def test_iterations_are_judged_by_what_waits_for_nobody(
    predictor: Predictor, tmp_path: Path, write_timed: Callable[[str, Job, int], None]
) -> None:
    write_timed("stage", _emulated(pp=4), 2)
    with pytest.raises(TraceError, match="needs runs with role 'heldout', got 1 that stand in for stages"):
        evaluate_heldout(predictor, tmp_path)
    write_timed("shard", _emulated(tp=2), 1)
    assert [row["run"] for row in evaluate_heldout(predictor, tmp_path).rows] == ["shard"]


CHANGES: dict[str, tuple[Job, dict[str, Any]]] = {
    "lora": (_job(dp=2), {"model": {"lora_rank": 8, "lora_targets": ("qkv",)}}),
    "experts without expert parallelism": (_job(dp=2), {"model": {"experts": 4, "experts_per_token": 2}}),
    "context parallelism": (_job(cp=2), {"parallel": {"context_parallel": "all_gather"}}),
    "heads": (_job(dp=2), {"model": {"heads": 16, "kv_heads": 16}}),
    "precision": (_job(dp=2), {"batch": {"precision": "fp32"}}),
    "hardware": (_job(dp=2), {"cluster": {"hardware": "a100-sxm-80gb"}}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_jobs_that_differ_in_any_setting_have_names_of_their_own(change: str) -> None:
    job, changed = CHANGES[change]
    other = replace(job, **{name: replace(getattr(job, name), **table) for name, table in changed.items()})
    assert job != other and run_name(job) != run_name(other)
    assert run_name(job).rsplit("-", 1)[0].startswith("llama-8L-512h-tp1")
    assert run_name(Job.from_dict(json.loads(other.to_json()))) == run_name(other)


def test_a_predictor_was_trained_on_runs_of_equal_jobs_alone() -> None:
    """Runs of an older version, whose names do not tell all settings, are compared by their jobs."""
    dense, experts = CHANGES["experts without expert parallelism"][0], _job(dp=2, tp=2)
    runs = [_manifest(dense, None, Path("same")), _manifest(experts, None, Path("same"))]
    assert trained_names({"runs": ["same"]}, runs) == {"same"}
    assert trained_names({"runs": ["same"], "jobs": [job_digest(dense)]}, runs[1:]) == set()
    assert trained_names({"runs": [], "jobs": [job_digest(dense)]}, runs[:1]) == {"same"}
    assert job_digest(dense) != job_digest(dense, compiled=True)
