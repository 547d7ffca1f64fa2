"""``stepsight show``: describe a file or folder."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError, StepsightError, shorten
from stepsight.dataset.base.files import check_output_file, is_facts_file, read_facts, set_aside
from stepsight.dataset.base.registry import did_you_mean
from stepsight.dataset.capture.captured import MANIFEST, read_captured
from stepsight.dataset.graph.graph_files import read_steps
from stepsight.dataset.hardware.hardware import FABRICS, HARDWARE, Fabric, Hardware, facts_in, find_fabric, usual_fabric
from stepsight.dataset.job.frameworks import FRAMEWORKS, Framework, find_framework
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import SECTIONS
from stepsight.dataset.runs.run_folder import (
    ImportedRun,
    is_imported,
    read_collection,
    read_event_file,
    read_imported,
    read_run,
    run_graphs,
)
from stepsight.dataset.runs.run_manifest import RunManifest, read_object
from stepsight.dataset.traces.event_blocks import is_trace
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.experiments.reports.text_table import Number, table
from stepsight.experiments.reports.trace_texts import capture_text, trace_summary


def describe(path: Path) -> dict[str, Any]:
    """A description, with a ``text``.

    Raises:
        StepsightError: If nothing of ours is there.
    """
    if not path.exists():
        from stepsight.training.predictor.predictor import shipped_names

        if str(path) in shipped_names() or set_aside(path) is not None:
            return _predictor(path)
        preset = describe_preset(str(path))
        if preset is not None:
            return preset
        names = (*shipped_names(), *facts_names())
        raise StepsightError(
            "show needs an existing file or folder, or the name of a predictor, hardware, fabric or framework "
            f"({', '.join(names)}), got {str(path)!r:.80}{did_you_mean(path, names)}"
        )
    if path.is_dir():
        if (path / "summary.json").is_file():
            return describe(path / "summary.json")
        if (path / "runs").is_dir():
            return describe_collection(path)
        if (path / MANIFEST).is_file():
            told = read_captured(path).to_dict()
            return {**told, "text": capture_text(told)}
        if is_imported(path):
            run = run_graphs(path)
            return trace_summary(run.name, run.graphs)
        if (path / "manifest.json").is_file():
            return _predictor(path) if "format" in read_object(path / "manifest.json") else _run(path)
        if any(map(is_trace, path.iterdir())):
            return trace_summary(path.name, import_ranks([path]).graphs)
        raise StepsightError(f"{path} is no collection (runs/), run, predictor (manifest.json) or folder of traces")
    if is_trace(path):
        return trace_summary(path.name, import_ranks([path]).graphs)
    if path.suffix == ".parquet":
        return _measurements(path)
    if path.name.endswith((".csv", ".csv.gz")):
        return _runs_table(path)
    value = read_object(path) if path.suffix == ".json" else {}
    if "heldout" in value:
        return _summary(path, value)
    if "variants" in value and isinstance(value.get("text"), str):
        return value  # of a study on one GPU
    facts = describe_facts_file(path)
    if facts is not None:
        return facts
    return _job(Job.from_file(path))


def _job(job: Job) -> dict[str, Any]:
    tables = job.to_dict()
    framework = tables.pop("framework", "")
    rows = [["", "framework", framework]] if framework else []
    rows += [[section, key, value] for section, keys in tables.items() for key, value in keys.items()]
    rows.append(["", "micro-batches", job.num_micro_batches])
    text = f"job {job.name}\n" + table(["table", "key", "value"], [[str(c) for c in row] for row in rows])
    text += "".join(f"\nwarning: {warning}" for warning in job.warnings)
    return {
        "job": job.to_dict(),
        "devices": job.cluster.num_devices,
        "micro_batches": job.num_micro_batches,
        "text": text,
    }


def _summary(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    from stepsight.experiments.reports.job_texts import demo_text

    try:
        return {**value, "text": demo_text(value)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StepsightError(
            f"{path} must be the summary of a demo, got {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from None


def run_row(manifest: RunManifest) -> dict[str, Any]:
    """One line about a run: median of the unprofiled steps and the spread of the rounds' medians."""
    return {
        "name": manifest.name,
        "role": manifest.role,
        "ranks": manifest.world_size,
        **({} if manifest.stand_in is None else {"stand_in": manifest.stand_in}),
        **({"compiled": True} if manifest.compiled else {}),
        **_step_times(manifest.rounds),
    }


