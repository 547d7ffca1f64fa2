"""What verbs print of jobs, predictors and configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import shorten
from stepsight.dataset.configs.formats import ConfigJob
from stepsight.dataset.configs.key_table import ConfigText
from stepsight.dataset.job.frameworks import LIBRARIES
from stepsight.dataset.job.job import Job
from stepsight.experiments.reports.text_table import Column, Columns, Number, table, table_of
from stepsight.training.corrections.intervals import EXTRAPOLATED_SHARE, LARGE_LOG, seconds_text
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
    profile, told = job.profile, prediction.to_dict()
    of = f" ({profile.of})" if profile and profile.of else ""
    stated = any(getattr(job.execution, name) for name in ("kernels", "container", *LIBRARIES))
    facts = {
        "job": f"{job.name} on {job.cluster.num_devices} x {job.hardware_name}, fabric {job.fabric.name}",
        "framework": profile and f"{job.framework}: profile {profile.name}{of} sets what the job file leaves open",
        "source": prediction.source,
        "software": prediction.software_used if stated else "",
        "release": prediction.software_used.release,
        "published": prediction.published,
        "change": prediction.change and prediction.change.text,
    }
    achieved, peak = prediction.mfu * prediction.peak_flops, flops_text(prediction.peak_flops)
    shares = f"MFU {100 * prediction.mfu:.1f} %, HFU {100 * prediction.hfu:.1f} % of {peak} ({job.batch.precision})"
    speed = f"{prediction.tokens_per_s:,.0f} {job.unit}/s, {flops_text(achieved)} per device: {shares}"
    head = [f"{name:<11}{fact}" for name, fact in facts.items() if fact]
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
    rows, doubts, published = prediction.explain(top), prediction.doubts, prediction.published
    whole, launches = prediction.iteration_time_s, prediction.simulation.launches_share
    ends = {work: [f"{100 * math.expm1(sign * half):+.0f}" for sign in (-1, 1)] for work, half in doubts.halves.items()}
    ends |= {work: ["over a factor of 10"] for work, half in doubts.halves.items() if half > LARGE_LOG}
    columns: dict[str, Column] = {
        "op or collective": lambda row: str(row.work),
        "times on the critical path": lambda row: Number(row.count, 0),
        "each": lambda row: f"{row.seconds * 1e6:.1f} us",
        "90 % interval, %": lambda row: " to ".join(ends[row.work]),
        "% of the time": lambda row: 100 * row.share,
        "halving it saves": lambda row: seconds_text(row.halved_s),
        "%": lambda row: 100 * row.halved_s / whole,
    }
    low, high = seconds_text(prediction.low_s), seconds_text(prediction.high_s)
    lines = [
        f"{job.name}: {seconds_text(whole)}",
        table_of(rows, columns),
        f"the doubts about all ops and collectives add up to {100 * math.expm1(doubts.total):.1f} % of the iteration; "
        f"the interval of the whole, {low} to {high}, is not their sum",
    ]
    if launches > 0.01:
        share = f"{100 * launches:.1f} % of the critical path"
        lines.append(f"the host's launches are {share}: faster ops do not shorten them")
    lines += [str(published)] * (published is not None)
    told = {"job": job.name, "iteration_time_s": whole, "launches_share": launches, "doubt_log": doubts.total}
    told |= {} if published is None else {"published": published.to_dict()}
    values = [{**row.to_dict(), "half_width_log": doubts.halves[row.work]} for row in rows]
    text = "\n".join([*lines, *(f"warning: {warning}" for warning in prediction.warnings)])
    return {**told, "sensitivities": values, "text": text}


def training_report(predictor: Predictor, out: Path) -> dict[str, Any]:
    """Errors per op family of a new predictor."""
    manifest = predictor.manifest
    metrics, head = manifest.get("metrics", {}), f"predictor {out} for {predictor.hardware.name}"
    told = {"predictor": str(out), "hardware": predictor.hardware.name, "metrics": metrics}
    if "trained_shapes" not in manifest:
        cells = [[name, Number(value, 2)] for name, value in sorted(metrics.items()) if isinstance(value, int | float)]
        return {**told, "text": f"{head}\n{table(['metric', 'value'], cells)}"}
    held_out, lines = manifest["held_out"], [f"judge it: stepsight evaluate TABLE.parquet --predictor {out}"]
    if held_out:
        rows = [{"family": name, **figures} for name, figures in held_out.items()]
        names = {"family": "family", "rows": "rows", "mean error %": "mape", "median": "median", "p90": "p90"}
        lines = ["a fifth of the shapes, held out:", table_of(rows, names)]
    head += f": {manifest['num_ops']} ops, {manifest['num_collectives']} collectives"
    lines += [f"warning: {warning}" for warning in manifest.get("warnings", ())]
    lines += [f"left out {count}: {why}" for why, count in manifest.get("skipped", {}).items()]
    keys = ("num_ops", "num_collectives", "software", "collective_library", "skipped", "warnings")
    used = {key: manifest[key] for key in keys if key in manifest}
    return {**told, **used, "held_out": held_out, "text": "\n".join([head, *lines])}


def demo_text(summary: dict[str, Any]) -> str:
    """The demo's summary as tables."""
    columns: Columns = {
        "run": "job",
        "measured": lambda row: seconds_text(row["measured_s"]),
        "predicted": lambda row: seconds_text(row["predicted_s"]),
        "interval": lambda row: f"{seconds_text(row['low_s'])} to {seconds_text(row['high_s'])}",
        "error %": "error_percent",
        "repeat error %": "repeat_percent",
    }
    gnn, search, best = summary["gnn"], summary["search"], summary["search"]["best"]
    strategy = " ".join(f"{key}={best[key]}" for key in ("tp", "pp", "dp", "micro_batch", "zero_stage", "recompute"))
    used = f"{gnn['op_error_with_gnn']:.1f} % with the {gnn['model']}" if gnn["model"] else "used here"
    return f"""\
held-out runs (no training run had their shapes):
{table_of(summary["heldout"], columns)}
repeat error: how far one repeat of the measurement lies from the others; errors below it are noise
iteration time: MAPE {summary["mape"]:.1f} %, mean repeat error {summary["floor"]:.1f} %, Spearman \
{summary["spearman"]:.3f}, {summary["coverage"]:.0f} % of the runs lie in their intervals
ops in context: error {gnn["op_error_regressor"]:.1f} % by regressors alone, {used}
search: {strategy}: {seconds_text(best["iteration_time_s"])} predicted, best of {search["evaluated"]} strategies on \
{search["devices"]} devices
MLflow run {summary["mlflow_run_id"]}; took {summary["seconds"]:.0f} s"""


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
        rows = [(key, str(value).lower() if isinstance(value, bool) else str(value), texts.get(key, ""))
                for key, value in keys.items()]  # fmt: skip
        parts += [table((what, "value", why), rows)] * bool(rows)
    return "\n\n".join([*parts, *["\n  ".join(["ignored", *read.ignored])] * bool(read.ignored)])


def written_text(written: ConfigText, name: str) -> str:
    """What a written configuration does not express, and what remains to be done."""
    lines = [f"# {note}" for note in written.notes]
    lines += [f"# not expressed by {name}: {text}" for text in written.ignored]
    return "\n".join(lines) or f"# {name} expresses all of the job"
