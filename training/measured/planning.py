"""What to measure so that a predictor can be trained: runs, and every distinct signature once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.hardware.hardware import Hardware, alpha_beta_seconds, find_hardware
from stepsight.dataset.harness.plan import SCHEMA, check_plan, job_problems
from stepsight.dataset.harness.plan_error import HarnessError
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.programs.lower import signatures


def run_name(job: Job) -> str:
    """A folder name from the job: ``gpt-4L-256h-s128-tp2-pp1-dp1-mb4x2`` and other differences."""
    model = job.model
    words = f"{job.name} s{model.seq_len} v{model.vocab} f{model.ffn}"
    if model.kv_heads != model.heads:
        words += f" kv{model.kv_heads}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", words)


def collectable(job: Job, max_ranks: int | None = None) -> None:
    """Check that the harness can run a job unchanged.

    Raises:
        CollectError: With the rule and the values.
    """
    problems = job_problems(job.to_dict())
    if problems:
        raise CollectError("; ".join(problems))
    if max_ranks is not None and job.cluster.num_devices > max_ranks:
        raise CollectError(
            f"a run needs a core (or GPU) for each rank: ranks <= {max_ranks} here, got {job.cluster.num_devices}"
        )


def as_the_harness_runs(job: Job) -> Job:
    """The job as the harness runs it on any device: pipelines by torch, their gradients reduced after the schedule."""
    if job.parallel.pp == 1:
        return job
    overlap = job.parallel.overlap_grad_reduce and job.parallel.zero_stage > 0
    return replace(job, parallel=replace(job.parallel, runtime="torch", overlap_grad_reduce=overlap))


def stand_in_of(job: Job, rank: int) -> dict[str, Any]:
    """The part of a plan about a run with an emulated rank.

    Its collectives take what latency and bandwidth of the job's fabric imply.

    Raises:
        CollectError: If the harness cannot run the job, or it has no such rank.
    """
    collectable(job)
    if type(rank) is not int or rank not in range(job.cluster.num_devices):
        raise CollectError(f"rank must be one of the job's {job.cluster.num_devices}, got {rank}")
    _, collectives = signatures(as_the_harness_runs(job), _facts(job))
    rows = [{**asdict(c), "seconds": alpha_beta_seconds(c, job.fabric)} for c in sorted(collectives, key=str)]
    return {"rank": rank, "collectives": rows}


def event_plan(jobs: Iterable[Job], seconds: float, stand_ins: Sequence[Job] = ()) -> list[dict[str, Any]]:
    """Every distinct signature of the jobs, by world size; each gets an equal part of the time budget.

    Of ``stand_ins``, jobs of which only one rank runs at a time, these are the ops, on one rank.
    """
    ops: dict[int, set[Op]] = {}
    collectives: dict[int, set[Collective]] = {}
    for job in jobs:
        world = 1 if job in stand_ins else job.cluster.num_devices
        found_ops, found_collectives = signatures(job, _facts(job))
        ops.setdefault(world, set()).update(found_ops)
        collectives.setdefault(world, set()).update(() if job in stand_ins else found_collectives)
    total = sum(map(len, ops.values())) + sum(map(len, collectives.values()))
    return [
        {
            "name": f"world{world}",
            "world_size": world,
            "ops": [asdict(op) for op in sorted(ops[world], key=str)],
            "collectives": [asdict(c) for c in sorted(collectives[world], key=str)],
            "seconds": seconds * (len(ops[world]) + len(collectives[world])) / max(1, total),
        }
        for world in sorted(ops)
    ]


def make_plan(
    runs: Sequence[tuple[str, Job, dict[str, Any]]],
    *,
    profile_jobs: Sequence[Job] = (),
    event_seconds: float = 30.0,
    extra_seconds: float = 0.0,
) -> dict[str, Any]:
    """A plan for the harness, as plain JSON.

    Args:
        runs: Role, job and step counts (``rounds``, ``steps``, ``warmup``, ``profile_steps``) of each real run; beside
            the counts ``stand_in`` (see ``stand_in_of``) where one process stands in for a rank of the job.
        profile_jobs: Jobs whose distinct ops and collectives are measured on their own; of those in stand-ins the ops.
        event_seconds: Time budget of those measurements; 0 leaves them out.
        extra_seconds: Time for more rounds of the runs whose median step is least certain.
    """
    planned: dict[str, dict[str, Any]] = {}
    for role, job, counts in runs:
        name = run_name(job) + (f"-rank{counts['stand_in']['rank']}" if "stand_in" in counts else "")
        if name in planned:
            raise CollectError(f"every run of a plan must differ, got {name} twice")
        planned[name] = {"name": name, "role": role, "job": job.to_dict(), **counts}
    stand_ins = [job for _, job, counts in runs if "stand_in" in counts]
    events = event_plan(profile_jobs, event_seconds, stand_ins) if event_seconds > 0 else []
    plan = {"schema": SCHEMA, "runs": list(planned.values()), "events": events, "extra_seconds": extra_seconds}
    try:
        return check_plan(json.loads(json.dumps(plan)))
    except HarnessError as error:
        raise CollectError(str(error)) from None


def _facts(job: Job) -> Hardware:
    name = job.cluster.hardware
    hardware = find_hardware(name)
    if hardware is None:
        # Signatures do not depend on speeds, only on whether communication overlaps: any GPU or CPU can be used.
        hardware = find_hardware("local-cpu" if "cpu" in name else "a100-sxm-80gb")
    assert hardware is not None
    return hardware
