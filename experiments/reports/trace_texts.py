"""What verbs print of traces and captured scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepsight.dataset.graph.program import Program
from stepsight.dataset.runs.run_folder import has_traces, run_folders, run_graphs
from stepsight.experiments.reports.text_table import Number, table

_HOST_LIMIT = 50.0  # percent of the critical path from which the host limits a step


def import_text(told: dict[str, Any]) -> str:
    lines = [
        f"imported {told['run']} into {told['out']}",
        f"{told['ranks']} rank(s) of {told['world_size']}, {told['steps']} step(s), {told['events']} events, "
        f"{told['nodes']} nodes{', ' + told['hardware'] if told['hardware'] else ''}",
        f"device time {1e3 * told['device_time_s']:.3f} ms: {told['recognised_percent']:.1f} % of a known kind, "
        f"{told['opaque_percent']:.1f} % opaque",
        table(["dependency", "edges"], [[kind, count] for kind, count in told["dependencies"].items()]),
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in told["warnings"])])


def trace_summary(name: str, graphs: Sequence[Program]) -> dict[str, Any]:
    """Breakdown of a traced run, as JSON and as ``text``."""
    from stepsight.simulator.replay.causes import breakdown  # importing a trace needs no simulator

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
    from stepsight.simulator.replay.replay import replay

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
    lines = [
        f"wrote {told['out']}: {told['graphs']} graphs ({told['step_graphs']} of steps, {told['segment_graphs']} of "
        f"segments) of {told['runs']} run(s), version {told['version']}",
        table(["node type", "nodes"], [[kind, count] for kind, count in told["nodes"].items()]),
        table(["relation", "edges"], [[kind, count] for kind, count in told["edges"].items()]),
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in told["warnings"])])


def capture_text(told: dict[str, Any]) -> str:
    lines = [f"script     {told['script']}: {_world(told)}"]
    for rank in told["ranks"]:
        phases = ", ".join(f"{count} {phase}" for phase, count in rank["ops_by_phase"].items())
        lines += [
            "",
            f"rank {rank['rank']}: {rank['ops']} ops ({phases}), {scaled(rank['flops'], _FLOP)}, "
            f"peak memory {scaled(rank['peak_bytes'], _BYTES)}, streams {', '.join(rank['streams'])}",
            *_collectives(rank["collectives"]),
            table(["op", "count"], [[kind, Number(count, 0)] for kind, count in rank["ops_by_kind"].items()]),
        ]  # fmt: skip
        lines += [f"warning: {text}" for text in rank["warnings"]]
    if "out" in told:
        lines.append(f"\nwrote {told['out']}")
    return "\n".join(lines)


def _world(told: dict[str, Any]) -> str:
    """How many ranks there are, and how many nodes share them."""
    world, local = told["world_size"], told["devices_per_node"]
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    return f"{ranks}, {local} on each node" if world > local else f"{ranks} on one node"


def _collectives(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["no collectives"]
    cells = [
        [c["kind"], c["group"], Number(c["group_size"], 0), scaled(c["num_bytes"], _BYTES), Number(c["count"], 0)]
        for c in rows
    ]
    return [table(["collective", "group", "ranks", "bytes each", "count"], cells)]


def scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """A number with the largest unit that makes it at least one."""
    size, unit = next((each for each in units if value >= each[0]), units[-1])
    return f"{value / size:.0f} {unit}" if size == 1 else f"{value / size:.2f} {unit}"


_FLOP = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1, "FLOP"))
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def captures_differ(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Differences of two captures, rank by rank: of FLOP, memory, ops by kind, and collectives."""
    found = []
    for left, right in zip(one["ranks"], other["ranks"], strict=False):
        kinds = sorted(left["ops_by_kind"].keys() | right["ops_by_kind"].keys())
        counts = {kind: (left["ops_by_kind"].get(kind, 0), right["ops_by_kind"].get(kind, 0)) for kind in kinds}
        mine, theirs = _by_signature(left), _by_signature(right)
        collectives = [
            {**dict(zip(_SIGNATURE, key, strict=True)), "counts": [mine.get(key, 0), theirs.get(key, 0)]}
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key, 0) != theirs.get(key, 0)
        ]
        found.append(
            {
                "ranks": [left["rank"], right["rank"]],
                "flops": [left["flops"], right["flops"]],
                "peak_bytes": [left["peak_bytes"], right["peak_bytes"]],
                "ops_by_kind": {kind: list(pair) for kind, pair in counts.items() if pair[0] != pair[1]},
                "collectives": collectives,
            }
        )
    return {"scripts": [one["script"], other["script"]], "ranks": found}


_SIGNATURE = ("kind", "group_size", "num_bytes")


def _by_signature(rank: dict[str, Any]) -> dict[tuple[Any, ...], int]:
    found: dict[tuple[Any, ...], int] = {}
    for row in rank["collectives"]:
        key = tuple(row[name] for name in _SIGNATURE)
        found[key] = found.get(key, 0) + row["count"]
    return found


def difference_text(told: dict[str, Any]) -> str:
    lines = [f"A: {told['scripts'][0]}", f"B: {told['scripts'][1]}"]
    for rank in told["ranks"]:
        rows: list[list[str | Number]] = [["FLOP", *(scaled(value, _FLOP) for value in rank["flops"])]]
        rows += [["peak memory", *(scaled(value, _BYTES) for value in rank["peak_bytes"])]]
        rows += [[kind, *(Number(value, 0) for value in pair)] for kind, pair in rank["ops_by_kind"].items()]
        rows += [
            [f"{c['kind']} of {scaled(c['num_bytes'], _BYTES)}, {c['group_size']} ranks",
             *(Number(value, 0) for value in c["counts"])]
            for c in rank["collectives"]
        ]  # fmt: skip
        first, second = rank["ranks"]
        lines += ["", table([f"rank {first} of A, {second} of B: what differs", "A", "B"], rows)]
    return "\n".join(lines)
