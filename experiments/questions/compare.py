"""Compare jobs, predictors and measured runs: what differs, and where the time differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.dataset.runs.run_folder import has_traces, is_imported, read_imported, run_graphs
from stepsight.dataset.runs.run_manifest import read_manifest
from stepsight.experiments.questions.traced_runs import measured_step, one_run
from stepsight.experiments.reports.text_table import Number, table
from stepsight.simulator.replay.causes import breakdown
from stepsight.training.corrections.intervals import seconds_text
from stepsight.training.prediction.prediction import Prediction, predict

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

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
    # seconds on the critical path by op or collective; empty for a run
    works: Mapping[str, float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None  # prediction interval in seconds; None for a run


def predicted_side(job: Job, predictor: Predictor | str | None, name: str) -> Side:
    """A job with its prediction."""
    prediction = predict(job, predictor)
    facts = {**_flat(job), "source": prediction.source, "memory_gb": round(prediction.memory.peak_bytes / 1e9, 2)}
    interval = (prediction.low_s, prediction.high_s)
    return Side(name, prediction.iteration_time_s, False, facts, prediction.breakdown, _works(prediction), interval)


def run_side(folder: Path) -> Side:
    """A measured run, with its traces if it has any."""
    folder = one_run(folder, "compare")
    facts: dict[str, Any]
    if is_imported(folder):
        imported = read_imported(folder)
        name, job = imported.name, imported.job
        facts = {"hardware": imported.hardware, "ranks": len(imported.ranks)}
    else:
        manifest = read_manifest(folder)
        name, job = manifest.name, manifest.job
        facts = {"ranks": manifest.world_size, **{f"versions.{key}": v for key, v in manifest.versions.items()}}
    told = breakdown(run_graphs(folder).graphs).to_dict() if has_traces(folder) else {"ranks": [], "critical": {}}
    seconds = measured_step(folder, told["ranks"])
    if not seconds:
        raise StepsightError(f"compare needs a run with timed or traced steps, got {folder}")
    path = sum(told["critical"].values()) or 1.0
    causes = {kind: spent / path * seconds for kind, spent in told["critical"].items()}
    return Side(name, seconds, True, {**({} if job is None else _flat(job)), **facts}, causes)


def _flat(job: Job) -> dict[str, Any]:
    tables = job.to_dict()
    facts = {"framework": tables.pop("framework", "")}
    return facts | {f"{section}.{key}": value for section, keys in tables.items() for key, value in keys.items()}


def _works(prediction: Prediction) -> dict[str, float]:
    simulation = prediction.simulation
    scale = prediction.iteration_time_s / simulation.iteration_time_s
    seconds = dict(zip(simulation.lowered.all_works, simulation.work_seconds.tolist(), strict=True))
    return {str(work): count * seconds[work] * scale for work, count in simulation.op_counts.items()}


def compare_sides(sides: Sequence[Side]) -> dict[str, Any]:
    """Compare with the first side.

    Returns:
        ``sides`` (name, seconds, ratio to the first), ``facts`` that differ, ``causes`` of all sides, and ``works``
        whose seconds differ most; each with a value for every side, None where it is unknown.
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
    }


def _together(tables: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: [table.get(name, 0.0) for table in tables] for name in names}


def comparison_text(told: dict[str, Any]) -> str:
    """A comparison as text; times of causes and ops are differences from the first side."""
    sides = told["sides"]
    letters = [chr(ord("A") + at % 26) for at in range(len(sides))]
    cells = [
        [
            letter,
            side["name"],
            seconds_text(side["seconds"]),
            "measured" if side["measured"] else f"{seconds_text(side['low_s'])} to {seconds_text(side['high_s'])}",
            f"{side['percent']:+.1f}",
        ]
        for letter, side in zip(letters, sides, strict=True)
    ]
    parts = [table(["", "what", "iteration", "interval", "% from A"], cells)]
    if told["facts"]:
        rows = [[key, *(_short(value) for value in values)] for key, values in told["facts"].items()]
        parts.append(table(["what differs", *letters], rows))
    for title, key in (("where the time goes, ms", "causes"), ("largest differences, ms", "works")):
        rows = [
            [_short(name), *(Number(1e3 * value) for value in values), Number(1e3 * (values[-1] - values[0]))]
            for name, values in told[key].items()
            if max(values) > 0
        ]
        if rows:
            parts.append(table([title, *letters, f"{letters[-1]} - A"], rows))
    return "\n\n".join(parts)


def _short(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
