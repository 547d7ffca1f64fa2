"""The commands whose every write is made to fail: what they start from, how they run, what must be left."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stepsight.cli import main
from stepsight.dataset.base.errors import PredictorError, TraceError
from stepsight.dataset.base.files import write_json
from stepsight.dataset.runs.run_folder import read_collection, read_event_file, read_run
from stepsight.dataset.tables import Measurements
from stepsight.experiments.demo.demo import sized_job
from stepsight.training.measured.planning import make_plan
from stepsight.training.predictor.predictor import Predictor
from tests.experiments.evaluation.run_tables import run_row, write_runs
from tests.fuzz.toy import SEARCHED, toy_job, toy_predictor

A_ROW = "op,dims,dtype,microseconds\nlinear,64x64x64,bf16,{}\n"


def stepsight(*arguments: object) -> int:
    """The command line in this process."""
    sys.argv = ["stepsight", *map(str, arguments)]
    try:
        main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    return 0


@dataclass(frozen=True)
class Command:
    """A command that writes.

    Attributes:
        prepare: Puts what it reads beside the watched folder, and what an earlier command finished into it.
        run: Runs it; takes the watched folder, returns the exit code.
        check: Asserts that what is read is whole and that nothing finished is lost.
        done: Asserts that the answer of a command that succeeded is there.
    """

    prepare: Callable[[Path], None]
    run: Callable[[Path], int]
    check: Callable[[Path], None]
    done: Callable[[Path], None]


def _import_prepare(folder: Path) -> None:
    (folder.parent / "mine.csv").write_text(A_ROW.format(7))
    old = folder.parent / "old.csv"
    old.write_text(A_ROW.format(5))
    assert stepsight("import", "csv", old, "--out", folder / "t.parquet") == 0


def _imported(folder: Path) -> list[int]:
    """Microseconds of every row."""
    return [round(1e6 * seconds) for seconds in Measurements.from_parquet(folder / "t.parquet").seconds.tolist()]


def _import_check(folder: Path) -> None:
    assert _imported(folder) in ([5], [7])


def _import_done(folder: Path) -> None:
    assert _imported(folder) == [7]


IMPORT = Command(
    _import_prepare,
    lambda folder: stepsight("import", "csv", folder.parent / "mine.csv", "--out", folder / "t.parquet"),
    _import_check,
    _import_done,
)


def _predictor_check(folder: Path) -> None:
    """What stands there is whole, or the message says where what stood there is, and that is whole."""
    out = folder / "p"
    try:
        Predictor.load(out)
    except PredictorError as error:
        assert "To restore it: mv " in str(error), error
        Predictor.load(Path(str(error).rpartition("mv ")[2].split()[0]))


def _train_prepare(folder: Path) -> None:
    from tests.dataset.run_folders import write_events

    op = {"op": {"kind": "linear", "dims": [4, 6, 8], "dtype": "fp32"}, "seconds": 2e-6}
    facts = {"memory_bandwidth_bytes_per_s": 1e10, "memory_bytes": 8e9, "peak_flops": {"fp32": 1e11}}
    write_events(folder.parent / "collection", hardware=facts, records=[op])
    write_json(folder.parent / "collection" / "plan.json", {"schema": 1, "runs": [], "events": []})
    toy_predictor().save(folder / "p")


def _train(folder: Path) -> int:
    """The fit itself writes nothing: the toy predictor stands for what it finds."""
    from stepsight.training.fitting import train_runs as fit

    with pytest.MonkeyPatch.context() as patch:
        found = toy_predictor()
        patch.setattr(fit, "_learn", lambda *_, **__: _with_metrics(found))
        return stepsight("train", folder.parent / "collection", "--out", folder / "p", "--hardware", "toy")


def _with_metrics(predictor: Predictor) -> Predictor:
    from dataclasses import replace

    return replace(predictor, manifest={"metrics": {"mape_percent": 1.0}})


def _train_done(folder: Path) -> None:
    from stepsight.training.tracking.tracking import default_uri, load_model_uri

    trained = Predictor.load(folder / "p")
    assert trained.manifest["mlflow_run_id"]
    assert load_model_uri("models:/toy", default_uri(folder / "p")).manifest["digest"] == trained.manifest["digest"]


TRAIN = Command(_train_prepare, _train, _predictor_check, _train_done)


@cache
def _lab() -> tuple[Any, ...]:
    from stepsight.experiments.evaluation.error_metrics import score
    from stepsight.training.shipped.catalogue import shipped_predictor

    rows = []
    for gpus in (8, 16, 64):
        plain = {
            "gpus": gpus,
            "nodes": gpus // 8,
            "dp": gpus // 8,
            "global_batch": 4 * gpus,
            "row_id": gpus,
            "tp": 8,
            "pp": 1,
        }
        rows.append(run_row(**plain, iteration_time_s=1.15 * score(run_row(**plain), shipped_predictor).predicted_s))
    return tuple(rows)


def _calibrate_prepare(folder: Path) -> None:
    write_runs(folder.parent / "runs.csv", *_lab())
    toy_predictor().save(folder / "p")


def _calibrate(folder: Path) -> int:
    return stepsight("calibrate", folder.parent / "runs.csv", "--predictor", "a100-sxm", "--out", folder / "p")


def _calibrate_done(folder: Path) -> None:
    assert Predictor.load(folder / "p").manifest["calibration"]


CALIBRATE = Command(_calibrate_prepare, _calibrate, _predictor_check, _calibrate_done)


def _search(folder: Path, trials: int = 8) -> int:
    job, predictor = folder.parent / "job.json", folder.parent / "toy"
    storage = ("--storage", folder / "study.log", "--study", SEARCHED)
    return stepsight("search", job, "--predictor", predictor, *storage, "--trials", trials, "--sampler", "random")


def _search_prepare(folder: Path) -> None:
    (folder.parent / "job.json").write_text(toy_job().to_json())
    toy_predictor().save(folder.parent / "toy")
    folder.mkdir(exist_ok=True)
    assert _search(folder, 3) == 0
    write_json(folder.parent / "finished.json", _finished(folder))


def _finished(folder: Path) -> list[Any]:
    """Number and value of every finished trial."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "study.log")))
    trials = optuna.load_study(study_name=SEARCHED, storage=storage).get_trials(deepcopy=False)
    return [[trial.number, trial.value] for trial in trials if trial.value is not None]


