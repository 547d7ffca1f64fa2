"""Plans with stand-ins."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.hardware.hardware import alpha_beta_seconds
from stepsight.dataset.harness.plan import check_plan
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Collective
from stepsight.training.measured.planning import as_the_harness_runs, make_plan, stand_in_of


def _job(hardware: str = "h200-sxm-141gb", nodes: int = 2, **parallel: Any) -> Job:
    p = ParallelSpec(**{"dp": 1, **parallel})
    fabric: Any = "dgx-h100" if nodes > 1 else "loopback"
    return Job(
        model=ModelSpec(family="llama", layers=8, hidden=512, heads=8, vocab=1024, seq_len=128),
        parallel=p,
        batch=BatchSpec(micro_batch=1, global_batch=8 * p.dp, precision="pure-bf16"),
        cluster=ClusterSpec(
            hardware=hardware, nodes=nodes, devices_per_node=p.tp * p.pp * p.dp // nodes, fabric=fabric
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
