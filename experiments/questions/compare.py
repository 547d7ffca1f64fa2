"""Compare jobs, predictors and measured runs: what differs, and where the time differs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import StepsightError, shorten
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_folder import MANIFEST, TracedRun, has_traces, is_imported, read_imported, run_graphs
from stepsight.dataset.runs.run_manifest import read_manifest
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.experiments.questions.traced_runs import ReplayedRun, measured_step, one_run
from stepsight.experiments.reports.text_table import Number, table
from stepsight.simulator.replay.causes import breakdown
from stepsight.simulator.replay.step_timeline import Kernel, kernel_seconds
from stepsight.training.corrections.intervals import interval_text, seconds_text

if TYPE_CHECKING:
    from stepsight.training.prediction.prediction import Prediction

MOST_WORKS = 12
LONGEST = 44  # characters of a cell
LEAST_DIFFERENCE = 1e-4  # share of the longest time: smaller differences are not listed


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    name: str  # for people
    seconds: float  # of one iteration, predicted or measured
    measured: bool  # whether the time was measured
    facts: Mapping[str, Any]  # keys of the job and other facts; empty where unknown
    # seconds by cause: of a prediction the breakdown, of a run its critical path by kind
    causes: Mapping[str, float] = field(default_factory=dict)
    # seconds by op or collective: of a prediction on the critical path, of a traced run on the device (mean of ranks)
    works: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, float] = field(default_factory=dict)  # the same by kind
    interval: tuple[float, float] | None = None  # prediction interval in seconds; None for a run
    # of a traced run, mean over ranks and steps: count and seconds of each kernel, and communication that nothing hides
    kernels: Mapping[Kernel, tuple[float, float]] = field(default_factory=dict)
    exposed_s: float | None = None


def predicted_side(prediction: Prediction, name: str) -> Side:
    """A job with its prediction."""
    memory_gb = round(prediction.memory.peak_bytes / 1e9, 2)
    facts = {**_flat(prediction.job), "source": prediction.source, "memory_gb": memory_gb}
    interval = (prediction.low_s, prediction.high_s)
    works, kinds = _works(prediction, str), _works(prediction, lambda work: work.kind)
    return Side(name, prediction.iteration_time_s, False, facts, prediction.breakdown, works, kinds, interval)


def run_side(path: Path) -> Side:
    """A measured run, with its traces if it has any; or a trace, or a folder of the traces of all ranks."""
    name, job, facts, folder = path.name, None, dict[str, Any](), None
    traced: TracedRun | None = None
    if path.is_file() or not ((path / MANIFEST).is_file() or (path / "runs").is_dir()):
        traced = TracedRun(name, None, list(import_ranks([path]).graphs), "")
    else:
        folder = one_run(path, "compare")
        traced = run_graphs(folder) if has_traces(folder) else None
        if is_imported(folder):
            imported = read_imported(folder)
            name, job = imported.name, imported.job
        else:
            manifest = read_manifest(folder)
            name, job = manifest.name, manifest.job
            facts = {"ranks": manifest.world_size, **{f"versions.{key}": v for key, v in manifest.versions.items()}}
    seconds = measured_step(folder) if folder else 0.0
    side = Side(name, seconds, True, {**({} if job is None else _flat(job)), **facts})
    if traced is not None:
        side = _with_traces(side, ReplayedRun.of(traced))
    if not side.seconds:
        raise StepsightError(f"compare needs a run with timed or traced steps, got {path}")
    return side


def _with_traces(side: Side, found: ReplayedRun) -> Side:
    """The side with what its traces tell; its step as `replay` measures it, if none was timed without a profiler."""
    graphs, seconds = found.run.graphs, side.seconds or found.profiled.measured_s
    critical, steps = breakdown(graphs).critical, max(sum(len(graph.steps_s) for graph in graphs), 1)
    path_s = sum(critical.values()) or 1.0
    kernels = {key: (len(runs) / steps, float(runs.sum()) / steps) for key, runs in kernel_seconds(graphs).items()}
    works, kinds = defaultdict[str, float](float), defaultdict[str, float](float)
    for kernel, (_, spent) in kernels.items():
        works[kernel.what] += spent
        kinds[kernel.kind] += spent
    facts = {"hardware": graphs[0].device_name, "ranks": len(graphs)}
    return replace(
        side,
        seconds=seconds,
        facts={**({} if "ranks" in side.facts else facts), **side.facts},
        causes={kind: spent / path_s * seconds for kind, spent in critical.items()},
        works=works,
        kinds=kinds,
        kernels=kernels,
        exposed_s=statistics.fmean(each["seconds"] for each in found.exposed()),
    )


def _flat(job: Job) -> dict[str, Any]:
    tables = job.to_dict()
    facts = {"framework": tables.pop("framework", "")}
    return facts | {f"{section}.{key}": value for section, keys in tables.items() for key, value in keys.items()}


def _works(prediction: Prediction, key: Callable[[Op | Collective], str]) -> dict[str, float]:
    """Seconds of ops and collectives by a text about each."""
    simulation, found = prediction.simulation, defaultdict[str, float](float)
    scale = prediction.iteration_time_s / simulation.iteration_time_s
    seconds = dict(zip(simulation.lowered.all_works, simulation.work_seconds.tolist(), strict=True))
    for work, count in simulation.op_counts.items():
        found[key(work)] += count * seconds[work] * scale
    return dict(found)


def compare_sides(sides: Sequence[Side]) -> dict[str, Any]:
    """Compare with the first side.

    Returns:
        ``sides`` (name, seconds, ratio to the first), ``facts`` that differ, ``causes`` of all sides, and ``works``
        whose seconds differ most; each with a value for every side, None where it is unknown.  Of traced runs also
        ``kinds`` (device seconds) and ``kernels`` (name, kind, what with sizes, counts, seconds) that differ.
    """
    if len(sides) < 2:
        raise StepsightError(f"compare takes at least two jobs, predictors or runs, got {len(sides)}")
    first = sides[0].seconds
    rows = [
        {
            "name": side.name,
            "seconds": side.seconds,
            "measured": side.measured,
            "low_s": side.interval and side.interval[0],
            "high_s": side.interval and side.interval[1],
            "percent": 100.0 * (side.seconds / first - 1.0),
            "exposed_communication_s": side.exposed_s,
        }
        for side in sides
    ]
    keys = dict.fromkeys(key for side in sides for key in side.facts)
    values = {key: [side.facts.get(key) for side in sides] for key in keys}
    least = LEAST_DIFFERENCE * max(side.seconds for side in sides)
    works = _together([side.works for side in sides])
    differing = {name: row for name, row in works.items() if max(row) - min(row) > least}
    most = sorted(differing, key=lambda name: min(differing[name]) - max(differing[name]))[:MOST_WORKS]
    return {
        "sides": rows,
        "facts": {key: row for key, row in values.items() if any(each != row[0] for each in row[1:])},
        "causes": _together([side.causes for side in sides]),
        "works": {name: differing[name] for name in most},
        "kinds": _together([side.kinds for side in sides]),
        "kernels": _kernels(sides, least),
    }


def _kernels(sides: Sequence[Side], least: float) -> list[dict[str, Any]]:
    """Kernels of which the sides have not as many, or whose seconds differ, those that differ most first."""
    found = []
    for kernel in dict.fromkeys(kernel for side in sides for kernel in side.kernels):
        counts, seconds = zip(*(side.kernels.get(kernel, (0.0, 0.0)) for side in sides), strict=True)
        if max(seconds) - min(seconds) > least or max(counts) > min(counts):
            found.append({**kernel._asdict(), "counts": list(counts), "seconds": list(seconds)})
    return sorted(found, key=lambda row: min(row["seconds"]) - max(row["seconds"]))


def _together(tables: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: [table.get(name, 0.0) for table in tables] for name in names}


def letters_of(told: Mapping[str, Any]) -> list[str]:
    """The letters that name the sides of a comparison."""
    return [chr(ord("A") + at % 26) for at in range(len(told["sides"]))]


def comparison_tables(
    told: Mapping[str, Any], name: Callable[[str], str] = str
) -> list[tuple[list[str], list[list[object]]]]:
    """Header and rows of each table of a comparison, for texts and pages: the sides, the facts that differ, causes,
    kinds, works, and kernels; ``name``: of keys, for people.
    """
    sides, letters = told["sides"], letters_of(told)
    last = f"{letters[-1]} - A"
    header = ["", "what", "iteration", "interval", "% from A", "exposed communication"]
    rows: list[list[object]] = [
        [letter, side["name"], seconds_text(side["seconds"]),
         "measured" if side["measured"] else interval_text(side["low_s"], side["high_s"]), f"{side['percent']:+.1f}",
         "-" if side["exposed_communication_s"] is None else seconds_text(side["exposed_communication_s"])]
        for letter, side in zip(letters, sides, strict=True)
    ]  # fmt: skip
    if all(side["exposed_communication_s"] is None for side in sides):
        header, rows = header[:-1], [row[:-1] for row in rows]
    facts: list[list[object]] = [
        [name(key), *(_short(value) for value in values)] for key, values in told["facts"].items()
    ]
    tables: list[tuple[list[str], list[list[object]]]] = [(header, rows), (["what differs", *letters], facts)]
    measured = {side["measured"] for side in sides}
    goes = {False: "", True: " (of runs: on the critical path)"}[measured == {True, False}]
    titles = {
        "causes": "critical path of the step, ms" if measured == {True} else f"where the time goes{goes}, ms",
        "kinds": "by kind of op, ms",
        "works": "largest differences, ms",
    }
    for key, title in titles.items():
        rows = [
            [
                _short(name(what) if key == "causes" else what),
                *(Number(1e3 * value) for value in (*values, values[-1] - values[0])),
            ]
            for what, values in told[key].items()
            if max(values) > 0
        ]
        tables.append(([title, *letters, last], rows))
    kernels: list[list[object]] = [
        [_short(row["name"]), _short(row["what"]), *(Number(of) for of in row["counts"])]
        + [Number(1e3 * of, 3) for of in (*row["seconds"], row["seconds"][-1] - row["seconds"][0])]
        for row in told["kernels"][:MOST_WORKS]
    ]
    counts, spent = ([f"{of} {letter}" for letter in letters] for of in ("count", "ms"))
    tables.append((["kernels of a step", "what", *counts, *spent, last], kernels))
    return [(header, rows) for header, rows in tables if rows]


def comparison_text(told: Mapping[str, Any]) -> str:
    """A comparison as text; times of causes and ops are differences from the first side."""
    return "\n\n".join(table(header, rows) for header, rows in comparison_tables(told))


def _short(value: Any) -> str:
    return "" if value is None else shorten(str(value), LONGEST)