def _search_check(folder: Path) -> None:
    before = json.loads((folder.parent / "finished.json").read_text())
    assert _finished(folder)[: len(before)] == before


SEARCH = Command(_search_prepare, _search, _search_check, _search_check)


def _collect_prepare(folder: Path) -> None:
    jobs = [sized_job(("gpt", layers, 32, 2, 2, 64, 64, 16), {}) for layers in (1, 2)]
    counts = {"rounds": 2, "steps": 1, "warmup": 2, "profile_steps": 1}
    plan = make_plan([("train", job, counts) for job in jobs], profile_jobs=jobs[:1], event_seconds=0.2)
    plan["events"][0]["ops"] = plan["events"][0]["ops"][:3]
    write_json(folder.parent / "plan.json", plan)


def _collect(folder: Path) -> int:
    """The one rank runs in this process, where its writes can be made to fail."""
    from stepsight.dataset.harness.running import launch, workers
    from stepsight.dataset.harness.running.collection import Collection

    def run_world(out: Path, size: int, *_: Any, **__: Any) -> None:
        with workers.meeting_file(out) as meeting:
            os.environ.update({**meeting, **workers.places(size)[0]})
            Collection(json.loads((out / "plan.json").read_text()), out, lambda **_: None).run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_run_world", run_world)
        return stepsight("collect", folder.parent / "plan.json", "--out", folder / "c")


def _collect_check(folder: Path) -> None:
    """Whatever is in its place can be read, and what was there before still is."""
    out = folder / "c"
    try:
        found = read_collection(out)
    except TraceError as error:
        assert "must hold plan.json or runs/" in str(error) or "must be a folder" in str(error), error
        return
    for manifest in found.runs:
        read_run(manifest.folder)
    for path in found.events:
        assert read_event_file(path).works


def _collect_done(folder: Path) -> None:
    found = read_collection(folder / "c")
    assert len(found.runs) == 2 and len(found.events) == 1 and not found.missing
    _collect_check(folder)


COLLECT = Command(_collect_prepare, _collect, _collect_check, _collect_done)

COMMANDS = {"import": IMPORT, "train": TRAIN, "calibrate": CALIBRATE, "search": SEARCH, "collect": COLLECT}
