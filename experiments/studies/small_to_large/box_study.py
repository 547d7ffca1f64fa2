"""The box half from end to end: measure, train on four ranks, predict eight and sixteen, compare, search."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import check_writable, digest, write_json, write_text
from stepsight.dataset.runs.box_spec import HARDWARE
from stepsight.experiments.reports.plots import plot_predicted_against_measured
from stepsight.experiments.studies.small_to_large.box_cases import NOTHING, UserCases, box_cases
from stepsight.experiments.studies.small_to_large.box_results import Compared, compare_all
from stepsight.experiments.studies.small_to_large.box_search import search_boxes
from stepsight.experiments.studies.small_to_large.box_tables import box_text, cost, others, summarise_boxes
from stepsight.experiments.studies.small_to_large.box_timeline import side_by_side
from stepsight.experiments.studies.small_to_large.boxes import JUDGE, measure_cases, training_folders
from stepsight.training.fit import train
from stepsight.training.predictor.prediction import predict
from stepsight.training.predictor.predictor import Predictor


def run_boxes(out: Path, only: str = "*", *, progress: bool = True, asked: UserCases = NOTHING) -> dict[str, Any]:
    """Measure, train, predict and compare the runs whose names match ``only``; a second call continues.

    What trains is always measured whole.  The search runs with ``only = "*"`` or ``box/*``.

    Raises:
        CollectError: Where there can be no box, or no run was lawful.
    """
    check_writable(out)
    cases = box_cases(asked)
    wanted = [case for case in cases if fnmatch(case.name, only)]
    training = [case for case in box_cases() if not case.judges]
    rejected = measure_cases([*training, *(case for case in wanted if case.judges)], out, progress=progress)
    predictor = _predictor(out, progress)
    small = compare_all([case for case in wanted if not case.judges], out, predictor)
    judged = compare_all([case for case in wanted if case.judges], out, predictor)
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
        summary["search"] = search_boxes(predictor, out, progress=progress)
        summary["cost"] = {**cost(training_folders(out), _judged_folders(out)), "predict_s": spent}
    summary["text"] = box_text(summary)
    _write(summary, judged or small, out)
    return summary


def _predictor(out: Path, progress: bool) -> Predictor:
    """The predictor trained on the small runs; trained again when they change."""
    folders = training_folders(out)
    key = digest(*(str(sorted(path.name for path in folder.glob("*/*"))) + folder.name for folder in folders))[:8]
    folder = out / f"predictor-{key}"
    if (folder / "manifest.json").exists():
        return Predictor.load(folder)
    uri = f"sqlite:///{(out / 'mlflow.db').resolve()}"
    return train(folders, folder, hardware_name=HARDWARE, tracking_uri=uri, progress=progress)


def _judged_folders(out: Path) -> list[Path]:
    return sorted(folder for folder in (out / JUDGE).iterdir() if (folder / "plan.json").exists())


def _write(summary: dict[str, Any], rows: Sequence[Compared], out: Path) -> None:
    write_json(out / "box.json", {key: value for key, value in summary.items() if key != "text"})
    write_text(out / "box.txt", summary["text"] + "\n")
    plot_predicted_against_measured(summary["runs"], out / "box.png", "clusters in a box: what was never trained on")
    shown = max(rows, key=lambda row: (row.measured.case.job.parallel.pp > 1, -abs(row.error)))
    write_text(out / "side_by_side.json", json.dumps(side_by_side(shown)))