def _step_times(rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    seconds = [each for steps in rounds for each in steps]
    medians, whole = [statistics.median(steps) for steps in rounds], statistics.median(seconds)
    spread = 100 * (max(medians) - min(medians)) / whole
    return {"steps": len(seconds), "measured_s": whole, "spread_percent": spread}


def describe_collection(path: Path) -> dict[str, Any]:
    """Runs and event profiles of a collection, and planned ones that are missing."""
    collection = read_collection(path)
    rows = [run_row(manifest) for manifest in collection]
    events = {file.stem: len(read_event_file(file).works) for file in collection.events}
    cells = [
        [r["name"], r["role"], _ranks(r), r["steps"], Number(1e3 * r["measured_s"]), Number(r["spread_percent"])]
        for r in rows
    ]
    text = f"collection {path}\n" + table(["run", "role", "ranks", "steps", "median ms", "spread % over rounds"], cells)
    if collection.imported:
        others = [imported_row(read_imported(folder)) for folder in collection.imported]
        rows += others
        text = text if cells else f"collection {path}"
        titles = ["imported run", "ranks", "hardware", "steps", "median ms", "spread % over rounds"]
        text += "\n" + table(titles, [_imported_cells(row) for row in others])
        if any("traced_s" in row for row in others):
            text += "\ntraced: steps under the profiler, which makes them longer; look into one with show RUN_FOLDER"
    if any(manifest.compiled for manifest in collection):
        text += "\ncomposite ops were compiled"
    for name, count in events.items():
        text += f"\nevents {name}: {count} distinct signatures measured"
    if collection.missing:
        text += f"\nplanned but absent: {', '.join(collection.missing)}"
    return {"collection": str(path), "runs": rows, "events": events, "absent": collection.missing, "text": text}


def imported_row(run: ImportedRun) -> dict[str, Any]:
    """An imported run: with its timed steps if it has any, as a script has, else with its traced ones."""
    row = {"name": run.name, "imported": True, "role": run.role, "ranks": len(run.ranks), "hardware": run.hardware}
    if not run.rounds:
        ranks = [read_steps(run.folder, stem) for stem in run.ranks.values()]
        longest = [max(of_ranks) for of_ranks in zip(*ranks, strict=False)]
        return {**row, "traced_steps": len(longest), "traced_s": statistics.median(longest)} if longest else row
    return {**row, **_step_times(run.rounds)}


def _imported_cells(row: dict[str, Any]) -> list[Any]:
    timed: list[Any] = [""] * 3
    if "steps" in row:
        timed = [row["steps"], Number(1e3 * row["measured_s"]), Number(row["spread_percent"])]
    elif "traced_steps" in row:
        timed = [row["traced_steps"], Number(1e3 * row["traced_s"]), "traced"]
    return [row["name"], row["ranks"], row["hardware"], *timed]


def _ranks(row: dict[str, Any]) -> Any:
    return f"as {row['stand_in']}" if "stand_in" in row else row["ranks"]


def write_table(collection: Path, table: Path) -> int:
    """Write every measurement of a collection as Parquet; return their number."""
    from stepsight.dataset.tables.formats import read_collection_table

    if table.suffix != ".parquet":
        raise StepsightError(f"--table ends in .parquet, got {str(table)!r:.80}")
    check_output_file(table)
    found = read_collection_table(collection)
    found.to_parquet(table)
    return len(found)


def _run(path: Path) -> dict[str, Any]:
    trace = read_run(path)
    totals: dict[str, list[float]] = {}
    for segment in trace.segments():
        for node, seconds in zip(segment.program.nodes, segment.slot_s, strict=True):
            entry = totals.setdefault(node.work.kind, [0, 0.0])
            entry[0] += 1
            entry[1] += float(seconds)
    whole = sum(seconds for _, seconds in totals.values()) or 1.0
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    row = run_row(trace.manifest)
    cells = [[kind, int(n), Number(1e3 * s, 2), Number(100 * s / whole)] for kind, (n, s) in ordered]
    manifest, told = trace.manifest, ""
    if manifest.stand_in is not None:
        told = f", in place of rank {manifest.stand_in} of {manifest.job.cluster.num_devices}"
    told += ", composite ops compiled" if manifest.compiled else ""
    text = f"run {row['name']}: {1e3 * row['measured_s']:.1f} ms on {row['ranks']} rank(s){told}\n"
    text += table(["kind", "calls traced", "ms", "%"], cells)
    return {**row, "kinds": {kind: {"calls": int(n), "seconds": s} for kind, (n, s) in ordered}, "text": text}


def _measurements(path: Path) -> dict[str, Any]:
    """A table of ops and collectives that ``stepsight import`` wrote."""
    from stepsight.dataset.tables import Measurements, summary, summary_text

    told = summary(Measurements.from_parquet(path))
    uses = "`stepsight train` learns a predictor from it, `stepsight evaluate` judges one on it"
    return {"table": str(path), **told, "text": f"table {path}: {summary_text(told)}\n\n{uses}"}


def _runs_table(path: Path) -> dict[str, Any]:
    """A table of measured runs: rows, devices and frameworks of each source."""
    from stepsight.experiments.evaluation.runs_table import Row, read_runs_table

    try:
        rows = read_runs_table(path)
    except StepsightError as error:
        raise StepsightError(
            f"{error}; a table of ops and collectives is imported first: `stepsight import csv {path}`"
        ) from None
    sources: dict[str, list[Row]] = {}
    for row in rows:
        sources.setdefault(row.source, []).append(row)
    words = ("hardware", "framework")
    told: dict[str, dict[str, Any]] = {
        name: {
            "rows": len(some),
            "gpus": sorted({row.text("gpus").removesuffix(".0") for row in some}, key=lambda text: (len(text), text)),
            **{key: sorted({row.text(key) for row in some} - {""}) for key in words},
        }
        for name, some in sources.items()
    }
    cells = [
        [shorten(name, 50), of["rows"], " to ".join(dict.fromkeys((of["gpus"][0], of["gpus"][-1]))),
         *(shorten(", ".join(of[key]), 50) for key in words)]
        for name, of in told.items()
    ]  # fmt: skip
    text = table(["source", "rows", "gpus", *words], cells)
    uses = "`stepsight evaluate` judges predictions on it, `stepsight calibrate` corrects a predictor with it"
    return {"runs": str(path), "sources": told, "text": f"table {path}: {len(rows)} runs\n{text}\n{uses}"}


def _predictor(path: Path) -> dict[str, Any]:
    from stepsight.experiments.questions.predictor_summary import predictor_text
    from stepsight.training.predictor.predictor import Predictor

    predictor = Predictor.load(path)
    told = {"predictor": str(path), **predictor.manifest, "context": predictor.context_facts}
    return {**told, "text": predictor_text(path, predictor)}


Thing = Hardware | Fabric | Framework
_NOUNS = {Hardware: "hardware", Fabric: "fabric", Framework: "framework"}


def facts_names() -> tuple[str, ...]:
    """Names of all hardware, fabrics and frameworks that are known."""
    return (*HARDWARE.names(), *FABRICS.names(), *FRAMEWORKS.names())


def describe_preset(name: str) -> dict[str, Any] | None:
    """Describe the hardware, fabric or framework of a name; None if there is none."""
    registry = next((each for each in (HARDWARE, FABRICS, FRAMEWORKS) if name in each), None)
    return None if registry is None else _description([(name, registry[name])], "")


def describe_facts_file(path: Path) -> dict[str, Any] | None:
    """Describe a file of hardware and fabrics, or of a framework's profile; None if it is another kind of file.

    Raises:
        JobError: If it cannot be read, or breaks a rule of these files.
    """
    if not is_facts_file(str(path)):
        return None
    try:
        tables = read_facts(str(path))
    except JobError:  # not a table of tables: reading it as a job reports what is wrong
        return None
    if not tables or set(tables) & set(SECTIONS) or "framework" in tables:
        return None
    if set(tables) & {"hardware", "fabric"}:
        hardware, fabrics = facts_in(str(path))
        return _description([*hardware.items(), *fabrics.items()], str(path))
    if len(tables) == 1 and all(isinstance(table, dict) for table in tables.values()):
        return _description([(next(iter(tables)), find_framework(str(path)))], str(path))
    return None


def _description(things: Sequence[tuple[str, Thing]], path: str) -> dict[str, Any]:
    value: dict[str, Any] = {}
    texts = []
    for name, thing in things:
        noun = _NOUNS[type(thing)]
        facts = {key: fact for key, fact in asdict(thing).items() if key != "name" and fact not in ({}, ())}
        shown = {key: fact for key, fact in facts.items() if key != "source"}
        lines = [f"{noun} {name}{f' in {path}' if path else ''}", table(["key", "value"], _rows(shown))]
        if isinstance(thing, Hardware):
            facts["usual_fabric"] = _usual_fabric(path or name)
            lines.append(f"usual fabric  {facts['usual_fabric'] or 'none: a job must state cluster.fabric'}")
        if facts.get("source"):
            lines.append(f"source        {facts['source']}")
        value.setdefault(noun, {})[name] = facts
        texts.append("\n".join(lines))
    return {**value, "text": "\n\n".join(texts)}


def _rows(facts: Mapping[str, Any], before: str = "") -> list[list[str]]:
    """Keys and values of tables within tables, one row each."""
    rows: list[list[str]] = []
    for key, fact in facts.items():
        if isinstance(fact, Mapping):
            rows += _rows(fact, f"{before}{key}.")
        else:
            text = ", ".join(fact) if isinstance(fact, tuple) else f"{fact:g}" if isinstance(fact, float) else str(fact)
            rows.append([before + key, text])
    return rows


def _usual_fabric(hardware: str) -> str:
    try:
        return find_fabric(usual_fabric(hardware)).name
    except JobError:
        return ""
