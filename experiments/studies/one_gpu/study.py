"""The study from plans to figures: measure, train, judge. Everything is in one folder; ``plans`` describes it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import CollectError, TraceError
from stepsight.dataset.base.files import check_writable, new_folder, write_json, write_text
from stepsight.dataset.hardware.hardware import find_hardware, hardware_names
from stepsight.dataset.harness.atomic_files import locked
from stepsight.dataset.runs.run_folder import read_collection
from stepsight.dataset.tables.device_names import device_name
from stepsight.experiments.reports.plots import plot_error_against_minutes, plot_predicted_against_measured
from stepsight.experiments.studies.one_gpu import judge
from stepsight.experiments.studies.one_gpu.cases import CPU, step_cases
from stepsight.experiments.studies.one_gpu.curve import learning_curve
from stepsight.experiments.studies.one_gpu.plans import MINUTES, OPS, VARIANTS, make_study
from stepsight.experiments.studies.one_gpu.study_report import study_text
from stepsight.experiments.tasks.collecting import read_plan, run_plan
from stepsight.training.fit import train
from stepsight.training.heldout import evaluate_heldout
from stepsight.training.measured.planning import run_name
from stepsight.training.predictor.predictor import Predictor

COLLECTIONS = "collections"
H200 = "h200-sxm-141gb"  # used for plans if there is no GPU
UNKNOWN_GPU = "local-gpu"
TABLES = Path("../shared/data/kernels")
_HARNESS = f"python -m harness {COLLECTIONS}/NAME/plan.json --out {COLLECTIONS}/NAME"
Say = Callable[[str], None]


@dataclass(frozen=True)
class StudyOptions:
    """The options of the command line.

    Attributes:
        out: Folder of everything.
        device: ``auto``, ``cpu`` or ``cuda``.
        hardware: Preset of the GPU that a new plan is for; empty: the one that is here, else an H200.
        minutes: Of the device, of a new plan; None: as is usual for it.
        tables: Folder of public tables of kernels; None: where this project keeps them, if they are there.
    """

    out: Path
    device: str = "auto"
    minutes: float | None = None
    tables: Path | None = None
    hardware: str = ""


def write_plans(asked: StudyOptions) -> str:
    """Write a plan for each collection, and print how to run them.

    Raises:
        CollectError: If there are other plans, or too little time for any.
    """
    check_writable(asked.out)
    if (asked.out / COLLECTIONS).exists():
        raise CollectError(f"a folder holds one study: {asked.out / COLLECTIONS} is there; choose another folder")
    device, hardware = _device(asked.device, asked.hardware)
    study = make_study(device, hardware, MINUTES[device] if asked.minutes is None else asked.minutes)
    lines = []
    with new_folder(asked.out / COLLECTIONS) as folder:
        for name, plan in study.plans.items():
            write_json(folder / name / "plan.json", plan)
    for name, plan in study.plans.items():
        counts = f"{len(plan['runs'])} runs, {sum(len(event['ops']) for event in plan['events'])} ops"
        lines.append(f"{COLLECTIONS}/{name}/plan.json: {counts}, about {study.seconds[name] / 60:.1f} min")
    lines.append(f"for {hardware}, about {sum(study.seconds.values()) / 60:.1f} min in all")
    return "\n".join([f"in {asked.out}:", *lines, f"run each with: {_HARNESS}"])


def run_study(asked: StudyOptions) -> dict[str, Any]:
    """Measure what is missing, train, judge; the figures, with ``text``.

    Raises:
        CollectError: If nothing can be measured here, and nothing was.
    """
    check_writable(asked.out)
    table = _table_folder(asked.tables)
    asked.out.mkdir(parents=True, exist_ok=True)
    with locked(asked.out / ".lock") as ours:
        if not ours:
            raise CollectError(f"another study is writing to {asked.out}: wait for its end, or choose another folder")
        return _run(asked, table)


def _run(asked: StudyOptions, table: Path | None) -> dict[str, Any]:
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    if not (asked.out / COLLECTIONS).exists():
        say("planning\n" + write_plans(asked))
    folders = {name: asked.out / COLLECTIONS / name for name in (OPS, *VARIANTS)}
    folders = {name: folder for name, folder in folders.items() if (folder / "plan.json").exists()}
    if not {OPS, "eager"} <= set(folders):
        raise CollectError(f"a study needs collections {OPS} and eager, got {', '.join(folders) or 'none'}")
    notes = [note for folder in folders.values() for note in _collect(folder, say)]
    figures: dict[str, Any] = {"variants": {}, "notes": notes}
    for name, folder in folders.items():
        if name != OPS and read_collection(folder).runs:
            say(f"{name}: learning from training runs and ops")
            figures["variants"][name] = _variant(asked.out, name, folders[OPS], folder, table, say)
    if not figures["variants"]:
        raise CollectError(
            f"a study needs runs, got none in {asked.out / COLLECTIONS}: there is no GPU here; measure where there is "
            f"one ({_HARNESS}, for {', '.join(folders)}), and bring the folder back"
        )
    figures["clocks"] = judge.noted_clocks(folders.values())
    figures["seconds"] = time.monotonic() - started
    figures["text"] = study_text(figures) + "".join(
        f"\n{name}: {asked.out / f'predictor-{name}'}" for name in figures["variants"]
    )
    plot_error_against_minutes(
        {name: of["curve"] for name, of in figures["variants"].items()}, asked.out / "error_against_minutes.png"
    )
    rows = [row for of in figures["variants"].values() for row in of["steps"]]
    if rows:
        plot_predicted_against_measured(rows, asked.out / "predicted_vs_measured.png", "held-out training steps")
    write_text(asked.out / "summary.txt", figures["text"] + "\n")
    write_json(asked.out / "summary.json", figures)
    return figures


def _device(wanted: str, hardware: str) -> tuple[str, str]:
    """``cuda`` or ``cpu``, and its name in jobs."""
    import torch

    if wanted == "cpu" or (wanted == "auto" and not hardware and not torch.cuda.is_available()):
        if hardware:
            raise CollectError(f"--hardware names a GPU, got {hardware!r} with --device cpu")
        return "cpu", CPU
    if hardware:
        preset = find_hardware(hardware)
        if preset is None or preset.kind != "gpu":
            gpus = [name for name in hardware_names() if (found := find_hardware(name)) and found.kind == "gpu"]
            raise CollectError(f"--hardware must be one of {', '.join(gpus)}, got {hardware!r}")
        return "cuda", hardware
    return "cuda", _hardware(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else H200


def _hardware(told: str) -> str:
    """The name of a device in jobs."""
    name = device_name(told)
    return name if find_hardware(name) is not None else UNKNOWN_GPU


def _table_folder(given: Path | None) -> Path | None:
    if given is not None and not given.is_dir():
        raise CollectError(f"--tables must be a folder of public tables, got {given}")
    return given if given is not None else TABLES if TABLES.is_dir() else None


def _collect(folder: Path, say: Say) -> list[str]:
    """Measure what is missing in a collection; return what could not be measured, as text.

    What was brought here without its device is taken as it is.
    """
    plan = read_plan(folder / "plan.json")
    say(f"{folder.name}: {len(plan['runs'])} runs, {sum(len(event['ops']) for event in plan['events'])} ops")
    if plan["device"] == "cpu" or _has_gpu():
        run_plan(plan, folder)
    lacking = read_collection(folder).missing
    return [f"{folder.name}: not measured: {', '.join(lacking)}"] if lacking else []


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _variant(out: Path, name: str, ops: Path, folder: Path, tables: Path | None, say: Say) -> dict[str, Any]:
    """Train one variant's predictor, and compute all of its figures."""
    collection = read_collection(folder)
    hardware = collection.runs[0].job.cluster.hardware
    told = collection.runs[0].fingerprint.get("device", "")
    if told not in ("", "cpu") and _hardware(told) not in (hardware, UNKNOWN_GPU):
        raise CollectError(
            f"the plans were made for {hardware}, and ran on {told}: plan again with --hardware {_hardware(told)}"
        )
    uri = f"sqlite:///{(out / 'mlflow.db').resolve()}"
    learned = [ops, folder] if read_collection(ops).events else [folder]
    predictor = train(learned, out / f"predictor-{name}", hardware_name=hardware, tracking_uri=uri)
    say(f"{name}: predicting what is held out")
    known, heldout = (judge.measured_ops(learned, heldout=held) for held in (False, True))
    rows = judge.held_op_rows(predictor, heldout)
    figures: dict[str, Any] = {
        "hardware": hardware,
        "device": told,
        "num_training_ops": len(known),
        "ops": judge.op_figures(rows),
        "op_rows": rows,
        "memory": judge.memory_rows(folder, predictor.hardware),
        "stand_ins": judge.stand_in_rows(folder, predictor),
        **_steps(predictor, folder, hardware),
    }
    say(f"{name}: learning from parts of the ops")
    figures["curve"] = learning_curve(predictor, known, heldout, learned, folder)
    unknown = told not in ("", "cpu") and _hardware(told) == UNKNOWN_GPU != hardware
    figures["notes"] = [f"{name}: the plans were made for {hardware}, and ran on {told}"] if unknown else []
    figures["table"] = _agreement(predictor, known | heldout, hardware, tables)
    return figures


