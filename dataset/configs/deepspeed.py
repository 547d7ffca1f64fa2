"""DeepSpeed's JSON: batch, precision, ZeRO and optimizer of a job.

Source: deepspeed.ai/docs/config-json and DeepSpeed ``runtime/config.py``, ``runtime/zero/config.py`` (0.15 to 0.18).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import flat
from stepsight.dataset.configs.drafts import ConfigFile, Draft, Reading
from stepsight.dataset.configs.key_table import CLIP, OTHER, ConfigText, Conversion, JobView, Row, read_rows, write_rows
from stepsight.dataset.job.job import Job

_MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
_SECTIONS = {  # that DeepSpeed has as tables, and how they look
    "zero_optimization": '{"stage": 3}',
    "bf16": '{"enabled": true}',
    "bfloat16": '{"enabled": true}',
    "fp16": '{"enabled": true}',
    "optimizer": '{"type": "AdamW"}',
}
_ZERO = "zero_optimization."


def is_deepspeed(file: ConfigFile) -> bool:
    """Whether tables are those of DeepSpeed's JSON."""
    tables = file.tables
    return "zero_optimization" in tables or (
        any(mark in tables for mark in _MARKS) and "distributed_type" not in tables
    )


def read_deepspeed(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft; values that are ``"auto"`` are left to other configurations.

    Raises:
        JobError: If a value stands where DeepSpeed has a table, or both bf16 and fp16 are enabled.
    """
    tables = file.tables
    for name, example in _SECTIONS.items():
        if tables.get(name) is not None and not isinstance(tables[name], Mapping):
            raise JobError(f"{name} must be a table, as {example}, got {tables[name]!r:.80}")
    settings = {key: value for key, value in flat(tables).items() if value != "auto"}
    reading = Reading(draft, settings, default="DeepSpeed's default")
    read_rows(_ROWS, reading)
    if reading.flag("activation_checkpointing.cpu_checkpointing"):
        reading.ignore("activation_checkpointing.cpu_checkpointing: a job offloads activations or computes them again")
    reading.ignore_rest()


def write_deepspeed(job: Job) -> ConfigText:
    """Write how a job is trained as DeepSpeed's JSON."""
    view = JobView(job)
    write_rows(_ROWS, view)
    view.expressed("parallel.dp", "cluster.nodes", "cluster.devices_per_node")
    text = json.dumps(view.tables(), indent=2) + "\n"
    note = "the model's sizes stand in its config.json: write huggingface too"
    return view.text(text, ".json", note, sections=TRAINING)


TRAINING = ("parallel.", "batch.", "cluster.", "optimizer.", "execution.")  # sections of a job beside the model's


def _read_steps(reading: Reading) -> None:
    steps = reading.positive("gradient_accumulation_steps")
    if steps:
        reading.facts["accumulation"] = steps
        reading.ignore(f"gradient_accumulation_steps {steps}: follows from the batch")
    total, micro = reading.get("batch.global_batch"), reading.get("batch.micro_batch")
    if total and micro and steps and total % (micro * steps) == 0:
        reading.facts["replicas"] = total // (micro * steps)


def _write_steps(view: JobView) -> None:
    view.put(gradient_accumulation_steps=view.job.num_micro_batches)


def _read_precision(reading: Reading) -> None:
    names = {"bf16.enabled": "bf16", "bfloat16.enabled": "bf16", "fp16.enabled": "fp16"}
    enabled = [name for name in names if reading.flag(name)]
    if len({names[name] for name in enabled}) > 1:
        raise JobError("only one of bf16.enabled and fp16.enabled must be true, got both")
    if enabled:
        reading.map("batch.precision", names[enabled[0]], enabled[0])
    elif reading.find(*names):
        reading.map("batch.precision", "fp32", words="bf16 and fp16 are not enabled")


def _write_precision(view: JobView) -> None:
    precision = view["batch.precision"]
    view.put(bf16={"enabled": precision in ("bf16", "fp8")}, fp16={"enabled": precision == "fp16"})
    if precision not in ("bf16", "fp16", "fp32"):
        view.unexpressed("batch.precision")


def _write_gradients(view: JobView) -> None:
    kind, precision = view["parallel.gradient_dtype"], view.job.batch.precision
    if kind in ("model", "model-fused"):
        view.put("data_types.", grad_accum_dtype="bf16" if precision == "fp8" else view.job.batch.dtype)
    elif kind == "fp32":
        view.put("data_types.", grad_accum_dtype="fp32")
    elif kind:
        view.unexpressed("parallel.gradient_dtype")


def _read_zero(reading: Reading) -> None:
    stage = reading.number(f"{_ZERO}stage")
    reading.map("parallel.zero_stage", stage or 0, f"{_ZERO}stage")
    overlap = reading.flag(f"{_ZERO}overlap_comm")
    reading.map("parallel.overlap_grad_reduce", stage == 3 if overlap is None else overlap, f"{_ZERO}overlap_comm")
    bucket = reading.positive(f"{_ZERO}reduce_bucket_size")
    if bucket:
        size = bucket * (4 if reading.get("batch.precision") == "fp32" else 2) / 2**20
        words = f"{_ZERO}reduce_bucket_size {bucket}"
        reading.map("parallel.bucket_mbytes", float(f"{size:.6g}"), words=words)
    device = reading.word(f"{_ZERO}offload_optimizer.device")
    if device and device != "none":
        reading.map("optimizer.offload", True, words=f"{_ZERO}offload_optimizer.device {device}")


def _write_zero(view: JobView) -> None:
    size = 4 if view.job.batch.precision == "fp32" else 2
    view.put(_ZERO, stage=view["parallel.zero_stage"], overlap_comm=view["parallel.overlap_grad_reduce"])
    view.put(_ZERO, reduce_bucket_size=round(view["parallel.bucket_mbytes"] * 2**20 / size))
    if view["optimizer.offload"]:
        view.put(f"{_ZERO}offload_optimizer.", device="cpu")


_DEGREE = Conversion(lambda degree: int(degree) if degree > 1 else None, lambda degree: degree)
_GRADIENTS = {"fp32": "fp32", OTHER: "model"}
_ROWS = (
    Row("batch.global_batch", "train_batch_size"),
    Row("batch.micro_batch", "train_micro_batch_size_per_gpu"),
    Row("batch.global_batch", read=_read_steps, write=_write_steps),
    Row("batch.precision", read=_read_precision, write=_write_precision),
    Row("parallel.gradient_dtype", "data_types.grad_accum_dtype", _GRADIENTS, write=_write_gradients),
    Row("parallel.zero_stage", read=_read_zero, write=_write_zero),
    Row("parallel.dp_shard", f"{_ZERO}mics_shard_size", _DEGREE, omit=True),
    Row("parallel.reduce_scatter", f"{_ZERO}reduce_scatter"),
    Row("optimizer.kind", "optimizer.type", {"AdamW": "adamw", "Adam": "adam", "FusedAdam": "adam"}),
    Row("optimizer.clip_grad_norm", "gradient_clipping", CLIP),
    Row("parallel.tp", "tensor_parallel.autotp_size", _DEGREE, omit=True),
)
