"""Train on boxes of at most four ranks, and compare predictions of eight and sixteen with measured runs.

Boxes are clusters in which sleeping replaces computation: real processes, schedules and messages on limited links.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import check_writable, digest, read_json, write_json, write_text
from stepsight.dataset.runs.box_spec import HARDWARE
from stepsight.dataset.runs.run_manifest import read_manifest
from stepsight.experiments.evaluation.error_metrics import regret
from stepsight.experiments.reports.plots import plot_predicted_against_measured
from stepsight.experiments.studies.box_cases import (
    SEARCHED,
    box_cases,
    candidates,
    strategy_name,
)
from stepsight.experiments.studies.box_runs import (
    JUDGE,
    Compared,
    compare_all,
    formula,
    ideal,
    measure_cases,
    roofline,
    training_folders,
)
from stepsight.experiments.studies.study import Row, Study, rows_text
from stepsight.training.fitting.heldout import spearman
from stepsight.training.fitting.train_runs import train
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor

PLACES = ("best", "second", "worst")


def run_boxes(out: Path, only: str = "*") -> Row:
    """Measure, train, predict and compare the runs whose names match ``only``; a second call continues.

    What trains is always measured whole.  The search runs with ``only = "*"`` or ``box/*``.

    Raises:
        CollectError: Where there can be no box, or no run was lawful.
    """
    check_writable(out)
    wanted = [case for case in box_cases() if fnmatch(case.name, only)]
    if not wanted and not fnmatch("box/searched", only):
        raise CollectError(f"--only must match a run such as box/gpt2/2M2P4D, got {only!r}")
    training = [case for case in box_cases() if not case.judges]
    rejected = measure_cases([*training, *(case for case in wanted if case.judges)], out)
    predictor = _predictor(out)
    small, judged = (compare_all([case for case in wanted if case.judges == large], out, predictor)
                     for large in (False, True))  # fmt: skip
    if not judged and not small:
        raise CollectError(f"every run of {only!r} used too much of the cores to be valid: {', '.join(rejected)}")
    started = time.perf_counter()
    for row in judged:
        predict(row.measured.case.job, predictor)
    spent = time.perf_counter() - started
    summary = summarise_boxes(judged or small)
    summary["rejected"] = [name for name in rejected if fnmatch(name, only)]
    summary["in_sample"] = [row.to_dict() for row in small]
    summary["others"] = others(judged or small, predictor)
    if fnmatch("box/searched", only):
        summary["search"] = search_boxes(predictor, out)
        summary["cost"] = {**cost(training_folders(out), sorted((out / JUDGE).iterdir())), "predict_s": spent}
    write_json(out / "box.json", summary)
    write_text(out / "box.txt", box_text(summary) + "\n")
    plot_predicted_against_measured(summary["runs"], out / "box.png", "clusters in a box: what was never trained on")
    return summary


def _predictor(out: Path) -> Predictor:
    """The predictor trained on the small runs; trained again when they change."""
    folders = training_folders(out)
    key = digest(*(str(sorted(path.name for path in folder.glob("*/*"))) + folder.name for folder in folders))[:8]
    folder = out / f"predictor-{key}"
    if (folder / "manifest.json").exists():
        return Predictor.load(folder)
    return train(folders, folder, hardware_name=HARDWARE, tracking_uri=f"sqlite:///{(out / 'mlflow.db').resolve()}")


def search_boxes(predictor: Predictor, out: Path) -> Row:
    """Strategies for an unmeasured model: predict all, run the best, the second and the worst, compare."""
    cases = candidates()
    seconds = [predict(found.job, predictor).iteration_time_s for found in cases]
    order = sorted(range(len(cases)), key=seconds.__getitem__)
    chosen = {cases[at].name: place for at, place in zip((order[0], order[1], order[-1]), PLACES, strict=True)}
    runs = [found for found in cases if found.name in chosen]
    measure_cases(runs, out / "search", events=False)
    rows = {chosen[row.measured.case.name]: row for row in compare_all(runs, out / "search", predictor)}
    fastest = min((row.measured.seconds for row in rows.values()), default=0.0)
    choices = [
        {
            "place": place,
            "strategy": strategy_name(rows[place].measured.case.job.parallel),
            "predicted_s": rows[place].prediction.iteration_time_s,
            "measured_s": rows[place].measured.seconds,
            "error": rows[place].error,
        }
        for place in PLACES
        if place in rows
    ]
    lost = 100 * (rows["best"].measured.seconds / fastest - 1) if "best" in rows else None
    model = f"gpt of {SEARCHED.layers} layers"
    return {"model": model, "strategies": len(cases), "choices": choices, "regret": lost}


