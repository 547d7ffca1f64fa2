"""Texts of the verbs for traces: import, replay and dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepsight.dataset.imported.imported_run import run_folders, run_graphs
from stepsight.experiments.reports.text_table import Number, table
from stepsight.simulator.replay.replay import replay


def import_text(told: dict[str, Any]) -> str:
    """What was imported, for people."""
    lines = [
        f"imported {told['run']} into {told['out']}",
        f"{told['ranks']} rank(s) of {told['world_size']}, {told['steps']} step(s), {told['events']} events, "
        f"{told['nodes']} nodes{', ' + told['hardware'] if told['hardware'] else ''}",
        f"device time {1e3 * told['device_time_s']:.3f} ms: {told['recognised_percent']:.1f} % of a known kind, "
        f"{told['opaque_percent']:.1f} % opaque",
        table(["dependency", "edges"], [[kind, count] for kind, count in told["dependencies"].items()]),
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in told["warnings"])])


def replay_runs(path: Path) -> dict[str, Any]:
    """Replay a run, or every run of a collection: then the sums of all, and each under ``runs``.

    Raises:
        StepsightError: If there is no run with traces, or its dependencies contradict each other.
    """
    told = []
    for folder in run_folders(path):
        name, _, graphs = run_graphs(folder)
        warnings = [warning for graph in graphs for warning in graph.warnings]
        told.append({"run": name, **replay(graphs).to_dict(), "warnings": list(dict.fromkeys(warnings))})
    if len(told) == 1:
        return told[0]
    measured, replayed = (sum(each[key] for each in told) for key in ("measured_s", "replayed_s"))
    streams = [{"run": each["run"], **stream} for each in told for stream in each["streams"]]
    error = 100.0 * (replayed / measured - 1.0) if measured else 0.0
    return {"measured_s": measured, "replayed_s": replayed, "error_percent": error, "streams": streams, "runs": told}


def replay_text(told: dict[str, Any]) -> str:
    """A replay, for people."""
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


def dataset_text(told: dict[str, Any]) -> str:
    """A dataset that was made, for people."""
    lines = [
        f"wrote {told['out']}: {told['graphs']} graphs ({told['step_graphs']} of steps, {told['segment_graphs']} of "
        f"segments) of {told['runs']} run(s), version {told['version']}",
        table(["node type", "nodes"], [[kind, count] for kind, count in told["nodes"].items()]),
        table(["relation", "edges"], [[kind, count] for kind, count in told["edges"].items()]),
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in told["warnings"])])
