"""What verbs print of traces, runs, collections and captured scripts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepsight.dataset.capture.captured import warnings_once
from stepsight.dataset.graph.graph_files import read_steps
from stepsight.dataset.graph.program import Program
from stepsight.dataset.runs.run_folder import ImportedRun, read_collection, read_event_file, read_imported, read_run
from stepsight.dataset.runs.run_manifest import RunManifest
from stepsight.experiments.reports.text_table import Column, Number, table, table_of


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
        late: dict[str, str | Column] = {"step ms": "step_s", "late at collectives ms": "late_s"}
        lines.append(table_of(told["ranks"], {"rank": lambda row: int(row["rank"]), **late}, 3))
    lines += [f"warning: {warning}" for warning in warnings]
    return {"trace": name, **told, "warnings": warnings, "text": "\n\n".join(lines)}


def _shares(what: str, unit: str, seconds: dict[str, float], whole: float, of: str) -> str:
    """A table of seconds and their shares of ``whole``, which is the time that ``of`` names."""
    cells = [[name[:60], Number(1e3 * spent, 3), Number(100 * spent / whole)] for name, spent in seconds.items()]
    return table([what, unit, f"% of {of}"], cells)


def dataset_text(told: dict[str, Any]) -> str:
    """A dataset that was written (``out``), or is there (``dataset``)."""
    where = f"wrote {told['out']}" if "out" in told else f"dataset {told['dataset']}"
    lines = [
        f"{where}: {told['graphs']} graphs ({told['step_graphs']} of steps, {told['segment_graphs']} of "
        f"segments) of {told['runs']} run(s), version {told['version']}",
        table(["node type", "nodes"], [[kind, count] for kind, count in told["nodes"].items()]),
        table(["relation", "edges"], [[kind, count] for kind, count in told["edges"].items()]),
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in told.get("warnings", ()))])


def capture_text(told: dict[str, Any]) -> str:
    world, local = told["world_size"], told["devices_per_node"]
    nodes = f", {local} on each node" if world > local else " on one node"
    lines = [f"script     {told['script']}: {world} rank{'s' * (world > 1)}{nodes}"]
    for rank in told["ranks"]:
        phases = ", ".join(f"{count} {phase}" for phase, count in rank["ops_by_phase"].items())
        lines += [
            "",
            f"rank {rank['rank']}: {rank['ops']} ops ({phases}), {scaled(rank['flops'], _FLOP)}, "
            f"peak memory {scaled(rank['peak_bytes'], _BYTES)} of tensors, streams {', '.join(rank['streams'])}",
            *_collectives(rank["collectives"]),
            table(["op", "count"], [[kind, Number(count, 0)] for kind, count in rank["ops_by_kind"].items()]),
        ]  # fmt: skip
    told_once = warnings_once(text for rank in told["ranks"] for text in rank["warnings"])
    lines += ["", *(f"warning: {text}" for text in told_once)] if told_once else []
    if "out" in told:
        lines.append(f"\nwrote {told['out']}")
    return "\n".join(lines)


def _collectives(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["no collectives"]
    size: dict[str, str | Column] = {"bytes each": lambda row: scaled(row["num_bytes"], _BYTES), "count": "count"}
    return [table_of(rows, {"collective": "kind", "group": "group", "ranks": "group_size", **size}, 0)]


def scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """A number with the largest unit that makes it at least one."""
    size, unit = next((each for each in units if value >= each[0]), units[-1])
    return f"{value / size:.0f} {unit}" if size == 1 else f"{value / size:.2f} {unit}"


_FLOP = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1, "FLOP"))
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


_SIGNATURE = ("kind", "group_size", "num_bytes")


def captures_differ(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Differences of two captures, rank by rank: of FLOP, memory, ops by kind, and collectives."""
    found = []
    for pair in zip(one["ranks"], other["ranks"], strict=False):
        signatures = [Counter[tuple[Any, ...]]() for _ in pair]
        for rank, counts in zip(pair, signatures, strict=True):
            for row in rank["collectives"]:
                counts[tuple(row[name] for name in _SIGNATURE)] += row["count"]
        collectives = [
            {**dict(zip(_SIGNATURE, key, strict=True)), "counts": counts}
            for key, counts in _counts_that_differ(*signatures).items()
        ]
        same = {"ranks": "rank", "flops": "flops", "peak_bytes": "peak_bytes"}
        told = {name: [rank[key] for rank in pair] for name, key in same.items()}
        kinds = _counts_that_differ(*(rank["ops_by_kind"] for rank in pair))
        found.append({**told, "ops_by_kind": kinds, "collectives": collectives})
    return {"scripts": [one["script"], other["script"]], "ranks": found}


