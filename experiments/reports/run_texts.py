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
from stepsight.experiments.reports.text_table import Columns, Number, table, table_of

_FLOP = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1, "FLOP"))
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
_SIGNATURE = ("kind", "group_size", "num_bytes")


def scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """A number with the largest unit that makes it at least one."""
    size, unit = next((each for each in units if value >= each[0]), units[-1])
    return f"{value / size:.{0 if size == 1 else 2}f} {unit}"


def _counts(what: str, unit: str, counts: Mapping[str, int]) -> str:
    return table([what, unit], [[name, Number(count, 0)] for name, count in counts.items()])


def import_text(told: dict[str, Any]) -> str:
    lines = [
        f"imported {told['run']} into {told['out']}",
        f"{told['ranks']} rank(s) of {told['world_size']}, {told['steps']} step(s), {told['events']} events, "
        f"{told['nodes']} nodes{', ' + told['hardware'] if told['hardware'] else ''}",
        f"device time {1e3 * told['device_time_s']:.3f} ms: {told['recognised_percent']:.1f} % of a known kind, "
        f"{told['opaque_percent']:.1f} % opaque",
        _counts("dependency", "edges", told["dependencies"]),
    ]
    return "\n".join([*lines, *(f"warning: {text}" for text in told["warnings"])])


def trace_summary(name: str, graphs: Sequence[Program]) -> dict[str, Any]:
    """Breakdown of a traced run, as JSON and as ``text``."""
    from stepsight.simulator.replay.causes import breakdown  # importing a trace needs no simulator

    def shares(what: str, unit: str, seconds: dict[str, float], of: str, whole: float) -> str:
        rows = [[key[:60], Number(1e3 * s, 3), Number(100 * s / (whole or 1.0))] for key, s in seconds.items()]
        return table([what, unit, f"% of {of}"], rows)

    told = breakdown(graphs).to_dict()
    warnings = list(dict.fromkeys(warning for graph in graphs for warning in graph.warnings))
    device, first, kinds, opaque = sum(told["kinds"].values()), graphs[0], told["kinds"], told["opaque"]
    lines = [
        f"trace {name}: {len(graphs)} rank(s) of {first.world_size}, {len(first.steps_s)} step(s)"
        f"{', ' + first.device_name if first.device_name else ''}",
        shares("kind", "device ms", kinds, "device time", device),
        f"not recognised: {100 * sum(opaque.values()) / (device or 1.0):.1f} % of device time",
        *([shares("opaque kernel", "device ms", opaque, "device time", device)] if opaque else []),
        f"computation {1e3 * told['compute_s']:.3f} ms, communication {1e3 * told['communication_s']:.3f} ms, of which "
        f"{told['overlap_percent']:.1f} % overlaps computation",
        shares("cause of idle time", "ms of all ranks", told["idle"], "step time of all ranks", told["steps_s"]),
        shares("critical path", "ms", told["critical"], "critical path", sum(told["critical"].values())),
    ]
    if len(graphs) > 1:
        late: Columns = {"step ms": "step_s", "late at collectives ms": "late_s"}
        lines.append(table_of(told["ranks"], {"rank": lambda row: int(row["rank"]), **late}, 3))
    text = "\n\n".join([*lines, *(f"warning: {text}" for text in warnings)])
    return {"trace": name, **told, "warnings": warnings, "text": text}


def dataset_text(told: dict[str, Any]) -> str:
    """A dataset that was written (``out``), or is there (``dataset``)."""
    where = f"wrote {told['out']}" if "out" in told else f"dataset {told['dataset']}"
    lines = [
        f"{where}: {told['graphs']} graphs ({told['step_graphs']} of steps, {told['segment_graphs']} of "
        f"segments) of {told['runs']} run(s), version {told['version']}",
        _counts("node type", "nodes", told["nodes"]),
        _counts("relation", "edges", told["edges"]),
    ]
    return "\n".join([*lines, *(f"warning: {text}" for text in told.get("warnings", ()))])


