"""Learn a predictor from ten minutes of measurements on one GPU, and judge it on held-out measurements. Ops and
training steps are measured in bf16, or small ones in fp32 on a CPU's core. Held out are shapes of ops, training
steps, peak memory and single ranks of large jobs.

A study that was killed resumes. For a GPU elsewhere: write plans with --plan-only --device cuda, run
`python -m harness collections/ops/plan.json --out collections/ops` in --out there (likewise eager and compiled),
bring the folder back, and go on without --plan-only.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import check_writable, new_folder, write_json, write_text
from stepsight.dataset.hardware.hardware import HARDWARE, find_hardware
from stepsight.dataset.harness.base.atomic_files import locked
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.run_folder import Collection, read_collection, read_event_file
from stepsight.dataset.tables.measurements import device_name
from stepsight.experiments.evaluation.table_errors import judge_collection
from stepsight.experiments.reports.plots import plot_predicted_against_measured
from stepsight.experiments.reports.text_table import Column, Number, table_of
from stepsight.experiments.studies.one_gpu_plans import CPU, OPS, VARIANTS, make_study
from stepsight.experiments.studies.study import Options, Row, Study, cases
from stepsight.experiments.tasks.collecting import num_gpus, read_plan, run_plan
from stepsight.simulator.memory import estimate_memory
from stepsight.training.fitting.own_table import family_figures
from stepsight.training.fitting.train_runs import train
from stepsight.training.measured.measured import HELDOUT
from stepsight.training.measured.planning import stand_in_seconds
from stepsight.training.predictor.predictor import Predictor

COLLECTIONS = "collections"
H200 = "h200-sxm-141gb"  # used for plans if there is no GPU
UNKNOWN_GPU = "local-gpu"
_HARNESS = f"python -m harness {COLLECTIONS}/NAME/plan.json --out {COLLECTIONS}/NAME"


def write_plans(out: Path, device: str = "auto", minutes: float | None = None, hardware: str = "") -> str:
    """Write a plan for each collection, and print how to run them."""
    check_writable(out)
    if (out / COLLECTIONS).exists():
        raise CollectError(f"a folder holds one study: {out / COLLECTIONS} is there; choose another folder")
    device, hardware = _device(device, hardware)
    usual: float = cases("one-gpu")[device]["minutes"]
    study = make_study(device, hardware, usual if minutes is None else minutes)
    with new_folder(out / COLLECTIONS) as folder:
        for name, plan in study.plans.items():
            write_json(folder / name / "plan.json", plan)
    lines = [
        f"{COLLECTIONS}/{name}/plan.json: {counts_of(plan)}, about {study.seconds[name] / 60:.1f} min"
        for name, plan in study.plans.items()
    ]
    lines.append(f"for {hardware}, about {sum(study.seconds.values()) / 60:.1f} min in all")
    return "\n".join([f"in {out}:", *lines, f"run each with: {_HARNESS}"])


def counts_of(plan: Row) -> str:
    """How much a plan measures, in words."""
    return f"{len(plan['runs'])} runs, {sum(len(event['ops']) for event in plan['events'])} ops"


def run_study(out: Path, **planned: Any) -> Row:
    """Measure what is missing, train, judge; the figures, with ``text``; ``planned``: as of ``write_plans``."""
    check_writable(out)
    out.mkdir(parents=True, exist_ok=True)
    started, figures = time.monotonic(), Row(variants={}, notes=[])

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    with locked(out / ".lock") as ours:
        if not ours:
            raise CollectError(f"another study is writing to {out}: wait for its end, or choose another folder")
        if not (out / COLLECTIONS).exists():
            say("planning\n" + write_plans(out, **planned))
        folders = {name: out / COLLECTIONS / name for name in (OPS, *VARIANTS)}
        folders = {name: folder for name, folder in folders.items() if (folder / "plan.json").exists()}
        if not {OPS, "eager"} <= set(folders):
            raise CollectError(f"a study needs collections {OPS} and eager, got {', '.join(folders) or 'none'}")
        for name, folder in folders.items():
            plan = read_plan(folder / "plan.json")
            say(f"{name}: {counts_of(plan)}")
            if plan["device"] == "cpu" or num_gpus():  # what was brought here without its device is taken as it is
                run_plan(plan, folder)
            if lacking := read_collection(folder).missing:
                figures["notes"].append(f"{name}: not measured: {', '.join(lacking)}")
        for name in (name for name, folder in folders.items() if name != OPS and read_collection(folder).runs):
            say(f"{name}: learning from training runs and ops")
            figures["variants"][name] = _variant(out, name, folders[OPS], folders[name])
        if not figures["variants"]:
            how = f"measure where there is one ({_HARNESS}, for {', '.join(folders)}), and bring the folder back"
            raise CollectError(f"a study needs runs, got none in {out / COLLECTIONS}: there is no GPU here; {how}")
        figures["seconds"] = time.monotonic() - started
        made = [f"{name}: {out / f'predictor-{name}'}" for name in figures["variants"]]
        figures["text"] = "\n".join([study_text(figures), *made])
        if rows := [row for of in figures["variants"].values() if of["steps"] for row in of["steps"]["runs"]]:
            plot_predicted_against_measured(rows, out / "predicted_vs_measured.png", "held-out training steps")
        write_text(out / "summary.txt", figures["text"] + "\n")
        write_json(out / "summary.json", figures)
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
            gpus = [name for name in HARDWARE.names() if (found := find_hardware(name)) and found.kind == "gpu"]
            raise CollectError(f"--hardware must be one of {', '.join(gpus)}, got {hardware!r}")
        return "cuda", hardware
    return "cuda", _hardware(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else H200


def _hardware(told: str) -> str:
    """The name of a device in jobs."""
    name = device_name(told)
    return name if find_hardware(name) is not None else UNKNOWN_GPU


def _variant(out: Path, name: str, ops: Path, folder: Path) -> Row:
    """Train one variant's predictor, and judge it by held-out ops, training steps, peak memory and single ranks."""
    collection = read_collection(folder)
    hardware = collection.runs[0].job.cluster.hardware
    told = collection.runs[0].fingerprint.get("device", "")
    ran = hardware if told in ("", "cpu") else _hardware(told)
    if ran not in (hardware, UNKNOWN_GPU):
        raise CollectError(f"the plans were made for {hardware}, and ran on {told}: plan again with --hardware {ran}")
    uri = f"sqlite:///{(out / 'mlflow.db').resolve()}"
    learned = [ops, folder] if read_collection(ops).events else [folder]
    predictor = train(learned, out / f"predictor-{name}", hardware_name=hardware, tracking_uri=uri)
    heldout = measured_ops(learned, heldout=True)
    works, seconds = list(heldout), np.array(list(heldout.values()))
    predicted = predictor.kernel.seconds(works, 1)
    figures: Row = {}
    for label in (lambda op: "all", lambda op: op.family, lambda op: f"{op.family}/{op.dtype}"):
        figures |= family_figures(list(map(label, works)), predicted, seconds)
    judged = any(run.role == "heldout" and run.whole for run in collection.runs)
    return {
        "hardware": hardware,
        "device": told,
        "num_training_ops": len(measured_ops(learned, heldout=False)),
        "ops": figures,
        "steps": judge_collection(folder, predictor) if judged else None,
        **_run_rows(predictor, collection),
        "notes": [] if ran == hardware else [f"{name}: the plans were made for {hardware}, and ran on {told}"],
    }