def _steps(predictor: Predictor, folder: Path, hardware: str) -> dict[str, Any]:
    """Held-out training steps; empty if none were measured."""
    try:
        found = evaluate_heldout(predictor, folder, role="heldout")
    except TraceError:
        if any(manifest.role == "heldout" for manifest in read_collection(folder).runs):
            raise
        return {"steps": [], "step_figures": {}}
    device = "cpu" if hardware == CPU else "cuda"
    bound = {run_name(case.job) for case in step_cases(device, hardware) if case.launch_bound}
    rows = [{**row, "launch_bound": row["run"] in bound} for row in found.rows]
    groups = {
        "all": rows,
        "launch-bound": [row for row in rows if row["launch_bound"]],
        "others": [row for row in rows if not row["launch_bound"]],
    }
    sums = {name: judge.op_errors(of) for name, of in groups.items() if of}
    return {
        "steps": rows,
        "step_figures": {
            **sums,
            "mape_without_gnn": found.mape_without_gnn,
            "spearman": found.spearman,
            "coverage": found.coverage,
            "op_error_regressor": found.op_error_regressor,
            "op_error_with_gnn": found.op_error_with_gnn,
            "gnn": predictor.context.name if predictor.context is not None else "",
        },
    }


def _agreement(
    predictor: Predictor, measured: dict[Any, float], hardware: str, tables: Path | None
) -> list[dict[str, Any]]:
    """Comparison with the public table of the same device, if there is one."""
    from stepsight.dataset.tables import read_table

    words = hardware.split("-")
    folder = None if tables is None else tables / "aiconfigurator" / "data" / "_".join(words[:2])
    if folder is None or not folder.is_dir():
        return []
    return judge.agreement(predictor, measured, read_table("aiconfigurator", folder), hardware)