def capture_text(told: dict[str, Any]) -> str:
    world, local = told["world_size"], told["devices_per_node"]
    nodes = f", {local} on each node" if world > local else " on one node"
    lines = [f"script     {told['script']}: {world} rank{'s' * (world > 1)}{nodes}"]
    sent: Columns = {"collective": "kind", "group": "group", "ranks": "group_size"}
    sent |= {"bytes each": lambda row: scaled(row["num_bytes"], _BYTES), "count": "count"}
    for rank in told["ranks"]:
        phases = ", ".join(f"{count} {phase}" for phase, count in rank["ops_by_phase"].items())
        peak = rank["peak_bytes"]
        memory = f"peak memory {scaled(peak, _BYTES)} of tensors" if peak else "memory unknown"
        lines += [
            "",
            f"rank {rank['rank']}: {rank['ops']} ops ({phases}), {scaled(rank['flops'], _FLOP)}, "
            f"{memory}, streams {', '.join(rank['streams'])}",
            table_of(rank["collectives"], sent, 0) if rank["collectives"] else "no collectives",
            _counts("op", "count", rank["ops_by_kind"]),
        ]
    lines += [f"\nrank {rank} {text}" for rank, text in told.get("largest_parts", {}).items()]
    told_once = warnings_once(text for rank in told["ranks"] for text in rank["warnings"])
    lines += ["", *(f"warning: {text}" for text in told_once)] if told_once else []
    return "\n".join([*lines, f"\nwrote {told['out']}"] if "out" in told else lines)


