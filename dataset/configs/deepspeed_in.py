"""DeepSpeed's JSON to how a job is trained: batch, precision, ZeRO, optimizer.

Source: deepspeed.ai/docs/config-json and DeepSpeed ``runtime/config.py``, ``runtime/zero/config.py`` (0.15 to 0.18).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import flat
from stepsight.dataset.configs.drafts import Draft, Settings

_ADAM = {"adam": "adam", "adamw": "adamw", "fusedadam": "adam"}
_MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")

_SECTIONS = {  # that DeepSpeed has as tables, and how they look
    "zero_optimization": '{"stage": 3}',
    "bf16": '{"enabled": true}',
    "bfloat16": '{"enabled": true}',
    "fp16": '{"enabled": true}',
    "optimizer": '{"type": "AdamW"}',
}


def is_deepspeed(tables: Mapping[str, Any]) -> bool:
    """Whether tables are those of DeepSpeed's JSON."""
    return "zero_optimization" in tables or (
        any(mark in tables for mark in _MARKS) and "distributed_type" not in tables
    )


def read_deepspeed(tables: Mapping[str, Any], draft: Draft) -> None:
    """Fill a draft; values that are ``"auto"`` are left to other configurations.

    Raises:
        JobError: If a value stands where DeepSpeed has a table, or both bf16 and fp16 are enabled.
    """
    for name in _SECTIONS:
        if tables.get(name) is not None and not isinstance(tables[name], Mapping):
            raise JobError(f"{name} must be a table, as {_SECTIONS[name]}, got {tables[name]!r:.80}")
    settings = Settings({key: value for key, value in flat(tables).items() if value != "auto"})
    _batch(settings, draft)
    _precision(settings, draft)
    _zero(settings, draft)
    kind = settings.word("optimizer.type").lower()
    if kind in _ADAM:
        draft.map("optimizer.kind", _ADAM[kind], "optimizer.type")
    elif kind:
        draft.assume("optimizer.kind", "adamw", f"a job has no optimizer {kind}")
    clip = settings.number("gradient_clipping", whole=False)
    if clip is not None:
        draft.map("optimizer.clip_grad_norm", clip > 0, "gradient_clipping")
    tp = settings.number("tensor_parallel.autotp_size")
    if tp and tp > 1:
        draft.map("parallel.tp", tp, "tensor_parallel.autotp_size")
    if settings.flag("activation_checkpointing.cpu_checkpointing"):
        draft.ignore("activation_checkpointing.cpu_checkpointing: a job offloads activations or computes them again")
    for text in settings.left():
        draft.ignore(text)


def _batch(settings: Settings, draft: Draft) -> None:
    settings.copy(
        draft, {"train_batch_size": "batch.global_batch", "train_micro_batch_size_per_gpu": "batch.micro_batch"}
    )
    steps = settings.positive("gradient_accumulation_steps")
    if steps:
        draft.facts["accumulation"] = steps
        draft.ignore(f"gradient_accumulation_steps {steps}: follows from the batch")
    total, micro = draft.get("batch.global_batch"), draft.get("batch.micro_batch")
    if total and micro and steps and total % (micro * steps) == 0:
        draft.facts["replicas"] = total // (micro * steps)


def _precision(settings: Settings, draft: Draft) -> None:
    bf16 = settings.flag("bf16.enabled") or settings.flag("bfloat16.enabled")
    if bf16 and settings.flag("fp16.enabled"):
        raise JobError("only one of bf16.enabled and fp16.enabled must be true, got both")
    for name, precision in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if settings.flag(f"{name}.enabled"):
            draft.map("batch.precision", precision, f"{name}.enabled")
            break
    else:
        if settings.find("bf16.enabled", "bfloat16.enabled", "fp16.enabled"):
            draft.map("batch.precision", "fp32", "bf16 and fp16 are not enabled")
    wide = settings.word("data_types.grad_accum_dtype")
    if wide:
        draft.map("parallel.gradient_dtype", "fp32" if wide == "fp32" else "model", "data_types.grad_accum_dtype")


def _zero(settings: Settings, draft: Draft) -> None:
    stage = settings.number("zero_optimization.stage")
    if stage is not None:
        draft.map("parallel.zero_stage", stage, "zero_optimization.stage")
    else:
        draft.assume("parallel.zero_stage", 0, "DeepSpeed's default")
    overlap = settings.flag("zero_optimization.overlap_comm")
    if overlap is not None:
        draft.map("parallel.overlap_grad_reduce", overlap, "zero_optimization.overlap_comm")
    else:
        draft.assume("parallel.overlap_grad_reduce", stage == 3, "DeepSpeed's default")
    bucket = settings.positive("zero_optimization.reduce_bucket_size")
    if bucket:
        size = bucket * (4 if draft.get("batch.precision") == "fp32" else 2) / 2**20
        draft.map("parallel.bucket_mbytes", float(f"{size:.6g}"), f"zero_optimization.reduce_bucket_size {bucket}")
    device = settings.word("zero_optimization.offload_optimizer.device")
    if device and device != "none":
        draft.map("optimizer.offload", True, f"zero_optimization.offload_optimizer.device {device}")
    shard = settings.number("zero_optimization.mics_shard_size")
    if shard and shard > 1:
        draft.map("parallel.dp_shard", shard, "zero_optimization.mics_shard_size")
    scatter = settings.flag("zero_optimization.reduce_scatter")
    if scatter is not None:
        draft.map("parallel.reduce_scatter", scatter, "zero_optimization.reduce_scatter")
