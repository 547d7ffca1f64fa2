"""``stepsight show``: describe a file or folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepsight.dataset.base.bounded import parsing
from stepsight.dataset.base.errors import JobError, StepsightError, shorten
from stepsight.dataset.base.files import SUFFIXES, read_facts, set_aside
from stepsight.dataset.base.registry import Registry, did_you_mean
from stepsight.dataset.capture.captured import MANIFEST, captures_in, is_program, read_captured
from stepsight.dataset.hardware.hardware import FABRICS, HARDWARE, Fabric, Hardware, facts_in, find_fabric, usual_fabric
from stepsight.dataset.job.frameworks import FRAMEWORKS, Framework, find_framework
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import SECTIONS
from stepsight.dataset.runs.run_folder import is_imported, run_graphs
from stepsight.dataset.runs.run_manifest import read_object
from stepsight.dataset.trace_graphs.graph_dataset import INDEX, describe_dataset
from stepsight.dataset.traces.event_blocks import is_trace
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.experiments.reports import run_texts as texts
from stepsight.experiments.reports.text_table import table, table_of

WORDS = {  # that stand for predictors, and are none
    "physics": "the shipped predictor of a job's hardware, without the correction by published runs near the job",
    "roofline": "the facts of a job's hardware alone, without measurements",
}


def describe(path: Path) -> dict[str, Any]:
    """A description, with a ``text``."""
    if is_program(path):
        return _told(read_captured(path).to_dict(), texts.capture_text)
    if not path.exists():
        return _named(path)
    for is_one, tell in _FOLDERS if path.is_dir() else _FILES:
        if is_one(path):
            return tell(path)
    if path.is_dir():
        kinds = "collection (runs/), run, graph dataset, predictor (manifest.json) or folder of traces"
        raise StepsightError(f"{path} is no {kinds}")
    value = read_object(path) if path.suffix == ".json" else {}
    if "heldout" in value:
        from stepsight.experiments.reports.job_texts import demo_text

        with parsing(f"{path} must be the summary of a demo", StepsightError):
            return _told(value, demo_text)
    if "variants" in value and isinstance(value.get("text"), str):
        return value  # of a study on one GPU
    return _facts_file(path) or _job(Job.from_file(path))


def names() -> dict[str, Any]:
    """The names that ``describe`` takes, by what they name, with a ``text``."""
    from stepsight.training.predictor.predictor import shipped_names

    found: dict[str, Any] = {"predictor": [*shipped_names(), *WORDS]}
    found |= {noun: list(registry.names()) for noun, registry in _PRESETS.items()}
    return {**found, "text": "\n".join(f"{noun:<11}{', '.join(each)}" for noun, each in found.items())}


def _named(path: Path) -> dict[str, Any]:
    """A predictor, or the hardware, fabric or framework of a name."""
    name, known = str(path), names()
    if name in WORDS:
        return {"predictor": name, "meaning": WORDS[name], "text": f"predictor {name}: {WORDS[name]}"}
    if name in known["predictor"] or set_aside(path) is not None:
        return _predictor(path)
    for registry in _PRESETS.values():
        if name in registry:
            return _description([(name, registry[name])], "")
    near = did_you_mean(path, [each for of in known.values() if isinstance(of, list) for each in of], 3)
    rule = "show needs an existing file or folder, or the name of a predictor, hardware, fabric or framework"
    raise StepsightError(f"{rule}, got {name!r:.80}{near}; `stepsight show` lists the names")


def _told(value: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    return {**value, "text": text(value)}


def _captures(path: Path) -> dict[str, Any]:
    """Captures of several world sizes: their first ranks beside each other."""
    found = [read_captured(each).to_dict() for each in captures_in(path)]
    rows = []
    for first, each in ((each["ranks"][0], each) for each in found):
        sent = [(row["count"], row["count"] * row["num_bytes"]) for row in first["collectives"]]
        count, num_bytes = (sum(column) for column in zip(*sent, strict=True)) if sent else (0, 0)
        ops = {"ranks": each["world_size"], "ops of the first": first["ops"], "TFLOP": first["flops"] / 1e12}
        memory = {"peak GB": max(rank["peak_bytes"] for rank in each["ranks"]) / 1e9}
        rows.append({**ops, "collectives": count, "their GB": num_bytes / 1e9, **memory})
    columns = {name: name for name in rows[0]}
    return {"captures": found, "text": f"script     {found[0]['script']}\n{table_of(rows, columns, 3)}"}


def _job(job: Job) -> dict[str, Any]:
    tables = job.to_dict()
    keys = {"": {"framework": tables.pop("framework", "")}, **tables}
    rows = [
        [section, key, str(value)] for section, own in keys.items() for key, value in own.items() if section or value
    ]
    rows.append(["", "micro-batches", str(job.num_micro_batches)])
    text = f"job {job.name}\n{table(['table', 'key', 'value'], rows)}"
    text += "".join(f"\nwarning: {warning}" for warning in job.warnings)
    counts = {"devices": job.cluster.num_devices, "micro_batches": job.num_micro_batches}
    return {"job": job.to_dict(), **counts, "text": text}


def _measurements(path: Path) -> dict[str, Any]:
    """A table of ops and collectives that ``stepsight import`` wrote."""
    from stepsight.dataset.tables import Measurements, summary, summary_text

    told = summary(Measurements.from_parquet(path))
    uses = "`stepsight train` learns a predictor from it, `stepsight evaluate` judges one on it"
    return {"table": str(path), **told, "text": f"table {path}: {summary_text(told)}\n\n{uses}"}


def _runs_table(path: Path) -> dict[str, Any]:
    """A table of measured runs: rows, devices and frameworks of each source."""
    from stepsight.experiments.evaluation.runs_table import read_runs_table

    try:
        every = read_runs_table(path)
    except StepsightError as error:
        hint = f"{error}; a table of ops and collectives is imported first"
        raise StepsightError(f"{hint}: `stepsight import csv {path}`") from None
    rows = [row for row in every if not row.wrong]
    words, told, cells = ("hardware", "framework"), dict[str, dict[str, Any]](), list[list[object]]()
    for name in dict.fromkeys(row.source for row in rows):
        some = [row for row in rows if row.source == name]
        gpus = sorted({row.text("gpus").removesuffix(".0") for row in some}, key=lambda text: (len(text), text))
        used = {key: sorted({row.text(key) for row in some} - {""}) for key in words}
        told[name] = {"rows": len(some), "gpus": gpus, **used}
        sizes = " to ".join(dict.fromkeys((gpus[0], gpus[-1])))
        cells.append([shorten(name, 50), len(some), sizes, *(shorten(", ".join(of), 50) for of in used.values())])
    text = table(["source", "rows", "gpus", *words], cells)
    wrong = len(every) - len(rows)
    left = f", and {wrong} row{'s' * (wrong > 1)} with more or fewer cells than columns" if wrong else ""
    uses = "`stepsight evaluate` judges predictions on it, `stepsight calibrate` corrects a predictor with it"
    return {"runs": str(path), "sources": told, "text": f"table {path}: {len(rows)} runs{left}\n{text}\n{uses}"}


def _predictor(path: Path) -> dict[str, Any]:
    from stepsight.experiments.questions.predictor_summary import predictor_text
    from stepsight.training.predictor.predictor import Predictor

    predictor = Predictor.load(path)
    told = {"predictor": str(path), **predictor.manifest, "context": predictor.context_facts}
    return {**told, "text": predictor_text(path, predictor)}


_PRESETS: dict[str, Registry[Any]] = {"hardware": HARDWARE, "fabric": FABRICS, "framework": FRAMEWORKS}


def _facts_file(path: Path) -> dict[str, Any] | None:
    """Describe a file of hardware and fabrics, or of a framework's profile; None if it is another kind of file."""
    try:
        tables = read_facts(str(path)) if str(path).endswith(SUFFIXES) else {}
    except JobError:  # not a table of tables: reading it as a job reports what is wrong
        return None
    if not tables or set(tables) & {*SECTIONS, "framework"}:
        return None
    if set(tables) & {"hardware", "fabric"}:
        hardware, fabrics = facts_in(str(path))
        return _description([*hardware.items(), *fabrics.items()], str(path))
    if len(tables) == 1 and all(isinstance(table, dict) for table in tables.values()):
        return _description([(next(iter(tables)), find_framework(str(path)))], str(path))
    return None