def _counts_that_differ(one: Mapping[Any, int], other: Mapping[Any, int]) -> dict[Any, list[int]]:
    pairs = {key: [one.get(key, 0), other.get(key, 0)] for key in sorted(one.keys() | other.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


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


def describe_collection(path: Path) -> dict[str, Any]:
    """Runs and event profiles of a collection, and planned ones that are missing."""
    collection = read_collection(path)
    rows = [_run_row(manifest) for manifest in collection]
    others = [_imported_row(read_imported(folder)) for folder in collection.imported]
    events = {file.stem: len(read_event_file(file).works) for file in collection.events}
    columns: dict[str, str | Column] = {
        "run": "name",
        "role": "role",
        "ranks": lambda row: f"as {row['stand_in']}" if "stand_in" in row else row["ranks"],
        **({"hardware": lambda row: row.get("hardware", "")} if others else {}),
        "steps": lambda row: row.get("steps", row.get("traced_steps", "")),
        "median ms": lambda row: row.get("measured_s", row.get("traced_s", "")),
        "spread % over rounds": lambda row: row.get("spread_percent", "traced" if "traced_s" in row else ""),
    }
    lines = [f"collection {path}", table_of([*rows, *others], columns)]
    if any("traced_s" in row for row in others):
        lines.append("traced: steps under the profiler, which makes them longer; look into one with show RUN_FOLDER")
    if any(manifest.compiled for manifest in collection):
        lines.append("composite ops were compiled")
    lines += [f"events {name}: {count} distinct signatures measured" for name, count in events.items()]
    if collection.missing:
        lines.append(f"planned but absent: {', '.join(collection.missing)}")
    told = {"collection": str(path), "runs": rows + others, "events": events, "absent": collection.missing}
    return {**told, "text": "\n".join(lines)}


def _run_row(manifest: RunManifest) -> dict[str, Any]:
    """One line about a run: median of the unprofiled steps and the spread of the rounds' medians."""
    row: dict[str, Any] = {"name": manifest.name, "role": manifest.role, "ranks": manifest.world_size}
    row |= {} if manifest.stand_in is None else {"stand_in": manifest.stand_in}
    return {**row, **({"compiled": True} if manifest.compiled else {}), **_step_times(manifest.rounds)}


def _imported_row(run: ImportedRun) -> dict[str, Any]:
    """An imported run: with its timed steps if it has any, as a script has, else with its traced ones."""
    row = {"name": run.name, "imported": True, "role": run.role, "ranks": len(run.ranks), "hardware": run.hardware}
    if run.rounds:
        return {**row, **_step_times(run.rounds)}
    ranks = [read_steps(run.folder, stem) for stem in run.ranks.values()]
    longest = [max(of_ranks) for of_ranks in zip(*ranks, strict=False)]
    return {**row, "traced_steps": len(longest), "traced_s": statistics.median(longest)} if longest else row


def _step_times(rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    seconds = [each for steps in rounds for each in steps]
    medians, whole = [statistics.median(steps) for steps in rounds], statistics.median(seconds)
    spread = 100 * (max(medians) - min(medians)) / whole
    return {"steps": len(seconds), "measured_s": whole, "spread_percent": spread}


def describe_run(path: Path) -> dict[str, Any]:
    """A run that the harness made: its times, and the traced seconds of each kind of op and collective."""
    trace = read_run(path)
    manifest, row = trace.manifest, _run_row(trace.manifest)
    totals: dict[str, dict[str, Any]] = {}
    pairs = (pair for each in trace.segments() for pair in zip(each.program.nodes, each.slot_s, strict=True))
    for node, seconds in pairs:
        entry = totals.setdefault(node.work.kind, {"calls": 0, "seconds": 0.0})
        entry["calls"] += 1
        entry["seconds"] += float(seconds)
    whole = sum(entry["seconds"] for entry in totals.values()) or 1.0
    kinds = dict(sorted(totals.items(), key=lambda item: -item[1]["seconds"]))
    cells = [
        [kind, entry["calls"], Number(1e3 * entry["seconds"], 2), Number(100 * entry["seconds"] / whole)]
        for kind, entry in kinds.items()
    ]
    head = f"run {row['name']}: {1e3 * row['measured_s']:.1f} ms on {row['ranks']} rank(s)"
    if manifest.stand_in is not None:
        head += f", in place of rank {manifest.stand_in} of {manifest.job.cluster.num_devices}"
    head += ", composite ops compiled" if manifest.compiled else ""
    return {**row, "kinds": kinds, "text": f"{head}\n{table(['kind', 'calls traced', 'ms', '%'], cells)}"}
