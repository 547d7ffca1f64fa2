"""Tables of the box half: strategies, activity, time stamps, cost, search, and reference predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import read_json
from stepsight.dataset.runs.run_manifest import read_manifest
from stepsight.experiments.evaluation.error_metrics import regret
from stepsight.experiments.reports.text_table import Number, table
from stepsight.experiments.studies.small_to_large import baselines
from stepsight.experiments.studies.small_to_large.box_results import Compared
from stepsight.training.heldout import spearman
from stepsight.training.predictor.prediction import predict
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]


def summarise_boxes(rows: Sequence[Compared]) -> dict[str, Any]:
    """Figures of compared runs, errors in per cent, as ``--json`` has them."""
    errors = np.array([abs(row.error) for row in rows])
    bound = [abs(row.error) for row in rows if row.communication_bound]
    ranks = [spearman(*_times(own)) for own in _by_model(rows).values() if len(own) > 2]
    inside = [row.prediction.low_s <= row.measured.seconds <= row.prediction.high_s for row in rows]
    return {
        "runs": [row.to_dict() for row in rows],
        "mean_error": float(errors.mean()),
        "max_error": float(errors.max()),
        "spearman": float(min(ranks)) if ranks else None,
        "regret": _regret_of_boxes(rows),
        "communication_bound": {"runs": len(bound), "mean_error": float(np.mean(bound)) if bound else None},
        "activity_error": 100 * float(np.mean([row.activity.mean() for row in rows])),
        "timestamp_error": 100 * float(np.median(np.concatenate([row.timestamps for row in rows]))),
        "coverage": 100 * float(np.mean(inside)),
    }


def _regret_of_boxes(rows: Sequence[Compared]) -> float:
    """Regret for each sequence of a batch, in percent: mean over models and boxes on which several strategies ran."""
    fair = [row for row in rows if not row.measured.case.job.cluster.stragglers]
    sequences = [row.measured.case.job.batch.global_batch for row in fair]
    predicted = [row.prediction.iteration_time_s / count for row, count in zip(fair, sequences, strict=True)]
    measured = [row.measured.seconds / count for row, count in zip(fair, sequences, strict=True)]
    return regret([(_model(row), row.measured.case.box.name) for row in fair], predicted, measured) or 0.0


def _model(row: Compared) -> str:
    return row.measured.case.name.split("/")[1]


def _by_model(rows: Sequence[Compared]) -> dict[str, list[Compared]]:
    found: dict[str, list[Compared]] = {}
    for row in rows:
        found.setdefault(_model(row), []).append(row)
    return found


def _times(rows: Sequence[Compared]) -> tuple[Array, Array]:
    predicted = np.array([row.prediction.iteration_time_s for row in rows])
    return predicted, np.array([row.measured.seconds for row in rows])


def others(rows: Sequence[Compared], predictor: Predictor) -> dict[str, dict[str, float]]:
    """Errors of the same runs by other methods, percent."""
    jobs = [row.measured.case.job for row in rows]
    measured = np.array([row.measured.seconds for row in rows])
    ways = {
        "regressors and context GNN": [predict(job, predictor).iteration_time_s for job in jobs],
        "regressors alone": [predict(job, predictor.without_context).iteration_time_s for job in jobs],
        "roofline, latency and bandwidth": [baselines.roofline(job) for job in jobs],
        "ideal arithmetic": [baselines.ideal(job) for job in jobs],
        "closed formula": [baselines.formula(job) for job in jobs],
    }
    found = {}
    for name, seconds in ways.items():
        errors = 100 * np.abs(np.array(seconds) / measured - 1)
        found[name] = {"mean_error": float(errors.mean()), "max_error": float(errors.max())}
    return found


def cost(profiles: Sequence[Path], judged: Sequence[Path]) -> dict[str, float]:
    """Rank-seconds of profiling, and of running every strategy directly."""
    profiling = sum(_run_seconds(folder) + _event_seconds(folder) for folder in profiles)
    direct = sum(_run_seconds(folder) for folder in judged)
    return {
        "profiling_rank_s": profiling,
        "direct_rank_s": direct,
        "percent": 100 * profiling / direct if direct else float("nan"),
    }


def _run_seconds(collection: Path) -> float:
    manifests = [read_manifest(path.parent) for path in sorted(collection.glob("runs/*/manifest.json"))]
    return sum(manifest.world_size * sum(manifest.step_seconds) for manifest in manifests)


def _event_seconds(collection: Path) -> float:
    total = 0.0
    for path in sorted(collection.glob("events/*.json")):
        file = read_json(path)
        total += file["world_size"] * sum(record["seconds"] * record["repeats"] for record in file["records"])
    return total


def box_text(summary: Mapping[str, Any]) -> str:
    """The tables as text."""
    header = ["run", "ranks", "measured s", "spread s", "predicted s", "error %", "activity %", "stamps %", "cpu %"]
    rows = [
        [
            row["name"] + (" *" if row["communication_bound"] else ""),
            row["ranks"],
            Number(row["measured_s"], 3),
            Number(row["spread_s"], 3),
            Number(row["predicted_s"], 3),
            Number(row["error"], 2),
            Number(row["activity_error"], 2),
            Number(row["timestamp_error"], 2),
            Number(row["cpu"], 1),
        ]
        for row in summary["runs"]
    ]
    bound = summary["communication_bound"]
    lines = [
        table(header, rows),
        "* communication decides; spread: largest less smallest of three repeats; activity: lengths of what each rank "
        "did; stamps: begin and end of every pass, median, in parts of the iteration",
        "",
        f"mean error {summary['mean_error']:.2f} %, max {summary['max_error']:.2f} %, where communication decides "
        + (f"{bound['mean_error']:.2f} % ({bound['runs']} runs)" if bound["runs"] else "(no such run)")
        + f"; activity {summary['activity_error']:.2f} %, stamps {summary['timestamp_error']:.2f} %",
        ("" if summary["spearman"] is None else f"Spearman within a model, the least: {summary['spearman']:.3f}; ")
        + f"regret {summary['regret']:.2f} %; within the interval {summary['coverage']:.0f} %",
    ]
    if "cost" in summary:
        spent = summary["cost"]
        lines.append(
            f"cost: profiling {spent['profiling_rank_s']:.0f} rank-seconds, running every strategy "
            f"{spent['direct_rank_s']:.0f}: {spent['percent']:.1f} %; predicting all of them {spent['predict_s']:.2f} s"
        )
    if "others" in summary:
        rows = [
            [name, Number(of["mean_error"], 2), Number(of["max_error"], 2)] for name, of in summary["others"].items()
        ]
        lines += ["", table(["the same runs by", "mean error %", "max %"], rows)]
    if summary.get("search"):
        found = summary["search"]
        rows = [
            [c["place"], c["strategy"], *(Number(c[key], 2) for key in ("predicted_s", "measured_s", "error"))]
            for c in found["choices"]
        ]
        lines += ["", f"search: {found['model']}, 16 ranks, {found['strategies']} strategies",
                  table(["", "strategy", "predicted s", "measured s", "error %"], rows),
                  "" if found["regret"] is None else f"regret {found['regret']:.2f} %"]  # fmt: skip
    if summary.get("rejected"):
        lines += ["", f"left out, cores more than 25 % busy: {', '.join(summary['rejected'])}"]
    return "\n".join(lines)
