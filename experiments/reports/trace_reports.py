"""Texts of the verbs for traces: import, replay and dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepsight.dataset.graph.rank_graph import RankGraph
from stepsight.dataset.runs.imported_run import has_traces, run_folders, run_graphs
from stepsight.experiments.reports.text_table import Number, table
from stepsight.simulator.replay.causes import breakdown
from stepsight.simulator.replay.replay import replay

_HOST_LIMIT = 50.0  # percent of the critical path from which the host limits a step


def import_text(told: dict[str, Any]) -> str:
    """The result of an import as text."""
    lines = [
        f"imported {told['run']} into {told['out']}",
        f"{told['ranks']} rank(s) of {told['world_size']}, {told['steps']} step(s), {told['events']} events, "
        f"{told['nodes']} nodes{', ' + told['hardware'] if told['hardware'] else ''}",
        f"device time {1e3 * told['device_time_s']:.3f} ms: {told['recognised_percent']:.1f} % of a known kind, "
        f"{told['opaque_percent']:.1f} % opaque",
        table(["dependency", "edges"], [[kind, count] for kind, count in told["dependencies"].items()]),
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in told["warnings"])])


def trace_summary(name: str, graphs: Sequence[RankGraph]) -> dict[str, Any]:
    """Breakdown of a traced run, as JSON and as ``text``."""
    told = breakdown(graphs).to_dict()
    warnings = list(dict.fromkeys(warning for graph in graphs for warning in graph.warnings))
    device, steps = sum(told["kinds"].values()) or 1.0, told["steps_s"] or 1.0
    path = sum(told["critical"].values()) or 1.0
    unknown = sum(told["opaque"].values())
    first = graphs[0]
    lines = [
        f"trace {name}: {len(graphs)} rank(s) of {first.world_size}, {len(first.steps_s)} step(s)"
        f"{', ' + first.device_name if first.device_name else ''}",
        _shares("kind", "device ms", told["kinds"], device, "device time"),
        f"not recognised: {100 * unknown / device:.1f} % of device time",
        *([_shares("opaque kernel", "device ms", told["opaque"], device, "device time")] if told["opaque"] else []),
        f"computation {1e3 * told['compute_s']:.3f} ms, communication {1e3 * told['communication_s']:.3f} ms, of which "
        f"{told['overlap_percent']:.1f} % overlaps computation",
        _shares("cause of idle time", "ms of all ranks", told["idle"], steps, "step time of all ranks"),
        _shares("critical path", "ms", told["critical"], path, "critical path"),
    ]
    if len(graphs) > 1:
        cells = [[int(r["rank"]), Number(1e3 * r["step_s"], 3), Number(1e3 * r["late_s"], 3)] for r in told["ranks"]]
        lines.append(table(["rank", "step ms", "late at collectives ms"], cells))
    lines += [f"warning: {warning}" for warning in warnings]
    return {"trace": name, **told, "warnings": warnings, "text": "\n\n".join(lines)}


def _shares(what: str, unit: str, seconds: dict[str, float], whole: float, of: str) -> str:
    """A table of seconds and their shares of ``whole``, which is the time that ``of`` names."""
    cells = [[name[:60], Number(1e3 * spent, 3), Number(100 * spent / whole)] for name, spent in seconds.items()]
    return table([what, unit, f"% of {of}"], cells)


def replay_runs(path: Path) -> dict[str, Any]:
    """Replay a run, or every run of a collection: then the totals, and each run under ``runs``.

    Raises:
        StepsightError: If there is no run with traces, or its dependencies contradict each other.
    """
    told = []
    folders = run_folders(path)
    for folder in [each for each in folders if has_traces(each)] or folders[:1]:
        run = run_graphs(folder)
        warnings = [warning for graph in run.graphs for warning in graph.warnings]
        told.append({"run": run.name, **replay(run.graphs).to_dict(), "warnings": list(dict.fromkeys(warnings))})
    if len(told) == 1:
        return told[0]
    measured, replayed = (sum(each[key] for each in told) for key in ("measured_s", "replayed_s"))
    streams = [{"run": each["run"], **stream} for each in told for stream in each["streams"]]
    error = 100.0 * (replayed / measured - 1.0) if measured else 0.0
    return {"measured_s": measured, "replayed_s": replayed, "error_percent": error, "streams": streams, "runs": told}


def replay_text(told: dict[str, Any]) -> str:
    """A replay as text."""
    return "\n\n".join(_replay_text(each) for each in told.get("runs", [told]))


def _replay_text(told: dict[str, Any]) -> str:
    lines = [
        f"run {told['run']}: step measured {1e3 * told['measured_s']:.3f} ms, replayed "
        f"{1e3 * told['replayed_s']:.3f} ms ({told['error_percent']:+.2f} %), {told['steps']} step(s)",
        f"idle time without a known cause: {told['unexplained_percent']:.2f} % of the steps",
    ]
    if told["unrecorded_percent"]:
        lines.append(f"work that the trace leaves out: {told['unrecorded_percent']:.2f} % of the steps")
    cells = [
        [s["rank"], s["stream"], Number(1e3 * s["measured_busy_s"], 3), Number(1e3 * s["replayed_busy_s"], 3),
         Number(s["error_percent"], 2), Number(1e3 * s["unexplained_idle_s"], 3)]
        for s in told["streams"]
    ]  # fmt: skip
    lines.append(table(["rank", "stream", "busy ms", "replayed ms", "error %", "unexplained idle ms"], cells))
    return "\n".join([*lines, *(f"warning: {warning}" for warning in told["warnings"])])


def what_if_text(told: dict[str, Any]) -> str:
    """The result of what-if as text."""
    cells = [[each["change"], Number(1e3 * each["step_s"], 3), Number(each["speedup"], 3)] for each in told["changes"]]
    if len(cells) > 1:
        cells.append(["all of them", Number(1e3 * told["changed_s"], 3), Number(told["speedup"], 3)])
    lines = [
        f"run {told['run']}: step measured {1e3 * told['measured_s']:.3f} ms, replayed "
        f"{1e3 * told['replayed_s']:.3f} ms"
        + (f", without a profiler {1e3 * told['unprofiled_s']:.3f} ms" if told["unprofiled_s"] else ""),
        table(["change", "step ms", "speed-up"], cells),
        f"durations changed by a predictor for {told['predicted_percent']:.1f} %, by a plain factor for "
        f"{told['scaled_percent']:.1f} % of device time",
    ]
    if max(told["host_percent"], told["changed_host_percent"]) >= 1.0:
        lines.append(
            f"the host's share of the critical path: {told['host_percent']:.0f} % before the changes, "
            f"{told['changed_host_percent']:.0f} % after them"
        )
    if told["changed_host_percent"] >= _HOST_LIMIT:
        lines.append("the host is the limit: faster kernels and links gain little; see --cuda-graph and --no-host")
    if told["traced_on"]:
        lines.append("traced on {hardware} ({fabric}); predicted by {predictor}".format(**told["traced_on"]))
    return "\n".join([*lines, *(f"warning: {warning}" for warning in told["warnings"])])


def dataset_text(told: dict[str, Any]) -> str:
    """A new dataset as text."""
    lines = [
        f"wrote {told['out']}: {told['graphs']} graphs ({told['step_graphs']} of steps, {told['segment_graphs']} of "
        f"segments) of {told['runs']} run(s), version {told['version']}",
        table(["node type", "nodes"], [[kind, count] for kind, count in told["nodes"].items()]),
        table(["relation", "edges"], [[kind, count] for kind, count in told["edges"].items()]),
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in told["warnings"])])
