"""``stepsight collect``: make a plan from job files, and run it with the harness."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepsight.dataset.base.bounded import reason
from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import check_writable, read_json, write_json
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.harness.plan import MOST_CPU, check_plan
from stepsight.dataset.job.job import Job
from stepsight.dataset.runs.box_spec import HARDWARE, Box
from stepsight.simulator.programs.lower import signatures
from stepsight.training.measured.box_plans import SleepingLatency, box_plan
from stepsight.training.measured.planning import collectable, make_plan


def available_ranks() -> int:
    """Number of ranks that can compute at the same time on this machine: GPUs, else cores."""
    return num_gpus() or len(os.sched_getaffinity(0))


def num_gpus() -> int:
    """Number of GPUs that PyTorch finds on this machine; 0 without PyTorch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_plan(path: Path) -> bool:
    """Whether a file is a plan rather than a job."""
    try:
        return path.name.endswith("plan.json") or (path.suffix == ".json" and "runs" in read_json(path))
    except (OSError, ValueError, TypeError):
        return False  # reading it as a job reports what is wrong


def read_plan(path: Path) -> dict[str, Any]:
    """Read a plan, and check that the harness can run it and that its jobs are valid.

    Raises:
        CollectError: If it is none.
    """
    try:
        plan = check_plan(read_json(path))
        for run in plan["runs"]:
            Job.from_dict(run["job"])
    except (OSError, ValueError) as error:
        raise CollectError(f"cannot read plan {path}: {reason(error)}") from None
    return plan


def run_plan(plan: dict[str, Any], out: Path, *, progress: bool = True) -> dict[str, Any]:
    """Run a plan with the harness; its errors become ``CollectError``."""
    from stepsight.dataset.harness.running.launch import HarnessError, collect

    try:
        return dict(collect(plan, out, progress=progress))
    except HarnessError as error:
        raise CollectError(str(error)) from None


def collect_jobs(
    paths: Sequence[Path],
    out: Path,
    *,
    role: str,
    counts: dict[str, int],
    event_seconds: float,
    plan_only: bool,
    progress: bool,
    box: Box | None = None,
    extra_seconds: float = 0.0,
) -> dict[str, Any]:
    """Make a plan of job files and run it, or run one plan file; the summary lists the measurements.

    With a ``box`` the jobs run asleep there, whatever their clusters; ``rejected`` of the summary then names the runs
    that kept the cores too busy, elsewhere those that no memory holds.
    """
    check_writable(out)
    if len(paths) == 1 and is_plan(paths[0]):
        if box is not None:
            raise CollectError(f"a box is for job files: a plan says its own, got {paths[0]}")
        plan = read_plan(paths[0])
    elif box is not None:
        if extra_seconds:
            raise CollectError("--extra-seconds is for runs outside of a box: leave out one of them")
        plan = plan_in_box(box, [Job.from_file(path) for path in paths], role, counts, event_seconds)
    else:
        jobs = [_as_pytorch(Job.from_file(path)) for path in paths]
        for job in jobs:
            collectable(job, None if plan_only else available_ranks())
        runs = [(role, job, counts) for job in jobs]
        plan = make_plan(runs, profile_jobs=jobs, event_seconds=event_seconds, extra_seconds=extra_seconds)
    if plan_only:
        if (out / "plan.json").exists() and read_plan(out / "plan.json") != plan:
            raise CollectError(f"a folder has one plan: {out} has another one; choose another folder")
        write_json(out / "plan.json", plan)
        where = out / "plan.json"
        return {"plan": str(where), "text": f"wrote {where}; run it with: python -m harness {where} --out DIR"}
    summary = run_plan(plan, out, progress=progress)
    text = collection_text(out)
    if summary.get("rejected"):
        why = f"more than {100 * MOST_CPU:.0f} % CPU" if "box" in plan else "too little memory"
        text += f"\nrejected, {why}: {', '.join(summary['rejected'])}"
    return {**summary, "text": text}


def _as_pytorch(job: Job) -> Job:
    """The job with eager PyTorch as its engine, which the harness runs, if it is in mixed precision and names no
    engine.
    """
    if job.execution.engine or job.batch.precision != "bf16":
        return job
    return replace(job, execution=replace(job.execution, engine="eager-pytorch"))


def plan_in_box(
    box: Box, jobs: Sequence[Job], role: str, counts: dict[str, int], event_seconds: float
) -> dict[str, Any]:
    """A plan of sleeping jobs in a box.

    Events that are real in a box are measured: collectives, and the ops that are too short to be replaced by sleeping.
    """
    hardware = find_hardware(HARDWARE)
    assert hardware is not None
    ops, collectives = set(), set()
    for job in jobs:
        found, messages = signatures(box.holds(job), hardware)
        ops |= {op for op in found if not op.record.slept}
        collectives |= set(messages)
    return box_plan(
        box,
        [("", role, job, counts) for job in jobs],
        SleepingLatency(hardware, box.links),
        collectives=sorted(collectives, key=str),
        ops=sorted(ops, key=str),
        event_seconds=event_seconds,
    )


def collection_text(out: Path) -> str:
    """A table of the runs of a collection."""
    from stepsight.experiments.reports.describe import describe_collection

    return str(describe_collection(out)["text"])
