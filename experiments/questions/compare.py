"""Compare jobs, predictors and measured runs: what differs, and where the time differs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import StepsightError, shorten
from stepsight.dataset.job.job import Job
from stepsight.dataset.runs.run_folder import MANIFEST, TracedRun, has_traces, is_imported, read_imported, run_graphs
from stepsight.dataset.runs.run_manifest import RunManifest, read_manifest
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.experiments.questions.traced_runs import ReplayedRun, measured_step, one_run
from stepsight.experiments.reports.text_table import Number, shown, table
from stepsight.simulator.replay.causes import breakdown
from stepsight.simulator.replay.step_timeline import Kernel, kernel_seconds
from stepsight.training.corrections.intervals import interval_text, seconds_text
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
    memory_gb, simulation = round(prediction.memory.peak_bytes / 1e9, 2), prediction.simulation
    slower = None if prediction.published is None else round(prediction.published.percent_slower, 1)
    facts = {**_flat(prediction.job), "source": prediction.source, "memory_gb": memory_gb, "published_runs": slower}
    each = dict(zip(simulation.lowered.all_works, simulation.work_seconds.tolist(), strict=True))
    scale = prediction.iteration_time_s / simulation.iteration_time_s
    spent = [(str(work), work.kind, count * each[work] * scale) for work, count in simulation.op_counts.items()]
    sums, interval = _sums(spent), (prediction.low_s, prediction.high_s)
    return Side(name, prediction.iteration_time_s, False, facts, prediction.breakdown, **sums, interval=interval)


def run_side(path: Path) -> Side:
    """A measured run, with its traces if it has any; or a trace, or a folder of the traces of all ranks."""
    if path.is_file() or not ((path / MANIFEST).is_file() or (path / "runs").is_dir()):
        traced: TracedRun | None = TracedRun(path.name, None, list(import_ranks([path]).graphs), "")
        side = Side(path.name, 0.0, True, {})
    else:
        folder, facts = one_run(path, "compare"), dict[str, Any]()
        traced = run_graphs(folder) if has_traces(folder) else None
        found = read_imported(folder) if is_imported(folder) else read_manifest(folder)
        if isinstance(found, RunManifest):
            facts = {"ranks": found.world_size, **{f"versions.{key}": v for key, v in found.versions.items()}}
        own = {} if found.job is None else _flat(found.job)
        side = Side(found.name, measured_step(folder), True, {**own, **facts})
    if traced is not None:  # what its traces tell; its step as `replay` measures it, if none was timed unprofiled
        replayed = ReplayedRun.of(traced)
        graphs, seconds = traced.graphs, side.seconds or replayed.profiled.measured_s
        critical, steps = breakdown(graphs).critical, max(sum(len(graph.steps_s) for graph in graphs), 1)
        path_s = sum(critical.values()) or 1.0
        kernels = {key: (len(runs) / steps, float(runs.sum()) / steps) for key, runs in kernel_seconds(graphs).items()}
        known = {} if "ranks" in side.facts else {"hardware": graphs[0].device_name, "ranks": len(graphs)}
        side = replace(
            side,
            seconds=seconds,
            facts={**known, **side.facts},
            causes={kind: each / path_s * seconds for kind, each in critical.items()},
            **_sums((kernel.what, kernel.kind, seconds) for kernel, (_, seconds) in kernels.items()),
            kernels=kernels,
            exposed_s=statistics.fmean(each["seconds"] for each in replayed.exposed()),
        )
    if not side.seconds:
        raise StepsightError(f"compare needs a run with timed or traced steps, got {path}")
    return side


def _flat(job: Job) -> dict[str, Any]:
    tables = job.to_dict()
    facts = {"framework": tables.pop("framework", "")}
    return facts | {f"{section}.{key}": value for section, keys in tables.items() for key, value in keys.items()}


def _sums(spent: Iterable[tuple[str, str, float]]) -> dict[str, Any]:
    """Seconds by op or collective, and by its kind."""
    works, kinds = dict[str, float](), dict[str, float]()
    for name, kind, seconds in spent:
        works[name] = works.get(name, 0.0) + seconds
        kinds[kind] = kinds.get(kind, 0.0) + seconds
    return {"works": works, "kinds": kinds}


def compare_sides(sides: Sequence[Side]) -> dict[str, Any]:
    """Compare with the first side: ``sides`` (name, seconds, ratio to the first), ``facts`` that differ, ``causes`` of
    all sides, ``kinds``, and ``works`` and ``kernels`` that differ; each with a value for every side, None where it is
    unknown.
    """
    if len(sides) < 2:
        raise StepsightError(f"compare takes at least two jobs, predictors or runs, got {len(sides)}")
    rows = [
        {
            **{key: getattr(side, key) for key in ("name", "seconds", "measured")},
            **dict(zip(("low_s", "high_s"), side.interval or (None, None), strict=True)),
            "percent": 100.0 * (side.seconds / sides[0].seconds - 1.0),
            "exposed_communication_s": side.exposed_s,
        }
        for side in sides
    ]
    values = {key: [side.facts.get(key) for side in sides] for key in dict.fromkeys(chain(*(s.facts for s in sides)))}
    least = LEAST_DIFFERENCE * max(side.seconds for side in sides)
    works = {name: row for name, row in _together([side.works for side in sides]).items() if _spread(row) > least}
    kernels = []  # of which the sides have not as many, or whose seconds differ
    for kernel in dict.fromkeys(chain(*(side.kernels for side in sides))):
        counts, seconds = zip(*(side.kernels.get(kernel, (0.0, 0.0)) for side in sides), strict=True)
        if _spread(seconds) > least or _spread(counts) > 0:
            kernels.append({**kernel._asdict(), "counts": list(counts), "seconds": list(seconds)})
    return {
        "sides": rows,
        "facts": {key: row for key, row in values.items() if any(each != row[0] for each in row[1:])},
        "causes": _together([side.causes for side in sides]),
        "works": dict(sorted(works.items(), key=lambda item: -_spread(item[1]))[:MOST_WORKS]),
        "kinds": _together([side.kinds for side in sides]),
        "kernels": sorted(kernels, key=lambda row: -_spread(row["seconds"])),
    }


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _together(tables: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [table.get(name, 0.0) for table in tables] for name in dict.fromkeys(chain(*tables))}


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
    last, measured = f"{letters[-1]} - A", {side["measured"] for side in told["sides"]}
    exposed = [side["exposed_communication_s"] for side in sides]
    header = ["", "what", "iteration", "interval", "% from A"]
    rows: list[list[object]] = [
        [letter, side["name"], seconds_text(side["seconds"]),
         "measured" if side["measured"] else interval_text(side["low_s"], side["high_s"]), f"{side['percent']:+.1f}"]
        for letter, side in zip(letters, sides, strict=True)
    ]  # fmt: skip
    if any(each is not None for each in exposed):
        header.append("exposed communication")
        rows = [[*row, "-" if e is None else seconds_text(e)] for row, e in zip(rows, exposed, strict=True)]
    facts: list[list[object]] = [[name(key), *map(_short, values)] for key, values in told["facts"].items()]
    tables: list[tuple[list[str], list[list[object]]]] = [(header, rows), (["what differs", *letters], facts)]
    goes = " (of runs: on the critical path)" if measured == {True, False} else ""
    titles = {
        "causes": "critical path of the step, ms" if measured == {True} else f"where the time goes{goes}, ms",
        "kinds": "by kind of op, ms",
        "works": "largest differences, ms",
    }
    for key, title in titles.items():
        named = name if key == "causes" else str
        rows = [
            [_short(named(what)), *(Number(1e3 * value) for value in (*values, values[-1] - values[0]))]
            for what, values in told[key].items()
            if max(values) > 0
        ]
        tables.append(([title, *letters, last], rows))
    kernels: list[list[object]] = [
        [_short(row["name"]), _short(row["what"]), *map(Number, row["counts"])]
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
    text = shown(value) if isinstance(value, list | tuple) else str(value)
    return "" if value is None else shorten(text, LONGEST)