def measured_ops(folders: Iterable[Path], *, heldout: bool) -> dict[Op, float]:
    """Seconds of ops alone: from the event files that judge, or from all others."""
    paths = [path for folder in folders for path in read_collection(folder).events]
    files = [read_event_file(path) for path in paths if (path.stem == HELDOUT) == heldout]
    pairs = (pair for file in files for pair in zip(file.works, file.seconds, strict=True))
    return {work: seconds for work, seconds in pairs if isinstance(work, Op)}


def _run_rows(predictor: Predictor, collection: Collection) -> Row:
    """Peak bytes of tensors of each measured run, and times of single ranks of large jobs with emulated communication.
    Libraries allocate workspaces too, the same for each run: ``predicted_bytes`` has what the smallest training run
    holds beyond its estimate.
    """
    memory: list[Row] = []
    stand_ins: list[Row] = []
    endless = replace(predictor.hardware, memory_bytes=1e15)
    for run in collection.runs:
        if run.stand_in is not None:
            predicted = stand_in_seconds(run.job, run.stand_in, predictor.latency(run.job, alone=True))
            predicted *= predictor.calibration.factor(run.job)
            times = {"measured_s": run.iteration_time_s, "predicted_s": predicted}
            stand_ins.append({"run": run.name, **times, "error_percent": 100 * (predicted / run.iteration_time_s - 1)})
        elif run.peak_memory_bytes:
            estimate = estimate_memory(run.job, endless).stages[0].tensors
            sizes = {"measured_bytes": float(max(run.peak_memory_bytes)), "predicted_bytes": estimate}
            memory.append({"run": run.name, "role": run.role, **sizes})
    training = [(row["predicted_bytes"], row["measured_bytes"]) for row in memory if row["role"] == "train"]
    predicted, measured = min(training, default=(0.0, 0.0))
    for row in memory:
        row["predicted_bytes"] += max(0.0, measured - predicted)
        row["error_percent"] = 100 * (row["predicted_bytes"] / row["measured_bytes"] - 1)
    return {"memory": memory, "stand_ins": stand_ins}