def _description(things: Sequence[tuple[str, Hardware | Fabric | Framework]], path: str) -> dict[str, Any]:
    value: dict[str, Any] = {}
    texts = []
    for name, thing in things:
        noun = type(thing).__name__.lower()
        facts = {key: fact for key, fact in asdict(thing).items() if key != "name" and fact not in ({}, ())}
        shown = {key: fact for key, fact in facts.items() if key != "source"}
        lines = [f"{noun} {name}{f' in {path}' if path else ''}", table(["key", "value"], _rows(shown))]
        if isinstance(thing, Hardware):
            try:
                facts["usual_fabric"] = find_fabric(usual_fabric(path or name)).name
            except JobError:
                facts["usual_fabric"] = ""
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


def _traces(path: Path) -> dict[str, Any]:
    return texts.trace_summary(path.name, import_ranks([path]).graphs)


Kinds = tuple[tuple[Callable[[Path], bool], Callable[[Path], dict[str, Any]]], ...]  # test of a kind, and description
_FOLDERS: Kinds = (
    (lambda path: (path / "summary.json").is_file(), lambda path: describe(path / "summary.json")),
    (lambda path: (path / "runs").is_dir(), texts.describe_collection),
    (lambda path: (path / INDEX).is_file(), lambda path: _told(describe_dataset(path), texts.dataset_text)),
    (lambda path: (path / MANIFEST).is_file(), lambda path: _told(read_captured(path).to_dict(), texts.capture_text)),
    (lambda path: bool(captures_in(path)), _captures),
    (is_imported, lambda path: texts.trace_summary(run_graphs(path).name, run_graphs(path).graphs)),
    (
        lambda path: (path / "manifest.json").is_file(),
        lambda path: (_predictor if "format" in read_object(path / "manifest.json") else texts.describe_run)(path),
    ),
    (lambda path: any(map(is_trace, path.iterdir())), _traces),
)
_FILES: Kinds = (
    (lambda path: is_trace(path) or path.name.endswith(".json.gz"), _traces),
    (lambda path: path.suffix == ".parquet", _measurements),
    (lambda path: path.name.endswith((".csv", ".csv.gz")), _runs_table),
)