def summarise_boxes(rows: Sequence[Compared]) -> Row:
    """Figures of compared runs, errors in per cent."""
    errors = np.array([abs(row.error) for row in rows])
    bound = [abs(row.error) for row in rows if row.communication_bound]
    models: dict[str, list[Compared]] = {}
    for row in rows:
        models.setdefault(_model(row), []).append(row)
    times = [
        np.array([(row.prediction.iteration_time_s, row.measured.seconds) for row in own]).T for own in models.values()
    ]
    ranks = [spearman(*own) for own in times if own.shape[1] > 2]
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


def others(rows: Sequence[Compared], predictor: Predictor) -> dict[str, dict[str, float]]:
    """Errors of the same runs by other methods, percent."""
    jobs = [row.measured.case.job for row in rows]
    measured = np.array([row.measured.seconds for row in rows])
    ways = {
        "regressors and context model": lambda job: predict(job, predictor).iteration_time_s,
        "regressors alone": lambda job: predict(job, predictor.without_context).iteration_time_s,
        "roofline, latency and bandwidth": roofline,
        "ideal arithmetic": ideal,
        "closed formula": formula,
    }
    found = {}
    for name, way in ways.items():
        errors = 100 * np.abs(np.array([way(job) for job in jobs]) / measured - 1)
        found[name] = {"mean_error": float(errors.mean()), "max_error": float(errors.max())}
    return found


def cost(profiles: Sequence[Path], judged: Sequence[Path]) -> dict[str, float]:
    """Rank-seconds of profiling, and of running every strategy directly."""
    profiling = sum(_run_seconds(folder) + _event_seconds(folder) for folder in profiles)
    direct = sum(_run_seconds(folder) for folder in judged)
    return {"profiling_rank_s": profiling, "direct_rank_s": direct, "percent": 100 * profiling / max(direct, 1e-9)}


def _run_seconds(collection: Path) -> float:
    manifests = [read_manifest(path.parent) for path in sorted(collection.glob("runs/*/manifest.json"))]
    return sum(manifest.world_size * sum(manifest.step_seconds) for manifest in manifests)


def _event_seconds(collection: Path) -> float:
    files = [read_json(path) for path in sorted(collection.glob("events/*.json"))]
    return sum(float(f["world_size"] * each["seconds"] * each["repeats"]) for f in files for each in f["records"])


def box_text(summary: Mapping[str, Any]) -> str:
    """The tables as text."""
    runs = [{**row, "name": row["name"] + (" *" if row["communication_bound"] else "")} for row in summary["runs"]]
    columns = {"run": "name", "ranks": "ranks", "measured s": "measured_s", "spread s": "spread_s",
               "predicted s": "predicted_s", "error %": "error", "activity %": "activity_error",
               "stamps %": "timestamp_error", "cpu %": "cpu"}  # fmt: skip
    bound = summary["communication_bound"]
    lines = [
        rows_text(runs, columns, 2),
        "* communication decides; spread: largest less smallest of three repeats; activity: lengths of what each rank "
        "did; stamps: begin and end of every pass, median, in parts of the iteration\n",
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
    same = [{"name": name, **of} for name, of in summary["others"].items()]
    lines += ["", rows_text(same, {"the same runs by": "name", "mean error %": "mean_error", "max %": "max_error"}, 2)]
    if found := summary.get("search"):
        keys = {"": "place", "strategy": "strategy", "predicted s": "predicted_s", "measured s": "measured_s",
                "error %": "error"}  # fmt: skip
        lines += [f"\nsearch: {found['model']}, 16 ranks, {found['strategies']} strategies",
                  rows_text(found["choices"], keys, 2),
                  "" if found["regret"] is None else f"regret {found['regret']:.2f} %"]  # fmt: skip
    if summary["rejected"]:
        lines.append(f"\nleft out, cores more than 25 % busy: {', '.join(summary['rejected'])}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> tuple[Any, str]:
    """The names of the runs, or the whole study."""
    if options.list:
        names = [case.name for case in box_cases() if fnmatch(case.name, options.only)]
        return names, "\n".join(names)
    figures = run_boxes(options.out.resolve() / "box", options.only)
    return {"box": figures}, box_text(figures)


STUDY = Study(
    "small-to-large",
    "Train on real runs of at most 4 ranks, predict held-out runs of 8 and 16, run them, and compare. All run in boxes "
    "in which sleeping replaces computation (needs root and iproute2). The study takes about two hours on an otherwise "
    "idle machine; a study that was stopped goes on.",
    run,
    {
        "--out": {"type": Path, "default": Path("runs/small-to-large"), "help": "folder of everything; resumed"},
        "--only": {"default": "*", "metavar": "GLOB", "help": "names of the runs: box/gpt2/2M2P4D, box/*"},
        "--list": {"action": "store_true", "help": "print the names of the runs"},
    },
)
