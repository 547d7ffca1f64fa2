"""``stepsight collect``: make a plan from job files, and run it with the harness."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.bounded import parsing
from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import check_writable, read_json, write_json
from stepsight.dataset.capture.captured import COMPOSITE, Captured, CapturedRank
from stepsight.dataset.graph.program import OP
from stepsight.dataset.hardware.hardware import HARDWARE, Hardware, roofline_seconds
from stepsight.dataset.harness.plan.plan_checks import MOST_CPU, SCHEMA, check_plan
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.run_folder import read_collection, read_event_file
from stepsight.dataset.runs.run_manifest import HARDWARE as BOX_HARDWARE
from stepsight.dataset.runs.run_manifest import Box, read_object
from stepsight.experiments.reports.run_texts import describe_collection
from stepsight.experiments.tasks.settings import CollectSettings
from stepsight.simulator.programs.lower import signatures
from stepsight.training.kernels.host_calls import call_label
from stepsight.training.measured.planning import SleepingLatency, box_plan, collectable, make_plan
from stepsight.training.predictor.predictor import Predictor


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
    """Read a plan, and check that the harness can run it and that its jobs are valid."""
    with parsing(f"cannot read plan {path}", CollectError):
        plan = check_plan(read_json(path))
        for run in plan["runs"]:
            Job.from_dict(run["job"])
    return plan


def run_plan(plan: dict[str, Any], out: Path, *, progress: bool = True) -> dict[str, Any]:
    """Run a plan with the harness; its errors become ``CollectError``."""
    from stepsight.dataset.harness.running.launch import HarnessError, collect

    try:
        return dict(collect(plan, out, progress=progress))
    except HarnessError as error:
        raise CollectError(str(error)) from None


def collect_jobs(
    paths: Sequence[Path | Job],
    out: Path,
    settings: CollectSettings,
    *,
    plan_only: bool = False,
    progress: bool = False,
    box: Box | None = None,
    reuse: Sequence[Path] = (),
) -> dict[str, Any]:
    """Make a plan of jobs, or of job files, and run it, or run one plan file; the summary lists the measurements. Ops
    and collectives that the collections of ``reuse`` hold, measured on this machine, are taken from there. With a
    ``box`` the jobs run asleep there, whatever their clusters; ``rejected`` names the runs that kept the cores too
    busy, elsewhere those that no memory holds.
    """
    counts, first = settings.counts(box is not None), paths[0]
    check_writable(out)
    if len(paths) == 1 and isinstance(first, Path) and is_plan(first):
        if box is not None:
            raise CollectError(f"a box is for job files: a plan says its own, got {first}")
        plan = read_plan(first)
    elif box is not None:
        if settings.extra_seconds:
            raise CollectError("--extra-seconds is for runs outside of a box: leave out one of them")
        plan = plan_in_box(box, [Job.of(path) for path in paths], settings.role, counts, settings.event_seconds)
    else:
        jobs = [Job.of(path) for path in paths]
        for at, job in enumerate(jobs):
            if not job.execution.engine and job.batch.precision == "bf16":  # the harness runs eager PyTorch
                jobs[at] = job = replace(job, execution=replace(job.execution, engine="eager-pytorch"))
            collectable(job, None if plan_only else available_ranks())
        runs = [(settings.role, job, counts) for job in jobs]
        seconds = {"event_seconds": settings.event_seconds, "extra_seconds": settings.extra_seconds}
        plan = make_plan(runs, profile_jobs=jobs, **seconds)
    taken = reuse_events(plan, reuse, out) if reuse else 0
    if plan_only:
        if (out / "plan.json").exists() and read_plan(out / "plan.json") != plan:
            raise CollectError(f"a folder has one plan: {out} has another one; choose another folder")
        write_json(out / "plan.json", plan)
        where = out / "plan.json"
        return {"plan": str(where), "text": f"wrote {where}; run it with: python -m harness {where} --out DIR"}
    summary = run_plan(plan, out, progress=progress)
    text = describe_collection(out)["text"]
    if reuse:
        summary["reused"] = taken
        text += f"\n{taken} ops and collectives taken from {', '.join(map(str, reuse))}"
    if summary.get("rejected"):
        why = f"more than {100 * MOST_CPU:.0f} % CPU" if "box" in plan else "too little memory"
        text += f"\nrejected, {why}: {', '.join(summary['rejected'])}"
    return {**summary, "text": text}


def reuse_events(plan: dict[str, Any], folders: Sequence[Path], out: Path) -> int:
    """Move what earlier collections have measured on this machine from a plan into a new collection's event files; how
    many ops and collectives the plan no longer measures.
    """
    import torch

    from stepsight.dataset.harness.measuring.device import fingerprint

    machine = fingerprint(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    machine.pop("threads_per_rank")  # every rank of a collection has one
    asked, files = _count(plan["events"]), {}
    for number, path in enumerate(path for folder in folders for path in read_collection(folder).events):
        told = read_object(path)
        read_event_file(path, told)  # a damaged file is refused here, before anything is measured
        own = told.get("fingerprint", {})
        if "box" in told or told.get("compile") or any(own.get(key) != machine[key] for key in machine):
            raise CollectError(f"--reuse takes events of this machine, outside of a box and uncompiled, got {path}")
        for event in plan["events"] if "world_size" in told else ():
            if event["world_size"] != told["world_size"]:
                continue
            items = [*event["ops"], *event["collectives"]]
            kept = [record for record in told["records"] if record.get("op", record.get("collective")) in items]
            if kept:
                name = f"reused{number}-{event['name']}.json"
                files[out / "events" / name] = {**told, "records": kept, "skipped": []}
            known = [record.get("op", record.get("collective")) for record in kept]
            for key in ("ops", "collectives"):
                event[key] = [item for item in event[key] if item not in known]
            event["seconds"] *= _count([event]) / max(len(items), 1)
    plan["events"] = [event for event in plan["events"] if _count([event])]
    if not (out / "plan.json").exists():
        if out.exists() and any(path.name != "events" for path in out.iterdir()):
            raise CollectError(f"a new collection needs a new or empty folder, got {out}")
        for path, value in {**files, out / "plan.json": plan}.items():  # the plan last: what is half-written has none
            write_json(path, value)
    return asked - _count(plan["events"])


def _count(events: Sequence[dict[str, Any]]) -> int:
    return sum(len(event["ops"]) + len(event["collectives"]) for event in events)


def plan_in_box(box: Box, jobs: Sequence[Job], role: str, counts: dict[str, int], event_s: float) -> dict[str, Any]:
    """A plan of sleeping jobs in a box; measured are events that are real there: collectives, and the ops that are too
    short to be replaced by sleeping.
    """
    hardware = HARDWARE[BOX_HARDWARE]
    found = [signatures(box.holds(job), hardware) for job in jobs]
    works: dict[str, Any] = {
        "ops": sorted({op for ops, _ in found for op in ops if not op.record.slept}, key=str),
        "collectives": sorted({each for _, messages in found for each in messages}, key=str),
    }
    runs = [("", role, job, counts) for job in jobs]
    return box_plan(box, runs, SleepingLatency(hardware, box.links), event_seconds=event_s, **works)


HEAVY = 0.98  # share of the time of unknown calls that is measured
MOST_CALLS = 400
SECONDS_OF_ONE = 0.06  # longest time to measure one call


@dataclass(frozen=True, eq=False)
class HeavyCall:
    """One distinct call of a captured program."""

    call: Sequence[Any]  # its signature, as captured
    op: Op  # what it is
    count: int  # how often a step makes it, over the captured ranks
    seconds: float  # what all of them are thought to take


def heavy_calls(captured: Captured, predictor: Predictor | None, hardware: Hardware) -> tuple[list[HeavyCall], float]:
    """Calls that were not measured: products and convolutions first, then the longest; and the part of the step's
    computation that is known, 0 to 1.
    """
    found: dict[tuple[str, Op], HeavyCall] = {}
    known = total = 0.0
    for each in (call for rank in captured.ranks for call in _calls(rank, predictor, hardware)):
        total += each.seconds
        host = None if predictor is None else predictor.host
        kernel = None if predictor is None or host is not None else predictor.kernel
        if (host and host.is_known(each.call[0], each.op)) or (kernel and not kernel.unsupported(each.op)):
            known += each.seconds
            continue
        key = call_label(each.call[0], each.op), each.op
        before = found.get(key, replace(each, count=0, seconds=0.0))
        found[key] = replace(before, count=before.count + each.count, seconds=before.seconds + each.seconds)
    ordered = sorted(found.values(), key=lambda each: -each.seconds)
    before_each = np.cumsum([0.0, *(each.seconds for each in ordered)])
    kept = [each for each, spent in zip(ordered, before_each, strict=False) if spent < HEAVY * before_each[-1]]
    kept = sorted(kept[:MOST_CALLS], key=lambda each: each.op.record.bound != "compute")
    return kept, known / total if total else 1.0


def collect_ops(
    captured: Captured, asked: Predictor | str | None, out: Path, seconds: float, *, progress: bool = True
) -> dict[str, Any]:
    """Measure the slowest unknown calls of a program on this machine, one by one."""
    predictor = asked if isinstance(asked, Predictor) else None
    hardware = predictor.hardware if predictor is not None else HARDWARE["local-cpu"]
    chosen, known = heavy_calls(captured, predictor, hardware)
    if not chosen:
        raise CollectError(f"the predictor knows every call of {captured.script}: there is nothing to measure")
    check_writable(out)
    warning = ""
    if not num_gpus() and any(graph.device != "cpu" for graph in captured.graphs):
        warning = (
            f"{captured.script} was captured for a GPU, and PyTorch finds none here: its calls are measured on this "
            "CPU and say nothing about a GPU. Run this on a machine with the GPU, or capture with --device cpu"
        )
        if progress:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    ops = [{"kind": of.op.kind, "dims": list(of.op.dims), "dtype": of.op.dtype, "call": list(of.call)} for of in chosen]
    event = {"name": "ops", "world_size": 1, "ops": ops, "collectives": [],
             "seconds": min(seconds, SECONDS_OF_ONE * len(ops))}  # fmt: skip
    plan = check_plan({"schema": SCHEMA, "runs": [], "events": [event], "device": "auto"})
    if not (out / "plan.json").exists():
        write_json(out / "plan.json", plan)
    knew = f"the predictor knew {100 * known:.0f} % of the computation" if predictor else "no predictor was named"
    return {
        **run_plan(plan, out, progress=progress),
        "calls": [{"call": each.call[0], "op": str(each.op), "count": each.count, "thought_s": each.seconds}
                  for each in chosen],
        "known_share": known,
        "warnings": [warning] if warning else [],
        "text": f"{len(chosen)} calls of {captured.script} measured alone; {knew}\nwrote {out}; name it beside the "
        "other collections when you train",
    }  # fmt: skip


def _calls(rank: CapturedRank, predictor: Predictor | None, hardware: Hardware) -> list[HeavyCall]:
    nodes = rank.graph.columns
    chosen = np.flatnonzero((nodes["kind"] == OP) & (nodes["call"] >= 0))
    pairs = np.stack([nodes["call"][chosen], nodes["work"][chosen]], axis=1).reshape(-1, 2)
    keys, counts = np.unique(pairs, axis=0, return_counts=True)
    if len(keys) and not rank.calls:
        raise CollectError("the program was captured by an earlier version, without arguments: capture it again")
    found = [
        HeavyCall(rank.calls[call], op, count, 0.0)
        for (call, work), count in zip(keys.tolist(), counts.tolist(), strict=True)
        if rank.calls[call][0] != COMPOSITE and isinstance(op := rank.graph.works[work], Op)
    ]
    ops = [each.op for each in found]
    if predictor is not None and predictor.host is not None:
        seconds = predictor.host.seconds([each.call[0] for each in found], ops, [0] * len(found))
    elif predictor is not None and found:
        seconds = predictor.kernel.seconds(ops, 1)
    else:
        seconds = np.array([roofline_seconds(op, hardware) for op in ops])
    return [replace(each, seconds=each.count * one) for each, one in zip(found, seconds.tolist(), strict=True)]