def study_text(figures: Row) -> str:
    """All tables, one variant after the other."""
    parts = [f"note: {note}" for note in figures["notes"]]
    for name, of in figures["variants"].items():
        parts.append(f"== {name}: {of['hardware']}, {of['num_training_ops']} ops taught ==")
        parts += [f"note: {note}" for note in of["notes"]]
        columns = {"held-out ops": "name", "rows": "rows", "MAPE %": "mape", "median %": "median", "p90 %": "p90",
                   "from 50 us, MAPE %": "mape_over_50us"}  # fmt: skip
        parts.append(table_of([{"name": kind, **sums} for kind, sums in of["ops"].items()], columns))
        parts.append("held-out steps: none" if of["steps"] is None else of["steps"]["text"])
        gigabytes: dict[str, str | Column] = {
            "peak memory": "run",
            "role": "role",
            "measured GB": lambda row: Number(row["measured_bytes"] / 1e9, 3),
            "predicted GB": lambda row: Number(row["predicted_bytes"] / 1e9, 3),
            "error %": "error_percent",
        }
        parts.append(table_of(of["memory"], gigabytes) if of["memory"] else "peak memory: a CPU counts none")
        if of["stand_ins"]:
            columns = {"stand-ins: one rank of": "run", "measured ms": "measured_s", "predicted ms": "predicted_s",
                       "error %": "error_percent"}  # fmt: skip
            parts.append(table_of(of["stand_ins"], columns))
    return "\n\n".join([*parts, f"took {figures['seconds']:.0f} s here"])


def run(options: argparse.Namespace) -> tuple[Any, str]:
    """Write the plans, or all of it."""
    out, planned = options.out.resolve(), {key: getattr(options, key) for key in ("device", "minutes", "hardware")}
    if options.plan_only:
        text = write_plans(out, **planned)
        return {"out": str(out), "text": text}, text
    figures = run_study(out, **planned)
    return figures, figures.pop("text")


OPTIONS: Options = {
    "--out": {"type": Path, "default": Path("runs/one-gpu"), "help": "folder of everything; resumed"},
    "--plan-only": {"action": "store_true", "help": "write DIR/collections/*/plan.json and stop"},
    "--device": {"choices": ("auto", "cpu", "cuda"), "default": "auto", "help": "of new plans"},
    "--hardware": {"default": "", "metavar": "NAME", "help": "GPU of new plans, as jobs call it; h200-sxm-141gb"},
    "--minutes": {"type": float, "help": "of measuring, for new plans: 10 on a GPU, 3 on a CPU"},
}
STUDY = Study("one-gpu", __doc__ or "", run, OPTIONS)
