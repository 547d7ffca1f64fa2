"""``stepsight what-if``: a traced step with changes, such as faster kernels, another batch, fabric or device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import Fabric, find_fabric, usual_fabric
from stepsight.experiments.questions.traced_device import latency_of, predictor_name, preset_name, traced_device
from stepsight.experiments.questions.traced_runs import LEAST_SHARE, Change, ReplayedRun, one_run, step_text
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.tasks.settings import TraceChanges
from stepsight.simulator.replay import changes
from stepsight.simulator.replay.causes import critical_path
from stepsight.simulator.replay.replay import ReplayTimes, replay

_HOST_LIMIT = 50.0  # percent of the critical path from which the host limits a step


def what_if(source: Path | ReplayedRun, wanted: TraceChanges) -> dict[str, Any]:
    """Compute one run: the unchanged replayed step, the step after each change, and with all changes."""
    found = ReplayedRun.of(one_run(source, "what-if")) if isinstance(source, Path) else source
    traced = traced_device(found.run, wanted.on, wanted.on_fabric) if wanted.by_predictor or wanted.on else None
    asked = _changes(wanted, traced)
    if not asked:
        raise StepsightError("what-if needs at least one change, as --faster gemm=1.5 or --no-host")
    step_s, alone = found.base.replayed_s, [(title, found.step_with(change)) for title, change in asked]
    each = [{"change": title, "step_s": s, "speedup": step_s / s if s else 0.0} for title, s in alone]
    tally, changed = changes.Tally(), list(found.graphs)
    for _, change in asked:
        changed = change(changed, tally)
    after, host_saves = replay(changed), 0.0
    changed_host = _host_percent(after.walked)
    if changed_host >= _HOST_LIMIT and after.replayed_s:
        free = replay(changes.as_device_graph(changed, changes.Tally())).replayed_s
        host_saves = 100.0 * (1.0 - free / after.replayed_s)
    device = sum(graph.device_time_s for graph in found.run.graphs) or 1.0
    by = None if traced is None else predictor_name(traced[0])
    return {
        "run": found.run.name,
        "measured_s": found.profiled.measured_s,
        "replayed_s": found.profiled.replayed_s,
        "step_s": step_s,
        "unprofiled_s": step_s,
        "changed_s": after.replayed_s,
        "speedup": step_s / after.replayed_s if after.replayed_s else 0.0,
        "changes": each,
        "host_percent": _host_percent(found.base.walked),
        "changed_host_percent": changed_host,
        "host_saves_percent": host_saves,
        "traced_on": traced and {"hardware": traced[0], "fabric": traced[1].name, "predictor": by},
        "predicted_percent": min(100.0 * tally.predicted_s / device, 100.0),
        "scaled_percent": min(100.0 * tally.scaled_s / device, 100.0),
        "warnings": found.warnings,
    }


def _host_percent(walked: ReplayTimes) -> float:
    """Share of the critical path that is work of the host, percent; 0 for ranks that compute on their host."""
    path = critical_path(walked)
    whole = sum(path.values())
    return 100.0 * path.get("host", 0.0) / whole if whole and walked.joined.graphs[0].device != "cpu" else 0.0


def _changes(asked: TraceChanges, traced: tuple[str, Fabric] | None) -> list[tuple[str, Change]]:
    """Titles and functions of the changes that are asked for."""
    found: list[tuple[str, Change]] = [
        (f"{what} {factor:g} times as fast", partial(changes.faster, what=what, factor=factor))
        for what, factor in asked.faster.items()
    ]
    found += [("no host", changes.without_host)] * asked.no_host
    found += [("launches cost nothing", changes.as_device_graph)] * asked.cuda_graph
    found += [("no straggler", changes.without_straggler)] * asked.remove_straggler
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


def what_if_text(told: dict[str, Any]) -> str:
    every = {"change": "all of them", "step_s": told["changed_s"], "speedup": told["speedup"]}
    rows = [*told["changes"], *([every] if len(told["changes"]) > 1 else [])]
    lines = [
        step_text(told),
        table_of(rows, {"change": "change", "step ms": "step_s", "speed-up": "speedup"}, 3),
        f"durations changed by a predictor for {told['predicted_percent']:.1f} %, by a plain factor for "
        f"{told['scaled_percent']:.1f} % of device time",
    ]
    if max(told["host_percent"], told["changed_host_percent"]) >= 1.0:
        before, after = told["host_percent"], told["changed_host_percent"]
        shares = f"{before:.0f} % before the changes, {after:.0f} % after them"
        lines.append(f"the host's share of the critical path: {shares}")
    if told["host_saves_percent"] > 100 * LEAST_SHARE:
        lines.append(f"free launches (--cuda-graph) would save a further {told['host_saves_percent']:.1f} %")
    if told["traced_on"]:
        lines.append("traced on {hardware} ({fabric}); predicted by {predictor}".format(**told["traced_on"]))
    return "\n".join([*lines, *(f"warning: {warning}" for warning in told["warnings"])])
