"""What verbs print of jobs, predictors and configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import shorten
from stepsight.dataset.configs.formats import ConfigJob
from stepsight.dataset.configs.key_table import ConfigText
from stepsight.dataset.job.frameworks import LIBRARIES
from stepsight.dataset.job.job import Job
from stepsight.experiments.reports.text_table import Column, Number, table, table_of
from stepsight.training.corrections.intervals import EXTRAPOLATED_SHARE, seconds_text

if TYPE_CHECKING:
    from stepsight.training.prediction.prediction import Prediction
    from stepsight.training.predictor.predictor import Predictor

TIGHT = "tight: the allocator's usual slack does not fit"


def flops_text(flops_per_s: float) -> str:
    """``167 TFLOP/s`` or ``43 GFLOP/s``."""
    return f"{flops_per_s / 1e12:.0f} TFLOP/s" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:.0f} GFLOP/s"


def _prediction_text(told: Mapping[str, Any], head: Sequence[str], speed: str, fullest: str) -> str:
    """What the predictions of a job and of a captured program have in common, as text."""
    whole, memory, outside = told["iteration_time_s"], told["memory"], told["unsupported"]
    causes = [
        [cause, seconds_text(seconds), Number(100 * seconds / whole)]
        for cause, seconds in told["breakdown"].items()
        if seconds > 1e-6 * whole
    ]
    extrapolated = told["unsupported_share"] > EXTRAPOLATED_SHARE
    if outside:
        more = f"; {len(outside) - 1} more (--json lists all)" if len(outside) > 1 else ""
        part = f"{100 * told['unsupported_share']:.0f} % of the time"
        where = "is spent in ops or messages outside the measured range"
        outside = [f"{part} {where}: {shorten(outside[0], 200)}{more}"]
    lines = [
        *(f"extrapolated: {text}" for text in outside if extrapolated),
        *head,
        f"iteration  {seconds_text(whole)}   interval {seconds_text(told['low_s'])} to {seconds_text(told['high_s'])}",
        table(["where the time goes", "time", "%"], causes),
        f"speed      {speed}",
        f"memory     {memory['peak_bytes'] / 1e9:.2f} GB of {memory['capacity_bytes'] / 1e9:.2f} GB on the fullest "
        f"{fullest}" + (f"; {TIGHT}" if memory.get("tight") else ""),
        *(f"warning: {text}" for text in told["warnings"]),
    ]
    if memory["fits"] is False:
        lines.append(f"does not fit: {memory['reason']}")
    lines += [f"outside    {text}" for text in outside if not extrapolated]
    return "\n".join(lines)


def prediction_report(job: Job, prediction: Prediction) -> dict[str, Any]:
    """Time, interval, breakdown and memory of one job."""
    profile, facts = job.profile, ("kernels", "container", *LIBRARIES)
    head = [f"job        {job.name} on {job.cluster.num_devices} x {job.hardware_name}, fabric {job.fabric.name}"]
    if profile is not None:
        habits = f"{profile.name} ({profile.of})" if profile.of else profile.name
        head.append(f"framework  {job.framework}: profile {habits} sets what the job file leaves open")
    head.append(f"source     {prediction.source}")
    if any(getattr(job.execution, name) for name in facts):
        head.append(f"software   {prediction.software_used}")
    if prediction.published is not None:
        head.append(f"published  {prediction.published}")
    if prediction.change is not None:
        head.append(f"change     {prediction.change.text}")
    achieved, peak = prediction.mfu * prediction.peak_flops, flops_text(prediction.peak_flops)
    speed = (
        f"{prediction.tokens_per_s:,.0f} {job.unit}/s, {flops_text(achieved)} per device: MFU "
        f"{100 * prediction.mfu:.1f} %, HFU {100 * prediction.hfu:.1f} % of {peak} ({job.batch.precision})"
    )
    told = prediction.to_dict()
    return {**told, "text": _prediction_text(told, head, speed, "stage")}


def program_text(told: Mapping[str, Any]) -> str:
    ranks = ", ".join(map(str, told["ranks"]))
    head = [
        f"script     {told['job']} on {told['world_size']} x {told['hardware']}, captured ranks {ranks}",
        f"source     {told['source']}",
    ]
    tensors = max(rank["tensors"] for rank in told["memory"]["stages"])
    fullest = f"rank: tensors {tensors / 1e9:.2f} GB, the rest is the allocator's and the device's own"
    return _prediction_text(told, head, f"MFU {100 * told['mfu']:.1f} %, HFU {100 * told['hfu']:.1f} %", fullest)


def explanation_report(job: Job, prediction: Prediction, top: int) -> dict[str, Any]:
    """Sensitivity of the time to ops and collectives."""
    rows, halves = prediction.explain(top), prediction.doubts.halves
    whole = prediction.iteration_time_s
    columns: dict[str, Column] = {
        "op or collective": lambda row: str(row.work),
        "times on the critical path": lambda row: Number(row.count, 0),
        "each": lambda row: f"{row.seconds * 1e6:.1f} us",
        "90 % interval, %": lambda row: " to ".join(
            f"{100 * math.expm1(sign * halves[row.work]):+.0f}" for sign in (-1, 1)
        ),
        "% of the time": lambda row: 100 * row.share,
        "halving it saves": lambda row: seconds_text(row.halved_s),
        "%": lambda row: 100 * row.halved_s / whole,
    }
    text = f"{job.name}: {seconds_text(whole)}\n{table_of(rows, columns)}"
    total = 100 * math.expm1(prediction.doubts.total)
    text += f"\nthe doubts about all ops and collectives add up to {total:.1f} % of the iteration"
    launches = prediction.simulation.launches_share
    if launches > 0.01:
        text += f"\nthe host's launches are {100 * launches:.1f} % of the critical path: faster ops do not shorten them"
    text += "" if prediction.published is None else f"\n{prediction.published}"
    text += "".join(f"\nwarning: {warning}" for warning in prediction.warnings)
    told = {
        "job": job.name,
        "iteration_time_s": whole,
        "launches_share": launches,
        "doubt_log": prediction.doubts.total,
    }
    told |= {} if prediction.published is None else {"published": prediction.published.to_dict()}
    values = [{**row.to_dict(), "half_width_log": halves[row.work]} for row in rows]
    return {**told, "sensitivities": values, "text": text}


def training_report(predictor: Predictor, out: Path) -> dict[str, Any]:
    """Errors per op family of a new predictor."""
    manifest = predictor.manifest
    metrics = manifest.get("metrics", {})
    text = f"predictor {out} for {predictor.hardware.name}"
    told = {"predictor": str(out), "hardware": predictor.hardware.name, "metrics": metrics}
    if "trained_shapes" not in manifest:
        cells = [[name, Number(value, 2)] for name, value in sorted(metrics.items()) if isinstance(value, int | float)]
        return {**told, "text": f"{text}\n{table(['metric', 'value'], cells)}"}
    held_out = manifest["held_out"]
    text += f": {manifest['num_ops']} ops, {manifest['num_collectives']} collectives\n"
    if held_out:
        rows = [{"family": name, **figures} for name, figures in held_out.items()]
        names = {"family": "family", "rows": "rows", "mean error %": "mape", "median": "median", "p90": "p90"}
        text += f"a fifth of the shapes, held out:\n{table_of(rows, names)}"
    else:
        text += f"judge it: stepsight evaluate TABLE.parquet --predictor {out}"
    text += "".join(f"\nwarning: {warning}" for warning in manifest.get("warnings", ()))
    keys = ("num_ops", "num_collectives", "software", "collective_library", "skipped", "warnings")
    used = {key: manifest[key] for key in keys if key in manifest}
    return {**told, **used, "held_out": held_out, "text": text}


def demo_text(summary: dict[str, Any]) -> str:
    """The demo's summary as tables."""
    columns: dict[str, str | Column] = {
        "run": "job",
        "measured": lambda row: seconds_text(row["measured_s"]),
        "predicted": lambda row: seconds_text(row["predicted_s"]),
        "interval": lambda row: f"{seconds_text(row['low_s'])} to {seconds_text(row['high_s'])}",
        "error %": "error_percent",
        "repeat error %": "repeat_percent",
    }
    gnn, best = summary["gnn"], summary["search"]["best"]
    strategy = " ".join(f"{key}={best[key]}" for key in ("tp", "pp", "dp", "micro_batch", "zero_stage", "recompute"))
    return "\n".join(
        [
            "held-out runs (no training run had their shapes):",
            table_of(summary["heldout"], columns),
            "repeat error: how far one repeat of the measurement lies from the others; errors below it are noise",
            f"iteration time: MAPE {summary['mape']:.1f} %, mean repeat error {summary['floor']:.1f} %, "
            f"Spearman {summary['spearman']:.3f}, "
            f"{summary['coverage']:.0f} % of the runs lie in their intervals",
            f"ops in context: error {gnn['op_error_regressor']:.1f} % by regressors alone, "
            + (f"{gnn['op_error_with_gnn']:.1f} % with the {gnn['model']}" if gnn["model"] else "used here"),
            f"search: {strategy}: {seconds_text(best['iteration_time_s'])} predicted, "
            f"best of {summary['search']['evaluated']} strategies on {summary['search']['devices']} devices",
            f"MLflow run {summary['mlflow_run_id']}; took {summary['seconds']:.0f} s",
        ]
    )


def config_text(read: ConfigJob) -> str:
    """The job, and tables of what was mapped and assumed."""
    told = f"not whole: no configuration states {', '.join(read.missing)}"
    if read.read is not None:
        told = f"{read.job.name} on {read.job.cluster.num_devices} x {read.job.cluster.hardware}"
    parts = [f"job     {told}\nformat  {', '.join(read.formats)}"]
    for what, keys, why, texts in (
        ("mapped", read.mapped, "from", read.sources),
        ("assumed", read.assumed, "because", read.reasons),
    ):
        if keys:
            rows = [(key, _shown(value), texts.get(key, "")) for key, value in keys.items()]
            parts.append(table((what, "value", why), rows))
    if read.ignored:
        parts.append("\n  ".join(["ignored", *read.ignored]))
    return "\n\n".join(parts)


def written_text(written: ConfigText, name: str) -> str:
    """What a written configuration does not express, and what remains to be done."""
    lines = [f"# {note}" for note in written.notes]
    lines += [f"# not expressed by {name}: {text}" for text in written.ignored]
    return "\n".join(lines) or f"# {name} expresses all of the job"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
