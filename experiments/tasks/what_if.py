"""``stepsight what-if``: changes to traced runs, with durations by the predictor for their hardware."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import (
    FABRICS,
    HARDWARE,
    Fabric,
    canonical_hardware,
    find_fabric,
    find_hardware,
    unknown_hardware,
    usual_fabric,
)
from stepsight.dataset.job.job import Job
from stepsight.dataset.runs.run_folder import run_folders, run_graphs
from stepsight.dataset.tables.measurements import device_name
from stepsight.experiments.tasks.settings import TraceChanges
from stepsight.simulator.durations.latency_model import LatencyModel, RooflineLatency
from stepsight.simulator.replay import changes
from stepsight.simulator.replay.causes import critical_path
from stepsight.simulator.replay.replay import Walk, replay

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

Change = Callable[[Sequence[Program], changes.Tally], list[Program]]


def what_if(path: Path, wanted: TraceChanges) -> dict[str, Any]:
    """Compute one run: the unchanged replayed step, the step after each change, and with all changes.

    Where a step was timed without a profiler too, changes are to that step (``unprofiled_s``).

    Raises:
        StepsightError: If nothing is asked, the run is not one, or the hardware must be named.
    """
    folders = run_folders(path)
    if len(folders) != 1:
        raise StepsightError(f"what-if takes one run, got {len(folders)} in {path}: name one of its runs/")
    run = run_graphs(folders[0])
    graphs: Sequence[Program] = run.graphs
    traced = _traced_on(wanted, graphs, run.job) if wanted.by_predictor else None
    asked = _changes(wanted, traced)
    if not asked:
        raise StepsightError("what-if needs at least one change, as --faster gemm=1.5 or --no-host")
    profiled = before = replay(graphs)
    if run.iteration_s:
        graphs = changes.as_timed(graphs, run.iteration_s)
        before = replay(graphs)
    each = []
    for title, change in asked:
        alone = replay(change(graphs, changes.Tally())).replayed_s
        each.append({"change": title, "step_s": alone, "speedup": before.replayed_s / alone})
    tally, changed = changes.Tally(), list(graphs)
    for _, change in asked:
        changed = change(changed, tally)
    after = replay(changed)
    device = sum(graph.device_time_s for graph in graphs) or 1.0
    return {
        "run": run.name,
        "measured_s": profiled.measured_s,
        "replayed_s": profiled.replayed_s,
        "unprofiled_s": before.replayed_s,
        "changed_s": after.replayed_s,
        "speedup": before.replayed_s / after.replayed_s if after.replayed_s else 0.0,
        "changes": each,
        "host_percent": _host_percent(before.walked),
        "changed_host_percent": _host_percent(after.walked),
        "traced_on": _described(traced),
        "predicted_percent": min(100.0 * tally.predicted_s / device, 100.0),
        "scaled_percent": min(100.0 * tally.scaled_s / device, 100.0),
        "warnings": list(dict.fromkeys(warning for graph in graphs for warning in graph.warnings)),
    }


def _host_percent(walked: Walk) -> float:
    """Share of the critical path that is work of the host, percent; 0 for ranks that compute on their host."""
    path = critical_path(walked)
    whole = sum(path.values())
    return 100.0 * path.get("host", 0.0) / whole if whole and walked.joined.graphs[0].device != "cpu" else 0.0


def _described(traced: tuple[str, Fabric] | None) -> dict[str, str] | None:
    """Device, fabric and predictor of the predicted durations; None if none were predicted."""
    if traced is None:
        return None
    source = getattr(_predictor_of(traced[0]), "source", "roofline")
    return {"hardware": traced[0], "fabric": traced[1].name, "predictor": source}


def _changes(asked: TraceChanges, traced: tuple[str, Fabric] | None) -> list[tuple[str, Change]]:
    """Titles and functions of the changes that are asked for."""
    found: list[tuple[str, Change]] = [
        (f"{what} {factor:g} times as fast", partial(changes.faster, what=what, factor=factor))
        for what, factor in asked.faster.items()
    ]
    if asked.no_host:
        found.append(("no host", changes.without_host))
    if asked.cuda_graph:
        found.append(("launches cost nothing", changes.as_device_graph))
    if asked.remove_straggler:
        found.append(("no straggler", changes.without_straggler))
    if traced is None:
        return found
    name, fabric = traced
    now = latency_of(name, fabric)
    if asked.times != 1.0:
        found.append((f"batch {asked.times:g} x", partial(changes.with_batch, factor=asked.times, latency=now)))
    if asked.replicas != 1:
        found.append((f"{asked.replicas} x ranks", partial(changes.with_replicas, factor=asked.replicas, latency=now)))
    if asked.bucket_mb:
        merged = partial(changes.with_buckets, num_bytes=asked.bucket_mb * 1e6, latency=now)
        found.append((f"buckets of {asked.bucket_mb:g} MB", merged))
    if asked.fabric or asked.hardware:
        device = preset_name(asked.hardware) if asked.hardware else name
        other = find_fabric(asked.fabric or usual_fabric(device))
        title = " and ".join(filter(None, (asked.hardware, asked.fabric)))
        found.append((f"on {title}", partial(changes.on_latencies, before=now, after=latency_of(device, other))))
    return found


def _traced_on(asked: TraceChanges, graphs: Sequence[Program], job: Job | None) -> tuple[str, Fabric]:
    """Hardware and fabric of the trace: from the user, from the job, or from the device's name in the trace."""
    said = graphs[0].device_name
    name = preset_name(asked.on) if asked.on else (job.cluster.hardware if job is not None else "")
    if not name:
        name = "local-cpu" if graphs[0].device == "cpu" else device_name(said)
    if find_hardware(name) is None and not asked.on:  # of another memory size, which changes no duration
        name = preset_name(re.sub(r"-\d+gb$", "", name))
    if find_hardware(name) is None:
        if asked.on:
            raise StepsightError(f"--on must be the traced device, a name or a file: {unknown_hardware(asked.on)}")
        told = f"the trace names {said!r:.80}, which is no known device" if said else "the trace names no device"
        raise StepsightError(
            f"{told}: name the device or a similar one with --on (as in --on mi300x); --on takes "
            f"{', '.join(HARDWARE.names())}, or a file of a device"
        )
    if asked.on_fabric:
        return name, find_fabric(asked.on_fabric)
    try:
        return name, job.fabric if job is not None else find_fabric(usual_fabric(name))
    except JobError:
        raise StepsightError(
            f"no usual fabric of {name} is known: name the traced one with --on-fabric, one of "
            f"{', '.join(FABRICS.names())}, or a file"
        ) from None


def preset_name(name: str) -> str:
    """A known hardware by name, usual name or prefix (``h100-sxm``): the first one that matches."""
    name = canonical_hardware(name)
    if find_hardware(name) is not None:
        return name
    return next((known for known in HARDWARE.names() if known.startswith(f"{name}-")), name)


def latency_of(hardware: str, fabric: Fabric) -> LatencyModel:
    """The latency model of a hardware: the shipped predictor, else a roofline.

    Raises:
        StepsightError: If the hardware is not known.
    """
    facts = find_hardware(hardware)
    if facts is None:
        raise StepsightError(f"hardware must be one of {', '.join(HARDWARE.names())} or a file, got {hardware!r:.80}")
    predictor = _predictor_of(hardware)
    if predictor is None:
        return RooflineLatency(facts, fabric)
    return predictor.latency_on(fabric, 1, 1)


def _predictor_of(hardware: str) -> Predictor | None:
    from stepsight.training.prediction.prediction import asked_predictor

    facts = find_hardware(hardware)
    return asked_predictor(facts.name, None) if facts is not None else None