def captures_differ(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Differences of two captures, rank by rank: of FLOP, memory, ops by kind, and collectives."""

    def differing(counts: Sequence[Mapping[Any, int]]) -> dict[Any, list[int]]:
        pairs = {key: [each.get(key, 0) for each in counts] for key in sorted({*counts[0], *counts[1]})}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    found = []
    for pair in zip(one["ranks"], other["ranks"], strict=False):
        sent = [Counter[tuple[Any, ...]]() for _ in pair]
        for rank, counts in zip(pair, sent, strict=True):
            for row in rank["collectives"]:
                counts[tuple(row[name] for name in _SIGNATURE)] += row["count"]
        same = {"ranks": "rank", "flops": "flops", "peak_bytes": "peak_bytes"}
        told = {name: [rank[key] for rank in pair] for name, key in same.items()}
        collectives = [
            {**dict(zip(_SIGNATURE, key, strict=True)), "counts": counts} for key, counts in differing(sent).items()
        ]
        kinds = differing([rank["ops_by_kind"] for rank in pair])
        found.append({**told, "ops_by_kind": kinds, "collectives": collectives})
    return {"scripts": [one["script"], other["script"]], "ranks": found}


def difference_text(told: dict[str, Any]) -> str:
    lines = [f"A: {told['scripts'][0]}", f"B: {told['scripts'][1]}"]
    for rank in told["ranks"]:
        counts = {
            **rank["ops_by_kind"],
            **{f"{c['kind']} of {scaled(c['num_bytes'], _BYTES)}, {c['group_size']} ranks": c["counts"]
               for c in rank["collectives"]},
        }  # fmt: skip
        rows: list[list[str | Number]] = [["FLOP", *(scaled(value, _FLOP) for value in rank["flops"])]]
        rows += [["peak memory", *(scaled(value, _BYTES) for value in rank["peak_bytes"])]]
        rows += [[what, *(Number(value, 0) for value in pair)] for what, pair in counts.items()]
        first, second = rank["ranks"]
        lines += ["", table([f"rank {first} of A, {second} of B: what differs", "A", "B"], rows)]
    return "\n".join(lines)


def describe_collection(path: Path) -> dict[str, Any]:
    """Runs and event profiles of a collection, and planned ones that are missing."""
    collection = read_collection(path)
    others = [_imported_row(read_imported(folder)) for folder in collection.imported]
    rows = [*map(_run_row, collection), *others]
    events = {file.stem: len(read_event_file(file).works) for file in collection.events}
    columns: Columns = {
        "run": "name",
        "role": "role",
        "ranks": lambda row: f"as {row['stand_in']}" if "stand_in" in row else row["ranks"],
        **({"hardware": lambda row: row.get("hardware", "")} if others else {}),
        "steps": lambda row: row.get("steps", row.get("traced_steps", "")),
        "median ms": lambda row: row.get("measured_s", row.get("traced_s", "")),
        "spread % over rounds": lambda row: row.get("spread_percent", "traced" if "traced_s" in row else ""),
    }
    lines = [f"collection {path}", table_of(rows, columns)]
    if any("traced_s" in row for row in others):
        lines.append("traced: steps under the profiler, which makes them longer; look into one with show RUN_FOLDER")
    if any(manifest.compiled for manifest in collection):
        lines.append("composite ops were compiled")
    lines += [f"events {name}: {count} distinct signatures measured" for name, count in events.items()]
    if collection.missing:
        lines.append(f"planned but absent: {', '.join(collection.missing)}")
    told = {"collection": str(path), "runs": rows, "events": events, "absent": collection.missing}
    return {**told, "text": "\n".join(lines)}


def _run_row(manifest: RunManifest) -> dict[str, Any]:
    """One line about a run: median of the unprofiled steps and the spread of the rounds' medians."""
    row: dict[str, Any] = {"name": manifest.name, "role": manifest.role, "ranks": manifest.world_size}
    row |= {} if manifest.stand_in is None else {"stand_in": manifest.stand_in}
    return {**row, **({"compiled": True} if manifest.compiled else {}), **step_times(manifest.rounds)}


def _imported_row(run: ImportedRun) -> dict[str, Any]:
    """An imported run: with its timed steps if it has any, as a script has, else with its traced ones."""
    row = {"name": run.name, "imported": True, "role": run.role, "ranks": len(run.ranks), "hardware": run.hardware}
    if run.rounds:
        return {**row, **step_times(run.rounds)}
    longest = list(map(max, zip(*(read_steps(run.folder, stem) for stem in run.ranks.values()), strict=False)))
    return {**row, "traced_steps": len(longest), "traced_s": statistics.median(longest)} if longest else row


def step_times(rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Number of the timed steps, their median, and the spread of the medians of rounds."""
    seconds, medians = [each for steps in rounds for each in steps], [*map(statistics.median, rounds)]
    whole = statistics.median(seconds)
    spread = 100 * (max(medians) - min(medians)) / whole if whole else 0.0
    return {"steps": len(seconds), "measured_s": whole, "spread_percent": spread}


def describe_run(path: Path) -> dict[str, Any]:
    """A run that the harness made: its times, and the traced seconds of each kind of op and collective."""
    trace = read_run(path)
    manifest, row = trace.manifest, _run_row(trace.manifest)
    calls, spent = Counter[str](), Counter[str]()
    for each in trace.segments():
        for node, seconds in zip(each.program.nodes, each.slot_s.tolist(), strict=True):
            calls[node.work.kind] += 1
            spent[node.work.kind] += seconds
    kinds = {kind: {"calls": calls[kind], "seconds": seconds} for kind, seconds in spent.most_common()}
    columns: Columns = {
        "kind": "kind",
        "calls traced": "calls",
        "ms": lambda each: Number(1e3 * each["seconds"], 2),
        "%": lambda each: 100 * each["seconds"] / (spent.total() or 1.0),
    }
    head = f"run {row['name']}: {1e3 * row['measured_s']:.1f} ms on {row['ranks']} rank(s)"
    if manifest.stand_in is not None:
        head += f", in place of rank {manifest.stand_in} of {manifest.job.cluster.num_devices}"
    head += ", composite ops compiled" if manifest.compiled else ""
    text = f"{head}\n{table_of([{'kind': kind, **each} for kind, each in kinds.items()], columns)}"
    return {**row, "kinds": kinds, "text": text}
